// The AVX512-BF16 engine of matrix products: C (+)= A B with vdpbf16ps, which multiplies a broadcast pair with 16 lanes
// of pairs.
#pragma once

#include "attention/bf16_operands.h"

namespace cmab::cpu {
namespace {

struct DotEngine {
  static constexpr int kRowStep = 4;   // rows of C are padded to a multiple of this
  static constexpr int kPairStep = 1;  // the contraction is padded to a multiple of this many pairs
  static constexpr int kVectors = 1;   // vectors of lanes that a caller should pass at a time

  struct Session {
    Session() {}  // nothing to set up; not an aggregate, so that the compiler does not report an unused variable
  };

  // Matrix c[rows][16 * vectors] (+)= a[rows][pairs] b[pairs][16 * vectors]; leading dimensions in elements.
  template <bool kAccumulate>
  static void multiply(float* c, int64_t ldc, const Pair* a, int64_t lda, const Pair* b, int64_t ldb, int64_t rows,
                       int64_t pairs, int64_t vectors) {
    for (; vectors >= 2; vectors -= 2, c += 32, b += 32) panel<2, kAccumulate>(c, ldc, a, lda, b, ldb, rows, pairs);
    if (vectors == 1) panel<1, kAccumulate>(c, ldc, a, lda, b, ldb, rows, pairs);
  }

 private:
  template <int kVectors, bool kAccumulate>
  static void panel(float* c, int64_t ldc, const Pair* a, int64_t lda, const Pair* b, int64_t ldb, int64_t rows,
                    int64_t pairs) {
    for (; rows >= 8; rows -= 8, c += 8 * ldc, a += 8 * lda) {
      square<8, kVectors, kAccumulate>(c, ldc, a, lda, b, ldb, pairs);
    }
    if (rows > 0) square<4, kVectors, kAccumulate>(c, ldc, a, lda, b, ldb, pairs);
  }

  template <int kRows, int kVectors, bool kAccumulate>
  static void square(float* c, int64_t ldc, const Pair* a, int64_t lda, const Pair* b, int64_t ldb, int64_t pairs) {
    __m512 sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = kAccumulate ? _mm512_loadu_ps(c + r * ldc + 16 * v) : _mm512_setzero_ps();
      }
    }
    const Pair* row[kRows / 4];  // every fourth row: addressing modes reach the other rows
    for (int r = 0; r < kRows; r += 4) row[r / 4] = a + r * lda;
    const int64_t lda3 = 3 * lda;
#pragma GCC unroll 4
    for (int64_t p = 0; p < pairs; ++p, b += ldb) {
      __m512bh lanes[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) lanes[v] = (__m512bh)_mm512_loadu_si512(b + 16 * v);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512bh broadcast =
            (__m512bh)_mm512_set1_epi32(static_cast<int>(*(row[r / 4] + (r % 4 == 3 ? lda3 : r % 4 * lda))));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], lanes[v], broadcast);
      }
      for (int r = 0; r < kRows / 4; ++r) ++row[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + r * ldc + 16 * v, sum[r][v]);
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
