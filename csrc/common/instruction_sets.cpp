// Detects the usable instruction sets and chooses one (instruction_sets.h).
#include "common/instruction_sets.h"

#include <cstdlib>
#include <stdexcept>

namespace cmab::cpu {
namespace {

constexpr Isa kListed[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};
constexpr Isa kNamed[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kAmxEmulated};

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
    case Isa::kAmxEmulated:
      return has_avx512() && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx:
      return has_avx512() && __builtin_cpu_supports("avx512bf16") && amx_usable();
  }
  return false;
}
#else
bool usable(Isa isa) { return isa == Isa::kPortable; }
#endif

Isa best() {
  Isa found = Isa::kPortable;
  for (Isa isa : kListed)
    if (usable(isa)) found = isa;
  return found;
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const auto& each : names) all += (all.empty() ? "" : ", ") + each;
  return all;
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
    case Isa::kAmxEmulated:
      return "amx_emulated";
  }
  return "";
}

std::vector<std::string> usable_instruction_sets() {
  std::vector<std::string> names;
  for (Isa isa : kListed)
    if (usable(isa)) names.push_back(name(isa));
  return names;
}

Isa instruction_set() {
  static const Isa kBest = best();
  const char* wanted = std::getenv("CMAB_KERNELS_ISA");
  if (!wanted || !*wanted) return kBest;
  for (Isa isa : kNamed)
    if (wanted == std::string(name(isa)) && usable(isa)) return isa;
  throw std::runtime_error("CMAB_KERNELS_ISA is \"" + std::string(wanted) +
                           "\"; usable here: " + joined(usable_instruction_sets()));
}

}  // namespace cmab::cpu
