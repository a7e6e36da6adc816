// Vectors of CMAB_VECTOR_BYTES bytes in the compiler's own vector types: one source for every instruction set. A source
// file is compiled with the width that its flags allow. Everything has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CMAB_INLINE inline __attribute__((always_inline))

namespace cmab::cpu {
namespace {

template <class T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes), may_alias));
};
template <class T, int kBytes = CMAB_VECTOR_BYTES>
using Vector = typename VectorOf<T, kBytes>::type;

template <class V>
constexpr int lanes() {
  return sizeof(V) / sizeof(std::declval<V>()[0]);
}
template <class T>
constexpr int kVectorLanes = CMAB_VECTOR_BYTES / sizeof(T);

constexpr float kInfinity = __builtin_inff();
constexpr double kLog2E = 1.4426950408889634074;

// The integer type as wide as the compute type T.
template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class V, class T>
CMAB_INLINE V load(const T* from) {  // the address must have the alignment of V
  return *reinterpret_cast<const V*>(from);
}

template <class V, class T>
CMAB_INLINE void store(T* to, V x) {
  *reinterpret_cast<V*>(to) = x;
}

template <class V, class T>
CMAB_INLINE V broadcast(T x) {
  return x - V{};
}

// The larger of a and b in each lane, or b if either is NaN.
template <class V>
CMAB_INLINE V maximum(V a, V b) {
#if defined(__AVX2__)
  // If an operand were a constant, the compiler would compare and blend instead.
  if constexpr (sizeof(V) == 32 && sizeof(a[0]) == 4) return _mm256_max_ps(a, b);
  if constexpr (sizeof(V) == 32 && sizeof(a[0]) == 8) return _mm256_max_pd(a, b);
#endif
  return a > b ? a : b;
}

// Whether any lane of a comparison's result is set.
template <class M>
CMAB_INLINE bool any(M mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  bool seen = false;
  for (int i = 0; i < int(sizeof(M) / sizeof(mask[0])); ++i) seen |= mask[i] != 0;
  return seen;
#endif
}

// 2^x to a relative error of 2e-7 (float) or 5e-16 (double), for x <= 126. The result is exactly 0 below 2^-126.5
// (float) or 2^-1022.5 (double) and at -inf; NaN stays NaN. x = n + f with |f| <= 1/2: adding kShift leaves n + bias in
// the low mantissa bits, which are shifted to the exponent. The polynomials are minimax for the relative error.
template <class V>
CMAB_INLINE V exp2(V x) {
  using T = std::remove_cv_t<std::remove_reference_t<decltype(x[0])>>;
  typedef BitsOf<T> Bits __attribute__((vector_size(sizeof(V))));
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr int kMantissa = kSingle ? 23 : 52;
  constexpr T kBias = kSingle ? 127 : 1023;
  constexpr T kShift = (kSingle ? T(0x1.8p23) : T(0x1.8p52)) + kBias;
  x = maximum(broadcast<V>(-kBias), x);
  const V shifted = x + kShift;
  const V f = x - (shifted - kShift);
  const V power = (V)((Bits)shifted << kMantissa);
  V p;
  if constexpr (kSingle) {
    p = f * 0.001327644937f + 0.009675564158f;
    p = p * f + 0.05550713514f;
    p = p * f + 0.240221193f;
    p = p * f + 0.6931469668f;
    p = p * f + 1.000000072f;
  } else {
    p = f * 4.07808379058356119e-10 + 7.07264112026771373e-9;
    p = p * f + 1.0180657976678269e-7;
    p = p * f + 1.32154423215528409e-6;
    p = p * f + 0.0000152527273334760362;
    p = p * f + 0.000154035304421527074;
    p = p * f + 0.00133335581535247225;
    p = p * f + 0.00961812910760665691;
    p = p * f + 0.0555041086647898917;
    p = p * f + 0.240226506959100985;
    p = p * f + 0.693147180559945705;
    p = p * f + 1.0;
  }
  return p * power;
}

#if defined(__AVX512F__)
// The same function with AVX-512, where rounding and scaling are one instruction each; both instructions handle -inf.
CMAB_INLINE Vector<float, 64> exp2(Vector<float, 64> x) {
  const __m512 n = _mm512_maskz_roundscale_ps(0xffff, x, 8), f = x - n;
  __m512 p = f * 0.001327644937f + 0.009675564158f;
  p = p * f + 0.05550713514f;
  p = p * f + 0.240221193f;
  p = p * f + 0.6931469668f;
  p = p * f + 1.000000072f;
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, n);
}
#endif

// acc[r][c] += sum over i < steps of a[r * a_row + i * a_step] * b[i * b_step + lanes of c]: the inner loop of the
// matrix products. `a` is read one scalar at a time, so any strides are possible; `b` is aligned.
template <class V, int R, int C, class T>
CMAB_INLINE void multiply_add(V (&acc)[R][C], const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b,
                              ptrdiff_t b_step, ptrdiff_t steps) {
  for (ptrdiff_t i = 0; i < steps; ++i) {
    V column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = load<V>(b + i * b_step + c * lanes<V>());
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const T scalar = a[r * a_row + i * a_step];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] += scalar * column[c];
    }
  }
}

// Does the same as multiply_add, into R rows of `out` in memory. The steps are summed from zero before they are added,
// because sums of partial sums have smaller rounding errors over many keys.
template <class V, int R, int C, class T>
CMAB_INLINE void accumulate(T* out, ptrdiff_t out_row, const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b,
                            ptrdiff_t b_step, ptrdiff_t steps) {
  V acc[R][C] = {};
  multiply_add<V, R, C>(acc, a, a_row, a_step, b, b_step, steps);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      T* to = out + r * out_row + c * lanes<V>();
      store<V>(to, load<V>(to) + acc[r][c]);
    }
}

}  // namespace
}  // namespace cmab::cpu
