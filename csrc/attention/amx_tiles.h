// The eight tile registers of AMX, through inline assembly: the intrinsics of GCC 12 do not declare the memory they
// access, so the compiler could move stores across them.
#pragma once

#include <cstdint>

namespace cmab::cpu {
namespace {

// The operand of ldtilecfg.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

struct HardwareTiles {
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
  static void release() { asm volatile("tilerelease" : : : "memory"); }

  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile) : "memory");
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kC, int kA, int kB>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB) : "memory");
  }
};

}  // namespace
}  // namespace cmab::cpu
