// The forward kernel for float32 and float64 sums, in vectors of CMAB_VECTOR_BYTES. Queries are in the lanes: the
// scores of a tile of keys are laid out as weights[key][query], so that maximum and sum run down the columns without
// cross-lane operations. With few queries, most lanes would be idle. So if widths fill whole vectors, few queries are
// processed one by one: then the lanes of products hold columns, and the lanes of weights hold keys.
#pragma once

#include "attention/attention.h"
#include "common/lanes.h"
#include "common/tile.h"

namespace cmab::cpu {
namespace {

// The largest number of vectors of a row in a register tile, and the number of rows of the tile. A tile has 24
// accumulators of 32 registers with AVX-512, and 12 of 16 elsewhere. With fewer columns it has more rows, as many as
// divide a step of keys. Functions that hold such a tile are not inlined, because the compiler would spill it if it
// stood beside other arithmetic.
constexpr int kMaxColumns = CMAB_VECTOR_BYTES == 64 ? 4 : 2;
template <int kColumns>
constexpr int kTileRows = kColumns == kMaxColumns   ? 6
                          : CMAB_VECTOR_BYTES == 64 ? 16 / kColumns
                                                    : 8;
constexpr int kBlockVectors = 4;

// Calls function(first row, constant number of rows) for steps of R rows and, at the end, of 4 rows. Together they
// cover `rows` rounded up to a multiple of 4.
template <int R, class Function>
CMAB_INLINE void for_each_step(int rows, Function function) {
  const int end = round_up(rows, 4), fours = R == 6 ? end % 3 * 4 : end % R;
  int row = 0;
  for (; row < end - fours; row += R) function(row, std::integral_constant<int, R>());
  for (; row < end; row += 4) function(row, std::integral_constant<int, 4>());
}

// A block of `kVectors` vectors of queries. If there are few queries, the smallest block that holds them is used.
template <class T, int kVectors>
struct Block {
  using V = Vector<T>;
  static constexpr int kRows = kVectors * kVectorLanes<T>;
  static constexpr int kColumns = kVectors < kMaxColumns ? kVectors : kMaxColumns;
  static constexpr int kKeys = kTileRows<kColumns>;  // keys of a register tile
};

template <class T>
constexpr int block_vectors(int rows) {
  return rows <= kVectorLanes<T> ? 1 : rows <= 2 * kVectorLanes<T> ? 2 : kBlockVectors;
}

// Calls `function` with the smallest block that holds `rows`.
template <class T, class Function>
CMAB_INLINE void with_block(int rows, Function function) {
  switch (block_vectors<T>(rows)) {
    case 1:
      return function(Block<T, 1>{});
    case 2:
      return function(Block<T, 2>{});
    default:
      return function(Block<T, kBlockVectors>{});
  }
}

template <class T>
constexpr int padded_rows(int rows) {
  return block_vectors<T>(rows) * kVectorLanes<T>;
}

// factor * x, rounded once.
template <class V>
CMAB_INLINE V scaled(V x, double factor) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(x[0]) == 4) {  // by hand, because the compiler would convert in vectors of two doubles
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return _mm256_set_m128(_mm256_cvtpd_ps(high * factor), _mm256_cvtpd_ps(low * factor));
  }
#endif
  typedef double Wide __attribute__((vector_size(lanes<V>() * sizeof(double))));
  return __builtin_convertvector(__builtin_convertvector(x, Wide) * factor, V);
}

// Does the same as pack_columns below in square blocks of registers, for rows of the compute type with contiguous
// elements.
template <class T>
__attribute__((noinline)) void pack_squares(const T* from, ptrdiff_t row_stride, int rows, int width, double factor,
                                            T* columns) {
  using V = Vector<T>;
  constexpr int kLanes = lanes<V>();
  const int stride = padded_rows<T>(rows);
  for (int row = 0; row < stride; row += kLanes)
    for (int d = 0; d < width; d += kLanes) {
      const int count = width - d < kLanes ? width - d : kLanes;
      V square[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r)
        square[r] = row + r < rows ? load_first<V>(from + (row + r) * row_stride + d, count) : V{};
      if (factor != 1)
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) square[r] = scaled(square[r], factor);
      transpose(square);
      for (int c = 0; c < count; ++c) store(columns + (d + c) * stride + row, square[c]);
    }
}

// columns[d][row] = factor * matrix[row][d], and zero past the last row.
template <class T>
__attribute__((noinline)) void pack_columns(DType dtype, const Matrix& matrix, int rows, int width, double factor,
                                            T* columns) {
  const int stride = padded_rows<T>(rows);
  with_elements<T>(dtype, matrix, [&](const auto* from) {
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (matrix.col_stride == 1) return pack_squares(from, matrix.row_stride, rows, width, factor, columns);
    for (int row = 0; row < rows; ++row)
      for (int d = 0; d < width; ++d)
        columns[d * stride + row] = T(widen(from[row * matrix.row_stride + d * matrix.col_stride]) * factor);
    for (int d = 0; d < width; ++d)
      for (int row = rows; row < stride; ++row) columns[d * stride + row] = 0;
  });
}

// out[:rows] += a' b for the columns of one register tile, over `steps` keys; `rows` is a multiple of 4.
template <class B, class T>
__attribute__((noinline)) void accumulate_rows(T* out, int rows, Tile<T> a, const T* b, int steps) {
  for_each_step<kTileRows<B::kColumns>>(rows, [&](int r, auto many) {
    accumulate<typename B::V, many, B::kColumns>(out + r * B::kRows, B::kRows, a.rows + r, 1, a.stride, b, B::kRows,
                                                 steps);
  });
}

// A partial state in memory; the sums are relative to 2^reference, where reference is a logit of the row.
template <class T>
struct State {
  T* reference;
  T* sum;
  T* acc;  // [E rounded up to 4][rows of the block]
};

template <class T>
inline State<T> state_of(int rows, const void* memory) {
  T* first = static_cast<T*>(const_cast<void*>(memory));
  const int stride = padded_rows<T>(rows);
  return {first, first + stride, first + 2 * stride};
}

// The reference of a row changes only when the largest logit exceeds it by kSlack: exp2 stays in range, and rescaling
// is rare.
constexpr int kSlack = 8;

// References may rise while a tile of keys is processed. These are the factors by which each rise rescales the earlier
// sums and weights: [rise][row], for the columns of a register tile.
template <class B, class T>
struct Rises {
  static constexpr int kRows = B::kColumns * kVectorLanes<T>;
  alignas(64) T factors[kKeyTile / 4][kRows];
  int key[kKeyTile / 4];  // the first key after each rise
  int count = 0;

  // Raises the references to `top` where `top` exceeds them by kSlack; `sums` are the sums of the tile so far. The bits
  // of a lane do not depend on its neighbours: nothing is added here, and other lanes are multiplied by 1.
  __attribute__((noinline)) void add(int first_key, T* references, const T* top, T* sums) {
    using V = typename B::V;
    for (int at = 0; at < kRows; at += lanes<V>()) {
      const V old = load<V>(references + at), seen = load<V>(top + at);
      const auto moved = seen > old + T(kSlack);
      const V next = moved ? seen : old;
      const V factor = moved ? exp2(old - next) : broadcast<V>(T(1));
      store(references + at, next);
      store(factors[count] + at, factor);
      store(sums + at, load<V>(sums + at) * factor);
    }
    key[count++] = first_key;
  }

  // Rescales the weights of the tile, once for all rises, and the sums before the tile.
  __attribute__((noinline)) void rescale(State<T> state, int column, int value_rows, T* weights) const {
    using V = typename B::V;
    for (int c = 0; c < B::kColumns; ++c) {
      const int at = (column + c) * lanes<V>();
      V factor = broadcast<V>(T(1));
      for (int rise = count - 1; rise >= 0; --rise) {
        factor *= load<V>(factors[rise] + c * lanes<V>());
        for (int k = rise ? key[rise - 1] : 0; k < key[rise]; ++k) {
          T* weight = weights + k * B::kRows + at;
          store(weight, load<V>(weight) * factor);
        }
      }
      store(state.sum + at, load<V>(state.sum + at) * factor);
      for (int e = 0; e < value_rows; ++e) {
        T* acc = state.acc + e * B::kRows + at;
        store(acc, load<V>(acc) * factor);
      }
    }
  }
};

// The reference to subtract: 0 where it is still -inf, so that exp2(-inf - 0) = 0, not NaN.
template <class V>
CMAB_INLINE V anchor(V reference) {
  return reference == -kInfinity ? V{} : reference;
}

// weights[key][row] = exp2(logit - reference) for a tile of `count` keys, and their sums, for the columns of the
// register tile that starts at `column`. Without a bias, the compiled code has not even a branch
// for it.
template <class B, bool kBiased, class T>
__attribute__((noinline)) void weigh_keys(const T* queries, int depth, Tile<T> keys, int count, State<T> state,
                                          int column, int value_rows, T* weights, const T* bias) {
  using V = typename B::V;
  constexpr int kColumns = B::kColumns, kVectorRows = lanes<V>();
  V base[kColumns], limit[kColumns], sum[kColumns] = {};
  Rises<B, T> rises;
  const auto read_references = [&] {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const V reference = load<V>(state.reference + (column + c) * kVectorRows);
      base[c] = anchor(reference);
      limit[c] = reference + T(kSlack);
    }
  };
  read_references();
  for_each_step<B::kKeys>(count, [&](int k, auto keys_of_step) {
    constexpr int kKeys = keys_of_step;
    V s[kKeys][kColumns] = {};
    multiply_add<V, kKeys, kColumns>(s, keys.rows + k * keys.stride, keys.stride, 1, queries + column * kVectorRows,
                                     B::kRows, depth);
    if constexpr (kBiased)
#pragma GCC unroll 16
      for (int r = 0; r < kKeys; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) s[r][c] += broadcast<V>(bias[k + r]);
    if (k + kKeys > count)  // unrolled: a run-time index would keep the scores in memory
#pragma GCC unroll 16
      for (int r = 0; r < kKeys; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) s[r][c] = k + r < count ? s[r][c] : broadcast<V>(T(-kInfinity));
    V top[kColumns];
    auto ahead = s[0][0] != s[0][0];
    ahead = ahead & ~ahead;
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      top[c] = s[0][c];
#pragma GCC unroll 16
      for (int r = 1; r < kKeys; ++r) top[c] = maximum(top[c], s[r][c]);
      ahead |= top[c] > limit[c];
    }
    if (__builtin_expect(any(ahead), 0)) {
      alignas(64) T seen[rises.kRows], tile_sum[rises.kRows];
      for (int c = 0; c < kColumns; ++c)
        store(seen + c * kVectorRows, top[c]), store(tile_sum + c * kVectorRows, sum[c]);
      rises.add(k, state.reference + column * kVectorRows, seen, tile_sum);
      for (int c = 0; c < kColumns; ++c) sum[c] = load<V>(tile_sum + c * kVectorRows);
      read_references();
    }
#pragma GCC unroll 16
    for (int r = 0; r < kKeys; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const V p = exp2(s[r][c] - base[c]);
        sum[c] += p;
        store(weights + (k + r) * B::kRows + (column + c) * kVectorRows, p);
      }
  });
  if (rises.count) rises.rescale(state, column, value_rows, weights);
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
    T* to = state.sum + (column + c) * kVectorRows;
    store<V>(to, load<V>(to) + sum[c]);
  }
}

// Whether there are so few queries that they are processed one by one. The accumulator of their state is [row][E].
template <class T>
inline bool few(const Shape& shape, int rows) {
  return 4 * rows <= kVectorLanes<T> && shape.key_width % kVectorLanes<T> == 0 &&
         shape.value_width % kVectorLanes<T> == 0;
}

// weights[key] = logit of one query (packed) for a tile of `count` keys, and -inf for the elements that fill up the
// last vector. Returns the largest logit.
template <bool kBiased, class T>
CMAB_INLINE T score_keys(const T* query, int depth, Tile<T> keys, int count, T* weights, const T* bias) {
  using V = Vector<T>;
  constexpr int kLanes = lanes<V>();
  V top = broadcast<V>(T(-kInfinity));
  for (int k = 0; k < count; k += kLanes) {
    V part[kLanes] = {};
    for (int d = 0; d < depth; d += kLanes) {
      const V q = load_first<V>(query + d, kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        const int row = k + r < count ? k + r : count - 1;
        part[r] += q * load_first<V>(keys.rows + row * keys.stride + d, kLanes);
      }
    }
    V logits = lane_numbers<V>() < T(count - k) ? sum_lanes(part) : broadcast<V>(T(-kInfinity));
    if constexpr (kBiased) logits += load<V>(bias + k);
    store(weights + k, logits);
    top = maximum(top, logits);
  }
  T largest = top[0];
  for (int i = 1; i < kLanes; ++i) largest = top[i] > largest ? top[i] : largest;
  return largest;
}

// acc[:E] += the sum of weights[key] values[key][:E], as four sums over every fourth key.
template <class T>
CMAB_INLINE void add_values(const T* weights, Tile<T> values, int count, int width, T* acc) {
  using V = Vector<T>;
  constexpr int kLanes = lanes<V>();
  for (int e = 0; e < width; e += kLanes) {
    V sums[4] = {};
    const auto add = [&](int k, int to) {
      sums[to] += broadcast<V>(weights[k]) * load_first<V>(values.rows + k * values.stride + e, kLanes);
    };
    int k = 0;
    for (; k + 4 <= count; k += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) add(k + i, i);
    for (; k < count; ++k) add(k, 0);
    store(acc + e, load<V>(acc + e) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
}

// Processes one query against a tile of `count` keys; `state` is the state of its row alone.
template <bool kBiased, class T>
__attribute__((noinline)) void attend_one(const T* query, int depth, Tile<T> keys, Tile<T> values, int count,
                                          State<T> state, int value_width, T* weights, const T* bias) {
  using V = Vector<T>;
  const T largest = score_keys<kBiased>(query, depth, keys, count, weights, bias);
  if (largest > *state.reference + T(kSlack)) {
    const T factor = exp2(broadcast<V>(*state.reference - largest))[0];
    *state.reference = largest;
    *state.sum *= factor;
    for (int e = 0; e < value_width; ++e) state.acc[e] *= factor;
  }
  const V base = anchor(broadcast<V>(*state.reference));
  V sum{};
  for (int k = 0; k < count; k += lanes<V>()) {
    const V p = exp2(load<V>(weights + k) - base);
    sum += p;
    store(weights + k, p);
  }
  *state.sum += sum_lanes(sum);
  add_values(weights, values, count, value_width, state.acc);
}

// The largest distance between keys, in elements, at which they are read in place. If keys are further apart, they
// compete for a few sets of the caches, so they are copied, unless they are read only once or twice.
template <class T>
inline int64_t in_place(const Shape& shape, const QueryBlock* blocks, int count) {
  const int width = shape.key_width < shape.value_width ? shape.key_width : shape.value_width;
  return count == 1 && blocks->rows <= 2 * kVectorLanes<T> ? INT64_MAX : 2 * width;
}

template <class T>
struct Forward {
  static size_t packed_bytes(const Shape& shape, int rows) {
    return sizeof(T) * size_t(padded_rows<T>(rows)) * shape.key_width;
  }
  static size_t state_bytes(const Shape& shape, int rows) {
    return sizeof(T) * size_t(padded_rows<T>(rows)) * (2 + round_up(shape.value_width, 4));
  }
  struct Scratch {
    T *key, *value, *weights, *bias;
    size_t bytes;

    Scratch(const Shape& shape, void* memory) {
      Arena arena(memory);
      key = arena.take<T>(kKeyTile * round_up(shape.key_width, 4));
      value = arena.take<T>(kKeyTile * round_up(shape.value_width, 4));
      weights = arena.take<T>(kKeyTile * kBlockVectors * kVectorLanes<T>);
      bias = arena.take<T>(kKeyTile);
      bytes = arena.used();
    }
  };
  static size_t scratch_bytes(const Shape& shape) { return Scratch(shape, nullptr).bytes; }

  // Packs the queries times scale * log2(e): logits are in base 2.
  static void pack(const Shape& shape, int rows, const Matrix& query, void* packed) {
    T* to = static_cast<T*>(packed);
    const double factor = shape.scale * kLog2E;
    if (!few<T>(shape, rows)) return pack_columns(shape.dtype, query, rows, shape.key_width, factor, to);
    with_elements<T>(shape.dtype, query, [&](const auto* from) {
      for (int row = 0; row < rows; ++row)
        for (int d = 0; d < shape.key_width; ++d)
          *to++ = T(widen(from[row * query.row_stride + d * query.col_stride]) * factor);
    });
  }

  static void clear(const Shape& shape, int rows, void* memory) {
    const State<T> state = state_of<T>(rows, memory);
    const int stride = padded_rows<T>(rows);
    for (int i = 0; i < stride; ++i) state.reference[i] = -kInfinity;
    for (int i = 0; i < stride * (1 + round_up(shape.value_width, 4)); ++i) state.sum[i] = 0;
  }

  static void attend(const Shape& shape, const QueryBlock* blocks, int count, const Keys& keys, void* memory) {
    if (keys.bias) return attend_keys<true>(shape, blocks, count, keys, memory);
    attend_keys<false>(shape, blocks, count, keys, memory);
  }

  template <bool kBiased>
  static void attend_keys(const Shape& shape, const QueryBlock* blocks, int count, const Keys& keys, void* memory) {
    const Scratch scratch(shape, memory);
    const int value_rows = round_up(shape.value_width, 4);
    const int64_t apart = in_place<T>(shape, blocks, count);
    for (int64_t first = 0; first < keys.count; first += kKeyTile) {
      Present present = present_keys(keys, first);
      if constexpr (kBiased) leave_out_excluded<T>(keys, first, present);
      if (present.count == 0) continue;
      const auto key =
          load_tile(shape.dtype, keys.key, first, present, shape.key_width, shape.key_width, apart, scratch.key);
      const auto value =
          load_tile(shape.dtype, keys.value, first, present, shape.value_width, value_rows, apart, scratch.value);
      const T* bias = kBiased ? load_bias(keys, first, present, scratch.bias) : nullptr;
      for (const QueryBlock* block = blocks; block < blocks + count; ++block)
        attend_tile<kBiased>(shape, *block, key, value, present.count, scratch.weights, bias);
    }
  }

  template <bool kBiased>
  static void attend_tile(const Shape& shape, const QueryBlock& block, Tile<T> key, Tile<T> value, int count,
                          T* weights, const T* bias) {
    const T* queries = static_cast<const T*>(block.packed);
    const State<T> state = state_of<T>(block.rows, block.state);
    if (!few<T>(shape, block.rows))
      return with_block<T>(block.rows, [&](auto kind) {
        attend_block<decltype(kind), kBiased>(shape, queries, key, value, count, state, weights, bias);
      });
    const int depth = shape.key_width, width = shape.value_width;
    for (int row = 0; row < block.rows; ++row)
      attend_one<kBiased>(queries + row * depth, depth, key, value, count,
                          {state.reference + row, state.sum + row, state.acc + row * width}, width, weights, bias);
  }

  template <class B, bool kBiased>
  static void attend_block(const Shape& shape, const T* queries, Tile<T> key, Tile<T> value, int count, State<T> state,
                           T* weights, const T* bias) {
    const int value_rows = round_up(shape.value_width, 4);
    for (int c = 0; c < B::kRows / kVectorLanes<T>; c += B::kColumns) {
      const int at = c * kVectorLanes<T>;
      weigh_keys<B, kBiased>(queries, shape.key_width, key, count, state, c, value_rows, weights, bias);
      accumulate_rows<B>(state.acc + at, value_rows, value, weights + at, count);
    }
  }

  static void read(const Shape& shape, int rows, const void* memory, double* reference, double* sum, double* acc) {
    const State<T> state = state_of<T>(rows, memory);
    const bool rows_apart = few<T>(shape, rows);
    const int of_row = rows_apart ? shape.value_width : 1, of_column = rows_apart ? 1 : padded_rows<T>(rows);
    for (int row = 0; row < rows; ++row) {
      reference[row] = state.reference[row];
      sum[row] = state.sum[row];
      for (int e = 0; e < shape.value_width; ++e)
        acc[row * shape.value_width + e] = state.acc[row * of_row + e * of_column];
    }
  }

  static constexpr ForwardKernel kernel = {
      kBlockVectors * kVectorLanes<T>, packed_bytes, state_bytes, scratch_bytes, pack, clear, attend, read};
};

}  // namespace
}  // namespace cmab::cpu
