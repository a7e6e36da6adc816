// The building blocks of continual attention: one query's logits with rows of keys, their exponentials, weighted sums
// of rows of values, and rings of tokens. Each element of a result is computed by the same operations in the same
// order, for any number of rows at once. Internal linkage, as in simd.h.
#pragma once

#include "common/lanes.h"
#include "common/tile.h"
#include "continual/continual.h"

namespace cmab::cpu {
namespace {

// The number of rows read or copied at a time. Sums of such blocks start from zero and are then added to the total,
// which keeps the rounding error over many keys small.
constexpr int kBlockRows = 32;

template <class T>
constexpr T kLargest = std::numeric_limits<T>::max();

// The size of an array of `count` elements if whole vectors may be written up to its end and past it.
template <class T>
constexpr int64_t padded(int64_t count) {
  return next_multiple(count, kVectorLanes<T>) + kVectorLanes<T>;
}

template <class V, class T>
CMAB_INLINE V load_anywhere(const T* from) {
  return load_first<V>(from, lanes<V>());
}

template <class V, class T>
CMAB_INLINE void store_anywhere(T* to, V x) {
  store_first(to, x, lanes<V>());
}

// Calls function(offset, count) for the vectors of a row; all but the last are full.
template <class V, class Function>
CMAB_INLINE void for_each_vector(int64_t width, const Function& function) {
  int64_t at = 0;
  for (; at + lanes<V>() <= width; at += lanes<V>()) function(at, int64_t(lanes<V>()));
  if (at < width) function(at, width - at);
}

// Calls function(first, R) for tiles of R rows from `first` to `count`, then of R / 2, ..., 1.
template <int R, class Function>
CMAB_INLINE void for_each_tile(int64_t first, int64_t count, const Function& function) {
  for (; first + R <= count; first += R) function(first, std::integral_constant<int, R>());
  if constexpr (R > 1) for_each_tile<R / 2>(first, count, function);
}

// ---- logits

// Recomputes the logits that are not finite in a wider type, and clamps them to the finite range.
template <class T>
__attribute__((noinline)) void mend_logits(const T* query, Tile<T> keys, int64_t count, int width, double scale,
                                           T* logits) {
  using Wide = std::conditional_t<sizeof(T) == 4, double, long double>;
  for (int64_t i = 0; i < count; ++i) {
    if (logits[i] >= -kLargest<T> && logits[i] <= kLargest<T>) continue;
    Wide sum = 0;
    for (int d = 0; d < width; ++d) sum += Wide(query[d]) * keys.rows[i * keys.stride + d];
    sum *= scale;
    logits[i] = sum > kLargest<T> ? kLargest<T> : sum < -kLargest<T> ? -kLargest<T> : T(sum);
  }
}

// logits[i] = scale * query . keys[i], clamped to the finite range, because the difference of two infinities is NaN.
// Writes up to a vector past the last logit.
template <class T>
inline void make_logits(const T* query, Tile<T> keys, int64_t count, int width, double scale, T* logits) {
  using V = Vector<T>;
  const T factor = T(scale);
  bool finite = true;
  for_each_tile<lanes<V>()>(0, count, [&](int64_t first, auto rows) {
    constexpr int R = decltype(rows)::value;
    const T* key = keys.rows + first * keys.stride;
    V sums[R] = {};
    for_each_vector<V>(width, [&](int64_t d, int64_t in_vector) {
      const V x = load_first<V>(query + d, in_vector);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r] += x * load_first<V>(key + r * keys.stride + d, in_vector);
    });
    const V logit = sum_lanes(sums) * factor;
    finite &= !any(~(magnitude(logit) <= kLargest<T>));
    store_anywhere(logits + first, logit);
  });
  if (__builtin_expect(!finite, 0)) mend_logits(query, keys, count, width, scale, logits);
}

// ---- exponentials

// exp(x) for x <= 0.
template <class V>
CMAB_INLINE V exponential(V x) {
  return exp2(x * ElementOf<V>(kLog2E));
}

template <class T>
struct Total {
  T top, sum;  // the largest logit; the sum of exp(logit - top)
};

// Replaces logits[i] by exp(logits[i] - top). The array is padded.
template <class T>
inline Total<T> exponentiate(T* logits, int64_t count) {
  using V = Vector<T>;
  const int64_t end = next_multiple(count, lanes<V>());
  for (int64_t i = count; i < end; ++i) logits[i] = -std::numeric_limits<T>::infinity();
  V most = load_anywhere<V>(logits), sum{};
  for (int64_t i = lanes<V>(); i < end; i += lanes<V>()) most = maximum(load_anywhere<V>(logits + i), most);
  T top = most[0];
  for (int i = 1; i < lanes<V>(); ++i) top = most[i] > top ? most[i] : top;
  for (int64_t i = 0; i < end; i += lanes<V>()) {
    const V weight = exponential(load_anywhere<V>(logits + i) - top);
    store_anywhere(logits + i, weight);
    sum += weight;
  }
  return {top, sum_lanes(sum)};
}

// ---- sums of rows

// One block of add_rows: C vectors of columns, the last with `in_last` elements, in K independent accumulators to hide
// the latency of additions.
template <int C, int K, class T>
CMAB_INLINE void add_columns(const T* weights, Tile<T> rows, int count, int64_t in_last, bool first, T* out) {
  using V = Vector<T>;
  const auto elements = [&](int c) { return c + 1 < C ? int64_t(lanes<V>()) : in_last; };
  V sums[K][C] = {};
  const auto add = [&](int i, V(&to)[C]) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      to[c] += weights[i] * load_first<V>(rows.rows + i * rows.stride + c * lanes<V>(), elements(c));
  };
  int i = 0;
  for (; i + K <= count; i += K)
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) add(i + k, sums[k]);
  for (; i < count; ++i) add(i, sums[0]);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    V sum = sums[0][c];
    if constexpr (K == 4) sum = (sum + sums[1][c]) + (sums[2][c] + sums[3][c]);
    T* to = out + c * lanes<V>();
    store_first(to, first ? sum : sum + load_first<V>(to, elements(c)), elements(c));
  }
}

// out = sum of weights[i] * rows[i] if `first`, else out += that sum.
template <class T>
inline void add_rows(const T* weights, Tile<T> rows, int64_t count, int width, bool first, T* out) {
  constexpr int kLanes = kVectorLanes<T>;
  for (; count > 0; count -= kBlockRows, weights += kBlockRows, rows.rows += kBlockRows * rows.stride, first = false) {
    const int block = int(least(count, kBlockRows));
    int column = 0;
    const auto from = [&] { return Tile<T>{rows.rows + column, rows.stride}; };
    for (; column + 4 * kLanes <= width; column += 4 * kLanes)
      add_columns<4, 1>(weights, from(), block, kLanes, first, out + column);
    for (; column + kLanes <= width; column += kLanes)
      add_columns<1, 4>(weights, from(), block, kLanes, first, out + column);
    if (column < width) add_columns<1, 4>(weights, from(), block, width - column, first, out + column);
  }
}

// ---- rings

// A head's ring buffer of tokens; token p is in row p % capacity.
struct Ring {
  DType dtype;
  char* rows;
  int64_t capacity;
  int width;

  int64_t row_bytes() const { return width * element_bytes(dtype); }
  char* row(int64_t position) const { return rows + position % capacity * row_bytes(); }
};

// The rows of `count` tokens from `first` on, in type T: in place if they have this type and are contiguous, else in
// `copy`.
template <class T>
__attribute__((noinline)) Tile<T> ring_rows(const Ring& ring, int64_t first, int64_t count, T* copy) {
  const int64_t row = first % ring.capacity, before_end = least(count, ring.capacity - row);
  return with_elements<T>(ring.dtype, {ring.rows, ring.width, 1}, [&](const auto* all) -> Tile<T> {
    const auto* from = all + row * ring.width;
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (before_end == count) return {from, ring.width};
    for (int64_t i = 0; i < count; ++i)
      copy_row(i < before_end ? from + i * ring.width : all + (i - before_end) * ring.width, 1, ring.width, ring.width,
               copy + i * ring.width);
    return {copy, ring.width};
  });
}

}  // namespace
}  // namespace cmab::cpu
