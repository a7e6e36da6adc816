// Asks whether this process may use AMX. Linux provides the 8 KiB of tile registers only if a process requests them,
// and kills a process that executes a tile instruction without this request.
#include "common/instruction_sets.h"

#if defined(__x86_64__)

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <cpuid.h>

namespace cmab::cpu {
namespace {

bool has_amx_bf16() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned int kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0 && (d & kAmxTile) != 0;
}

bool granted_by_kernel() {
#if defined(__linux__)
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool amx_usable() {
  static const bool kUsable = has_amx_bf16() && granted_by_kernel();
  return kUsable;
}

}  // namespace cmab::cpu

#endif
