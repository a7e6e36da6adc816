// The tile registers of AMX in software, for tests of the AMX kernels' data flow on machines without AMX. The class has
// the interface of HardwareTiles and the semantics of Intel's manual (volume 2, TDPBF16PS and LDTILECFG). An operation
// that the hardware would not accept aborts the process.
#pragma once

#include <immintrin.h>

#include <cstdlib>
#include <cstring>

#include "attention/amx_tiles.h"

namespace cmab::cpu {
namespace {

class EmulatedTiles {
 public:
  static void configure(const TileConfig& config) {
    require(config.palette == 1 && config.start_row == 0);
    for (uint8_t byte : config.reserved) require(byte == 0);
    for (int t = 0; t < 16; ++t) {
      const bool none = config.rows[t] == 0 && config.row_bytes[t] == 0;
      require(none || (t < 8 && config.rows[t] >= 1 && config.rows[t] <= 16));
      require(none || (config.row_bytes[t] >= 1 && config.row_bytes[t] <= 64));
    }
    file().config = config;
    std::memset(file().tile, 0, sizeof(file().tile));
  }
  static void release() { file() = {}; }

  template <int kTile>
  static void zero() {
    require(file().config.rows[kTile] > 0);
    std::memset(file().tile[kTile], 0, sizeof(Tile));
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    zero<kTile>();
    for (int r = 0; r < file().config.rows[kTile]; ++r) {
      std::memcpy(file().tile[kTile][r], static_cast<const char*>(from) + r * stride, file().config.row_bytes[kTile]);
    }
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    require(file().config.rows[kTile] > 0);
    for (int r = 0; r < file().config.rows[kTile]; ++r) {
      std::memcpy(static_cast<char*>(to) + r * stride, file().tile[kTile][r], file().config.row_bytes[kTile]);
    }
  }
  // The low and high halves of the pairs are accumulated separately by fused multiply-adds from 0, then added to C.
  // Denormal inputs and results count as 0.
  template <int kC, int kA, int kB>
  static void multiply() {
    const TileConfig& config = file().config;
    require(kC != kA && kC != kB && kA != kB);
    require(config.rows[kC] == config.rows[kA] && config.row_bytes[kC] == config.row_bytes[kB]);
    require(config.row_bytes[kA] == 4 * config.rows[kB] && config.row_bytes[kC] % 4 == 0);
    const unsigned int rounding = _mm_getcsr();
    _mm_setcsr(_MM_FLUSH_ZERO_ON | 0x40 /* denormals are zero */ | _MM_MASK_MASK | _MM_ROUND_NEAREST);
    for (int m = 0; m < config.rows[kC]; ++m) multiply_row(file().tile[kC][m], file().tile[kA][m], file().tile[kB]);
    _mm_setcsr(rounding);
  }

 private:
  using Tile = uint32_t[16][16];
  struct File {
    TileConfig config;
    alignas(64) Tile tile[8];
  };

  static File& file() {
    static thread_local File one;
    return one;
  }
  static void require(bool holds) {
    if (!holds) std::abort();
  }
  static void multiply_row(uint32_t* c, const uint32_t* a, const Tile& b) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int k = 0; k < 16; ++k) {  // elements beyond the configured extents are 0
      const __m512i pair = _mm512_set1_epi32(static_cast<int>(a[k])), lanes = _mm512_load_si512(b[k]);
      low = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)),
                            _mm512_castsi512_ps(_mm512_slli_epi32(lanes, 16)), low);
      high = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, upper)),
                             _mm512_castsi512_ps(_mm512_and_si512(lanes, upper)), high);
    }
    _mm512_store_ps(c, _mm512_add_ps(_mm512_load_ps(c), _mm512_add_ps(low, high)));
  }
};

}  // namespace
}  // namespace cmab::cpu
