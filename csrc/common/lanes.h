// Lane-wise vector operations (square root, sign, magnitude), loads and stores of partial vectors, the transpose of a
// square of registers, and sums over lanes. Internal linkage, as in simd.h.
#pragma once

#include <cmath>
#include <limits>

#include "common/simd.h"

namespace cmab::cpu {
namespace {

constexpr int64_t next_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class V>
using ElementOf = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<V>()[0])>>;

template <class V>
struct BitsOfVector {
  typedef BitsOf<ElementOf<V>> type __attribute__((vector_size(sizeof(V)), may_alias));
};
template <class V>
constexpr BitsOf<ElementOf<V>> kSignBit = std::numeric_limits<BitsOf<ElementOf<V>>>::min();

template <class V>
CMAB_INLINE V magnitude(V x) {
  using Bits = typename BitsOfVector<V>::type;
  return (V)((Bits)x & ~kSignBit<V>);
}

// `size` (>= 0) with the sign of x.
template <class V>
CMAB_INLINE V with_sign_of(V x, V size) {
  using Bits = typename BitsOfVector<V>::type;
  return (V)(((Bits)x & kSignBit<V>) | (Bits)size);
}

// |x|, but infinity for a NaN, because maximum() might ignore a NaN.
template <class V>
CMAB_INLINE V size_or_infinity(V x) {
  const V size = magnitude(x), infinity = broadcast<V>(ElementOf<V>(kInfinity));
  return size < infinity ? size : infinity;
}

template <class V>
CMAB_INLINE V square_root(V x) {
#if defined(__SSE2__) || defined(__aarch64__)
  constexpr bool kSingle = sizeof(x[0]) == 4;
#endif
#if defined(__AVX512F__)
  if constexpr (kSingle)
    return _mm512_maskz_sqrt_ps(0xffff, (__m512)x);
  else
    return _mm512_maskz_sqrt_pd(0xff, (__m512d)x);
#elif defined(__AVX2__)
  if constexpr (kSingle)
    return _mm256_sqrt_ps((__m256)x);
  else
    return _mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
  if constexpr (kSingle)
    return _mm_sqrt_ps((__m128)x);
  else
    return _mm_sqrt_pd((__m128d)x);
#elif defined(__aarch64__)
  if constexpr (kSingle)
    return vsqrtq_f32((float32x4_t)x);
  else
    return vsqrtq_f64((float64x2_t)x);
#else
  for (int i = 0; i < lanes<V>(); ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The mask of the first `count` lanes of elements of type T: all bits set in each.
template <class T>
CMAB_INLINE __m256i first_lanes(int64_t count) {
  static constexpr int32_t kSet[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSet + 8 - count * int64_t(sizeof(T) / 4)));
}
#endif

// Loads `count` elements, 1 <= count <= lanes, from an unaligned address; the other lanes are 0. Memory after these
// elements is not accessed.
template <class V, class T>
CMAB_INLINE V load_first(const T* from, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
  else
    return _mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from);
#elif defined(__AVX2__)
  if (count == lanes<V>()) {
    V x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  }
  if constexpr (sizeof(T) == 4)
    return _mm256_maskload_ps(from, first_lanes<T>(count));
  else
    return _mm256_maskload_pd(from, first_lanes<T>(count));
#else
  V x{};
  if (count == lanes<V>())
    __builtin_memcpy(&x, from, sizeof x);
  else
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
  return x;
#endif
}

// Stores the first `count` lanes, 1 <= count <= lanes, to an unaligned address. Memory after these elements is not
// accessed.
template <class V, class T>
CMAB_INLINE void store_first(T* to, V x, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), x);
  else
    _mm512_mask_storeu_pd(to, __mmask8((1u << count) - 1), x);
#elif defined(__AVX2__)
  if (count == lanes<V>())
    __builtin_memcpy(to, &x, sizeof x);
  else if constexpr (sizeof(T) == 4)
    _mm256_maskstore_ps(to, first_lanes<T>(count), x);
  else
    _mm256_maskstore_pd(to, first_lanes<T>(count), x);
#else
  if (count == lanes<V>())
    __builtin_memcpy(to, &x, sizeof x);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = x[i];
#endif
}

template <class V, size_t... I>
CMAB_INLINE V lane_numbers(std::index_sequence<I...>) {
  return V{ElementOf<V>(I)...};
}

// The vector 0, 1, 2, ...: each lane's index.
template <class V>
CMAB_INLINE V lane_numbers() {
  return lane_numbers<V>(std::make_index_sequence<lanes<V>()>());
}

template <int kStep, class V, size_t... I>
CMAB_INLINE void exchange(V& a, V& b, std::index_sequence<I...>) {
  constexpr int kLanes = sizeof...(I);
  const V low = __builtin_shufflevector(a, b, (int(I) & kStep ? kLanes + int(I) - kStep : int(I))...);
  b = __builtin_shufflevector(a, b, (int(I) & kStep ? kLanes + int(I) : int(I) + kStep)...);
  a = low;
}

// Transposes a square of registers in place: swaps the off-diagonal quarters of all blocks of 2 kStep by 2 kStep, for
// kStep = 1, 2, 4, ...
template <int kStep = 1, class V>
CMAB_INLINE void transpose(V (&square)[lanes<V>()]) {
  constexpr int kLanes = lanes<V>();
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & kStep)) exchange<kStep>(square[i], square[i + kStep], std::make_index_sequence<kLanes>());
  if constexpr (2 * kStep < kLanes) transpose<2 * kStep>(square);
}

// Reduces R vectors: lane i of sums[0] becomes the sum over the lanes of sums[i % R]. R is a power of two; every R has
// the same order of additions.
template <int kStep, int R, class V>
CMAB_INLINE void fold_lanes(V (&sums)[R]) {
  constexpr bool kPairs = kStep < R;
#pragma GCC unroll 16
  for (int i = 0; i < (kPairs ? kStep : R); ++i) {
    V low = sums[i], high = sums[kPairs ? i + kStep : i];
    exchange<kStep>(low, high, std::make_index_sequence<lanes<V>()>());
    sums[i] = low + high;
  }
  if constexpr (kStep > 1) fold_lanes<kStep / 2>(sums);
}

template <int R, class V>
CMAB_INLINE V sum_lanes(V (&sums)[R]) {
  static_assert(R <= lanes<V>());
  fold_lanes<lanes<V>() / 2>(sums);
  return sums[0];
}

template <class V>
CMAB_INLINE ElementOf<V> sum_lanes(V x) {
  V sums[1] = {x};
  return sum_lanes(sums)[0];
}

template <class T>
constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();

}  // namespace
}  // namespace cmab::cpu
