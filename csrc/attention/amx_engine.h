// The AMX engine of bfloat16 matrix products: C (+)= A B on 16 x 16 tiles, up to 2 x 2 of them at a time, so that each
// operand tile loaded is used twice.
#pragma once

#include "attention/amx_tiles.h"
#include "attention/bf16_operands.h"

namespace cmab::cpu {
namespace {

template <class Tiles>
struct TileEngine {
  static constexpr int kRowStep = 16;   // rows of C are padded to a multiple of this
  static constexpr int kPairStep = 16;  // the contraction is padded to a multiple of this many pairs
  static constexpr int kVectors = 2;    // vectors of lanes that a caller should pass at a time

  // While a session exists, all tiles are configured as 16 rows of 64 bytes.
  struct Session {
    Session() {
      alignas(64) TileConfig config = {};
      config.palette = 1;
      for (int tile = 0; tile < 8; ++tile) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
      }
      Tiles::configure(config);
    }
    ~Session() { Tiles::release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // Matrix c[rows][16 * vectors] (+)= a[rows][pairs] b[pairs][16 * vectors]; leading dimensions in elements.
  template <bool kAccumulate>
  static void multiply(float* c, int64_t ldc, const Pair* a, int64_t lda, const Pair* b, int64_t ldb, int64_t rows,
                       int64_t pairs, int64_t vectors) {
    for (; rows > 0; rows -= 32, c += 32 * ldc, a += 32 * lda) {
      for (int64_t v = 0; v < vectors; v += 2) {
        float* corner = c + 16 * v;
        const Pair* lanes = b + 16 * v;
        const bool two_rows = rows > 16, two_vectors = vectors - v > 1;
        if (two_rows && two_vectors) {
          square<2, 2, kAccumulate>(corner, ldc, a, lda, lanes, ldb, pairs);
        } else if (two_rows) {
          square<2, 1, kAccumulate>(corner, ldc, a, lda, lanes, ldb, pairs);
        } else if (two_vectors) {
          square<1, 2, kAccumulate>(corner, ldc, a, lda, lanes, ldb, pairs);
        } else {
          square<1, 1, kAccumulate>(corner, ldc, a, lda, lanes, ldb, pairs);
        }
      }
    }
  }

 private:
  // Computes up to 2 x 2 tiles of C. Tile registers 0 to 3 hold C by rows, 4 and 5 A, 6 and 7 B.
  template <int kRows, int kVectors, bool kAccumulate>
  static void square(float* c, int64_t ldc, const Pair* a, int64_t lda, const Pair* b, int64_t ldb, int64_t pairs) {
    constexpr int64_t kBytes = sizeof(Pair);
    start<0, kAccumulate>(c, ldc);
    if constexpr (kVectors > 1) start<1, kAccumulate>(c + 16, ldc);
    if constexpr (kRows > 1) start<2, kAccumulate>(c + 16 * ldc, ldc);
    if constexpr (kRows > 1 && kVectors > 1) start<3, kAccumulate>(c + 16 * ldc + 16, ldc);
    for (int64_t p = 0; p < pairs; p += 16, a += 16, b += 16 * ldb) {
      Tiles::template load<4>(a, kBytes * lda);
      Tiles::template load<6>(b, kBytes * ldb);
      Tiles::template multiply<0, 4, 6>();
      if constexpr (kVectors > 1) {
        Tiles::template load<7>(b + 16, kBytes * ldb);
        Tiles::template multiply<1, 4, 7>();
      }
      if constexpr (kRows > 1) {
        Tiles::template load<5>(a + 16 * lda, kBytes * lda);
        Tiles::template multiply<2, 5, 6>();
      }
      if constexpr (kRows > 1 && kVectors > 1) Tiles::template multiply<3, 5, 7>();
    }
    Tiles::template store<0>(c, kBytes * ldc);
    if constexpr (kVectors > 1) Tiles::template store<1>(c + 16, kBytes * ldc);
    if constexpr (kRows > 1) Tiles::template store<2>(c + 16 * ldc, kBytes * ldc);
    if constexpr (kRows > 1 && kVectors > 1) Tiles::template store<3>(c + 16 * ldc + 16, kBytes * ldc);
  }

  template <int kTile, bool kAccumulate>
  static void start(const float* c, int64_t ldc) {
    if constexpr (kAccumulate) {
      Tiles::template load<kTile>(c, static_cast<int64_t>(sizeof(float)) * ldc);
    } else {
      Tiles::template zero<kTile>();
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
