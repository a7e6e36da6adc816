// Operands of the bfloat16 matrix products, for both AVX512-BF16 and AMX.
//
// Both instructions multiply pairs: 32-bit lane n of the result gains a.low * b.low + a.high * b.high, where a Pair
// holds two bfloat16 that are neighbours along the contraction. A product C = A B therefore takes
//   A, the broadcast operand, as [row][pair]: these are simply the rows of a row-major matrix; and
//   B, the lane operand, as [pair][lane].
// fetch copies rows of the caller's matrix to a zero-filled tile, which is operand A of that matrix; the other operands
// are rearrangements of such a tile.
#pragma once

// GCC 12 warns of a deliberately undefined operand in its own header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "attention/attention.h"

namespace cmab::cpu {
namespace {

using Pair = uint32_t;

constexpr double kLog2e64 = 1.4426950408889634074;
constexpr float kLog2e = static_cast<float>(kLog2e64);
constexpr int kTileKeys = static_cast<int>(kKeyTile);

constexpr int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A mask of the first `count` of 16 lanes, clamped to 0 .. 16.
inline __mmask16 first16(int64_t count) {
  return static_cast<__mmask16>(count <= 0 ? 0 : count >= 16 ? 0xffff : (1u << count) - 1);
}

// Hands out 64-byte-aligned buffers of a workspace; given null, it only counts the bytes needed.
class Carver {
 public:
  explicit Carver(const void* workspace) : at_(reinterpret_cast<uintptr_t>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    T* buffer = reinterpret_cast<T*>(at_);
    at_ += static_cast<uintptr_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return buffer;
  }

  size_t bytes() const { return at_; }  // meaningful only for a null workspace

 private:
  uintptr_t at_;
};

// The present keys of the tile that starts at `first`: bit i is set if key first + i takes part.
inline uint64_t present_keys(const Keys& keys, int64_t first) {
  const int64_t count = smaller(keys.count - first, kTileKeys);
  uint64_t present = ~uint64_t{0} >> (kTileKeys - count);
  if (keys.ignored != nullptr) {
    const uint8_t* ignored = keys.ignored + first * keys.ignored_stride;
    for (int64_t i = 0; i < count; ++i) {
      if (ignored[i * keys.ignored_stride] != 0) present &= ~(uint64_t{1} << i);
    }
  }
  if (keys.bias != nullptr) {
    const float* bias = static_cast<const float*>(keys.bias) + first * keys.bias_stride;
    for (int64_t i = 0; i < count; ++i) {
      if (bias[i * keys.bias_stride] == -__builtin_inff()) present &= ~(uint64_t{1} << i);
    }
  }
  return present;
}

// Copies rows from `first` on of a bfloat16 matrix to tile[rows][pairs], with zeros beyond its width and in rows that
// are not present. It stores whole vectors, so up to kSlack pairs after the tile are overwritten. It prefetches the
// rows that follow.
constexpr int64_t kSlack = 16;

inline void fetch(const Matrix& matrix, int64_t first, int64_t width, uint64_t present, int64_t rows, int64_t pairs,
                  Pair* tile) {
  const uint16_t* row = static_cast<const uint16_t*>(matrix.data) + first * matrix.row_stride;
  const int64_t whole = width / 32 * 16;  // pairs in whole vectors
  const __mmask32 rest = (1u << width % 32) - 1;
  for (int64_t r = 0; r < rows; ++r, tile += pairs, row += matrix.row_stride) {
    const bool kept = (present >> r & 1) != 0;
    if (kept && matrix.col_stride != 1) {
      const auto entry = [&](int64_t c) { return c < width ? Pair{row[c * matrix.col_stride]} : Pair{0}; };
      for (int64_t p = 0; p < pairs; ++p) tile[p] = entry(2 * p) | entry(2 * p + 1) << 16;
      continue;
    }
    const uint16_t* ahead = row + rows * matrix.row_stride;
    for (int64_t p = 0; p < whole; p += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 2 * p), _MM_HINT_T0);
      _mm512_storeu_si512(tile + p, _mm512_maskz_loadu_epi16(kept ? ~0u : 0, row + 2 * p));
    }
    if (whole < pairs) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 2 * whole), _MM_HINT_T0);
      _mm512_storeu_si512(tile + whole, _mm512_maskz_loadu_epi16(kept ? rest : 0, row + 2 * whole));
    }
  }
}

// Interleaves the 32 entries of rows 2i and 2i+1: the pairs of columns 0 .. 15, or (kHalf = 1) of columns 16 .. 31.
template <int kHalf>
inline __m512i pair_rows(__m512i even, __m512i odd) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i order = _mm512_add_epi16(_mm512_load_si512(kOrder), _mm512_set1_epi16(16 * kHalf));
  return _mm512_permutex2var_epi16(even, order, odd);
}

// Columns c .. c + 15 of rows 2i and 2i+1 of a tile as pairs; columns beyond the tile's are undefined.
inline __m512i pair_columns(const Pair* tile, int64_t pairs, int64_t i, int64_t c) {
  const __m256i* even = reinterpret_cast<const __m256i*>(tile + 2 * i * pairs + c / 2);
  const __m256i* odd = reinterpret_cast<const __m256i*>(tile + (2 * i + 1) * pairs + c / 2);
  return pair_rows<0>(_mm512_castsi256_si512(_mm256_loadu_si256(even)),
                      _mm512_castsi256_si512(_mm256_loadu_si256(odd)));
}

// Transposes a 16 x 16 square of 32-bit elements in registers, by blocks of 2, 4, 8 and 16.
inline void transpose16(__m512i (&row)[16]) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
    }
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; ++j) {
      other[i + j] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0x88);
      other[i + j + 4] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    row[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    row[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
  }
}

// Transposes tile[rows][pairs] to out[pairs][rows], a lane operand; `rows` is a multiple of 16.
inline void rows_to_lanes(const Pair* tile, int64_t rows, int64_t pairs, Pair* out) {
  for (int64_t p = 0; p < pairs; p += 16) {
    for (int64_t r = 0; r < rows; r += 16) {
      __m512i square[16];
      for (int i = 0; i < 16; ++i) square[i] = _mm512_maskz_loadu_epi32(first16(pairs - p), tile + (r + i) * pairs + p);
      transpose16(square);
      for (int i = 0; i < 16 && p + i < pairs; ++i) _mm512_storeu_si512(out + (p + i) * rows + r, square[i]);
    }
  }
}

// Turns tile[rows][pairs] into out[columns][rows / 2], the transposed matrix as a broadcast operand. `rows` is a
// multiple of 32; columns beyond the tile's are undefined.
inline void columns_to_rows(const Pair* tile, int64_t rows, int64_t pairs, int64_t columns, Pair* out) {
  for (int64_t c = 0; c < columns; c += 16) {
    for (int64_t r = 0; r < rows / 2; r += 16) {
      __m512i square[16];
      for (int i = 0; i < 16; ++i) square[i] = pair_columns(tile, pairs, r + i, c);
      transpose16(square);
      for (int i = 0; i < 16 && c + i < columns; ++i) _mm512_storeu_si512(out + (c + i) * (rows / 2) + r, square[i]);
    }
  }
}

// 2^t by a minimax polynomial of the fraction, exact at 0, with a relative error of 3e-6, a thousandth of bfloat16's
// rounding. Exactly 0 at -infinity; underflows gradually; keeps NaN.
inline __m512 exp2_lanes(__m512 t) {
  const __m512 fraction = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 power = _mm512_set1_ps(0x1.b7f738p-7f);
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.abf866p-5f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.ee2452p-3f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.62d6c6p-1f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(power, t);
}

// Rounds 32 floats to bfloat16, `low` in the lower half.
inline __m512i round_to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// A score is the product of a packed query and a key; the logit is factor * score in natural units. The sign of the
// scale is applied to the packed queries, which is exact, so that the largest score is the largest logit. A scale of 0
// becomes a factor of 1 with queries of 0.
inline float score_factor(const Shape& shape) {
  const float scale = static_cast<float>(shape.scale);
  return scale == 0.0f ? 1.0f : scale < 0.0f ? -scale : scale;
}

// The factor that turns a score into a logit in natural units. Scores with a bias are logits: see
// add_bias.
inline float logit_unit(const Shape& shape) { return shape.biased ? 1.0f : score_factor(shape); }

// Turns scores[tile][lanes], `leading` apart, into logits: each is scaled, and the bias of its key is added.
inline void add_bias(const Shape& shape, const Keys& keys, int64_t first, int64_t tile, int64_t lanes, int64_t leading,
                     float* scores) {
  if (keys.bias == nullptr) return;
  const float* bias = static_cast<const float*>(keys.bias) + first * keys.bias_stride;
  const __m512 factor = _mm512_set1_ps(score_factor(shape));
  for (int64_t k = 0; k < smaller(keys.count - first, tile); ++k, scores += leading) {
    const __m512 of_key = _mm512_set1_ps(bias[k * keys.bias_stride]);
    for (int64_t i = 0; i < lanes; i += 16)
      _mm512_storeu_ps(scores + i, _mm512_fmadd_ps(_mm512_loadu_ps(scores + i), factor, of_key));
  }
}

inline void apply_sign(const Shape& shape, int64_t pairs, Pair* packed) {
  const float scale = static_cast<float>(shape.scale);
  if (scale > 0.0f) return;
  const __m512 sign = _mm512_set1_ps(scale == 0.0f ? 0.0f : -1.0f);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (int64_t p = 0; p < pairs; p += 16) {
    const __mmask16 mask = first16(pairs - p);
    const __m512i pair = _mm512_maskz_loadu_epi32(mask, packed + p);
    const __m512 low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), sign);
    const __m512 high = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, upper)), sign);
    const __m512i joined = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
    _mm512_mask_storeu_epi32(packed + p, mask, joined);
  }
}

}  // namespace
}  // namespace cmab::cpu
