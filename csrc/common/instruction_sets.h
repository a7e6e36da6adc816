// Which instruction set the kernels use: the best that this machine has, unless CMAB_KERNELS_ISA names another. The
// emulated AMX is for tests: it is never the best, and not listed.
#pragma once

#include <string>
#include <vector>

namespace cmab::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxEmulated };

std::vector<std::string> usable_instruction_sets();

// Throws std::runtime_error where CMAB_KERNELS_ISA asks for what there is not.
Isa instruction_set();
const char* name(Isa);

#if defined(__x86_64__)
// Whether the CPU has AMX and the operating system lets this process use it; asks once (ARCH_REQ_XCOMP_PERM).
bool amx_usable();
#endif

// One of three tables of kernels that differ in the width of their vectors alone: that of the instruction set in use.
template <class Kernels>
const Kernels& widest(const Kernels& portable, const Kernels& avx2, const Kernels& avx512) {
  const Isa isa = instruction_set();
  return isa >= Isa::kAvx512 ? avx512 : isa == Isa::kAvx2 ? avx2 : portable;
}

}  // namespace cmab::cpu
