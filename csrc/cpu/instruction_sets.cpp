#include "instruction_sets.h"

#include <cstdlib>
#include <stdexcept>

namespace cmab::cpu {
namespace {

constexpr Isa kAll[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool usable(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return has_avx512();
    case Isa::kAvx512Bf16:
      return has_avx512() && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx:
      return has_avx512() && __builtin_cpu_supports("avx512bf16") && amx_usable && amx_usable();
  }
  return false;
}
#else
bool usable(Isa isa) { return isa == Isa::kPortable; }
#endif

Isa best() {
  Isa found = Isa::kPortable;
  for (Isa isa : kAll)
    if (usable(isa)) found = isa;
  return found;
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const auto& each : names) all += (all.empty() ? "" : ", ") + each;
  return all;
}

const AttentionKernels& kernels_of(Isa isa, DType dtype) {
  const int sums = dtype == DType::kFloat64 ? 0 : 1;
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return attention_avx512[sums];
  if (isa == Isa::kAvx2) return attention_avx2[sums];
#endif
  (void)isa;
  return attention_portable[sums];
}

// The bfloat16 kernels come first where there are some; `member` is the direction.
template <class Kernel>
const Kernel& choose(DType dtype, const Kernel* AttentionKernels::* member) {
  const Isa isa = instruction_set();
#if defined(__x86_64__)
  if (dtype == DType::kBFloat16) {
    if (isa == Isa::kAmx && &attention_amx && attention_amx.*member) return *(attention_amx.*member);
    if (isa >= Isa::kAvx512Bf16 && &attention_avx512bf16 && attention_avx512bf16.*member)
      return *(attention_avx512bf16.*member);
  }
#endif
  return *(kernels_of(isa, dtype).*member);
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "";
}

std::vector<std::string> usable_instruction_sets() {
  std::vector<std::string> names;
  for (Isa isa : kAll)
    if (usable(isa)) names.push_back(name(isa));
  return names;
}

Isa instruction_set() {
  static const Isa kBest = best();
  const char* wanted = std::getenv("CMAB_KERNELS_ISA");
  if (!wanted || !*wanted) return kBest;
  for (Isa isa : kAll)
    if (wanted == std::string(name(isa)) && usable(isa)) return isa;
  throw std::runtime_error("CMAB_KERNELS_ISA is \"" + std::string(wanted) +
                           "\"; usable here: " + joined(usable_instruction_sets()));
}

const ForwardKernel& forward_kernel(DType dtype) { return choose(dtype, &AttentionKernels::forward); }
const BackwardKernel& backward_kernel(DType dtype) { return choose(dtype, &AttentionKernels::backward); }

}  // namespace cmab::cpu
