// The instruction set that the kernels use: the best that this machine has, unless CMAB_KERNELS_ISA names another. The
// emulated AMX is for tests: it is never chosen by default, and it is not listed.
#pragma once

#include <string>
#include <vector>

namespace cmab::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxEmulated };

// The names of the usable instruction sets, from the least capable to the best.
std::vector<std::string> usable_instruction_sets();

// The instruction set in use. Throws std::runtime_error if CMAB_KERNELS_ISA names one that is unknown or not usable.
Isa instruction_set();
const char* name(Isa);

#if defined(__x86_64__)
// Whether the CPU has AMX and the operating system allows this process to use it. The system is asked only once
// (ARCH_REQ_XCOMP_PERM).
bool amx_usable();
#endif

// The table for the instruction set in use, out of three tables that differ only in vector width.
template <class Kernels>
const Kernels& widest(const Kernels& portable, const Kernels& avx2, const Kernels& avx512) {
  const Isa isa = instruction_set();
  return isa >= Isa::kAvx512 ? avx512 : isa == Isa::kAvx2 ? avx2 : portable;
}

}  // namespace cmab::cpu
