// Helpers of the forward and backward kernels of prefixes: logarithms, rows of any width, the scores of a tile, and the
// runs into which the ends of chunks cut it. Internal linkage, as in simd.h.
#pragma once

#include "attention/backward_kernel.h"
#include "common/lanes.h"
#include "prefix/prefix.h"

namespace cmab::cpu {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

// Accumulators for the sums of values: 16 of 32 registers with AVX-512, 8 of 16 elsewhere.
constexpr int kAccumulators = CMAB_VECTOR_BYTES == 64 ? 16 : 8;

// The natural logarithm of normal numbers, to 2 eps; -inf for 0, NaN for NaN and infinity. With x = 2^n m, m within
// sqrt(1/2) .. sqrt(2), it is n ln 2 + 2 atanh(z), z = (m - 1) / (m + 1), by the series of atanh.
template <class V>
CMAB_INLINE V logarithm(V x) {
  using T = ElementOf<V>;
  using Bits = typename BitsOfVector<V>::type;
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr int kMantissa = kSingle ? 23 : 52;
  constexpr BitsOf<T> kHalfRoot = kSingle ? BitsOf<T>(0x3f3504f3) : BitsOf<T>(0x3fe6a09e667f3bcd);
  const Bits above = (Bits)x - kHalfRoot;
  const Bits power = above >> kMantissa;
  const V m = (V)((Bits)x - (power << kMantissa));
  const V z = (m - T(1)) / (m + T(1)), y = z * z;
  V series = broadcast<V>(T(1) / (kSingle ? 11 : 23));
#pragma GCC unroll 11
  for (int n = kSingle ? 9 : 21; n >= 1; n -= 2) series = series * y + T(1) / n;
  const V found = __builtin_convertvector(power, V) * T(kLn2) + z * series * T(2) + (x - x);
  return x == V{} ? broadcast<V>(T(-kInfinity)) : found;
}

// The nearest whole number. Numbers that are too large to have a fraction are returned unchanged.
template <class V>
CMAB_INLINE V whole(V x) {
  using T = ElementOf<V>;
  constexpr T kShift = sizeof(T) == 4 ? T(0x1.8p23) : T(0x1.8p52);
  return magnitude(x) < kShift / 3 ? (x + kShift) - kShift : x;
}

// 2^x for whole x, exactly; x stops at the exponents of normal numbers.
template <class V>
CMAB_INLINE V power_of_two(V x) {
  using T = ElementOf<V>;
  using Bits = typename BitsOfVector<V>::type;
  const V most = broadcast<V>(T(sizeof(T) == 4 ? 126 : 1022));
  x = x < most ? x : most;
  x = x > -most ? x : -most;
  return (V)((__builtin_convertvector(x, Bits) + BitsOf<T>(sizeof(T) == 4 ? 127 : 1023)) << (sizeof(T) == 4 ? 23 : 52));
}

// Writes lse, in base e, of the first `count` lanes: the logarithm of 2^reference times a sum whose logarithm is
// `rest` + `offset`.
template <class V>
CMAB_INLINE void store_lse(double* to, V reference, V rest, double offset, int64_t count) {
  using Wide = Vector<double>;
  constexpr int kParts = lanes<V>() / lanes<Wide>();
  typedef ElementOf<V> Part __attribute__((vector_size(sizeof(V) / kParts)));
  Part references[kParts], rests[kParts];
  __builtin_memcpy(references, &reference, sizeof(V));
  __builtin_memcpy(rests, &rest, sizeof(V));
  for (int i = 0; i < kParts && count > 0; ++i, to += lanes<Wide>(), count -= lanes<Wide>())
    store_first(to,
                __builtin_convertvector(references[i], Wide) * kLn2 + __builtin_convertvector(rests[i], Wide) + offset,
                least(count, lanes<Wide>()));
}

// Rows of `width` elements are padded to whole vectors.
template <class T>
constexpr int whole_vectors(int width) {
  return round_up(width, kVectorLanes<T>);
}

// A row of `width` elements, contiguous: in place if its `stride` is 1, else copied.
template <class T>
CMAB_INLINE const T* contiguous_row(const T* row, int64_t stride, int width, T* copy) {
  if (stride == 1) return row;
  for (int e = 0; e < width; ++e) copy[e] = row[e * stride];
  return copy;
}

// The present rows of a tile, copied into whole vectors, because in the original memory they may start at any address.
template <class T>
__attribute__((noinline)) Tile<T> copy_tile(DType dtype, const Matrix& matrix, int64_t first, const Present& present,
                                            int width, T* copy) {
  const int padded = whole_vectors<T>(width);
  with_elements<T>(dtype, matrix, [&](const auto* data) {
    const auto* from = data + first * matrix.row_stride;
    for (int k = 0; k < present.count; ++k)
      copy_row(from + present.row[k] * matrix.row_stride, matrix.col_stride, width, padded, copy + k * padded);
  });
  return {copy, padded};
}

// Calls function(count, k) with a constant `count` of kMany keys as often as possible, then of four, then of one.
template <int kMany, class Function>
CMAB_INLINE void in_steps(int first, int last, Function function) {
  int k = first;
  for (; k + kMany <= last; k += kMany) function(std::integral_constant<int, kMany>{}, k);
  if constexpr (kMany > 4)
    for (; k + 4 <= last; k += 4) function(std::integral_constant<int, 4>{}, k);
  for (; k < last; ++k) function(std::integral_constant<int, 1>{}, k);
}

// Calls function(count, i) from `first` to `last` with a constant `count` of kMost, or fewer near the end.
template <int kMost, class Function>
CMAB_INLINE void in_pieces(int first, int last, Function function) {
  for (; first + kMost <= last; first += kMost) function(std::integral_constant<int, kMost>{}, first);
  if constexpr (kMost > 1) in_pieces<kMost / 2>(first, last, function);
}

// scores[k][row] = queries' k + bias[k] for the keys of a tile; queries are [D][row], and `bias` is null if there is
// none.
template <class B, class T>
inline void score_keys(const T* queries, int depth, Tile<T> keys, int count, const T* bias, T* scores) {
  using V = typename B::V;
  for (int at = 0; at < B::kRows; at += B::kColumns * lanes<V>())
    in_steps<B::kKeys>(0, count, [&](auto many, int k) {
      V s[many][B::kColumns] = {};
      multiply_add<V, many, B::kColumns>(s, keys.rows + k * keys.stride, keys.stride, 1, queries + at, B::kRows, depth);
      if (bias)
        for (int r = 0; r < many; ++r)
          for (int c = 0; c < B::kColumns; ++c) s[r][c] += broadcast<V>(bias[k + r]);
      for (int r = 0; r < many; ++r)
        for (int c = 0; c < B::kColumns; ++c) store(scores + (k + r) * B::kRows + at + c * lanes<V>(), s[r][c]);
    });
}

// out[i][:] += sum over `steps` of a[i * a_row + s * a_step] * b[s][:], for rows `first` to `last` of whole vectors.
template <class T>
inline void add_products(T* out, int width, int first, int last, const T* a, ptrdiff_t a_row, ptrdiff_t a_step,
                         const T* b, ptrdiff_t b_stride, int steps) {
  using V = Vector<T>;
  constexpr int kMany = kTileRows<2>;
  const auto columns = [&](auto count, int e) {
    in_steps<kMany>(first, last, [&](auto many, int i) {
      accumulate<V, many, count>(out + i * width + e, width, a + i * a_row, a_row, a_step, b + e, b_stride, steps);
    });
  };
  int e = 0;
  for (; e + 2 * kVectorLanes<T> <= width; e += 2 * kVectorLanes<T>) columns(std::integral_constant<int, 2>{}, e);
  if (e < width) columns(std::integral_constant<int, 1>{}, e);
}

// A run: keys of one tile between two ends of chunks. `first` and `last` are numbers of present keys of the tile.
struct Run {
  int first, last;
  int64_t chunk;
  bool begins, ends;  // whether the chunk begins or ends with this run
};

// Cuts a tile that starts at key `start` into runs, in ascending order; returns their number.
inline int cut_tile(const Keys& keys, const Present& present, int64_t start, int64_t every, Run* runs) {
  const int64_t stop = least(start + kKeyTile, keys.count);
  int count = 0, seen = 0;
  int64_t chunk = start / every, end = chunk * every;
  for (int64_t key = start; key < stop; ++count, ++chunk) {
    const bool begins = key == end;
    end = least(end + every, keys.count);
    key = least(end, stop);
    const int first = seen;
    while (seen < present.count && start + present.row[seen] < key) ++seen;
    runs[count] = {first, seen, chunk, begins, key == end};
  }
  return count;
}

// The keys of a tile that are present and not excluded by their bias.
template <class T>
inline Present keys_present(const Keys& keys, int64_t start) {
  Present present = present_keys(keys, start);
  if (keys.bias) leave_out_excluded<T>(keys, start, present);
  return present;
}

}  // namespace
}  // namespace cmab::cpu
