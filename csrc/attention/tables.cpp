// Chooses the attention kernels. For bfloat16 these are the kernels with bfloat16 products if the instruction set has
// them, else the kernels of its vector width.
#include "attention/attention.h"
#include "common/instruction_sets.h"

namespace cmab::cpu {
namespace {

const AttentionKernels& kernels_of(DType dtype) {
#if defined(__x86_64__)
  if (dtype == DType::kBFloat16) {
    const Isa isa = instruction_set();
    if (isa == Isa::kAmx) return attention_amx;
    if (isa == Isa::kAmxEmulated) return attention_amx_emulated;
    if (isa == Isa::kAvx512Bf16) return attention_avx512bf16;
  }
#endif
  const int sums = dtype == DType::kFloat64 ? 0 : 1;
#if defined(__x86_64__)
  return widest(attention_portable[sums], attention_avx2[sums], attention_avx512[sums]);
#else
  return attention_portable[sums];
#endif
}

}  // namespace

const ForwardKernel& forward_kernel(DType dtype) { return *kernels_of(dtype).forward; }
const BackwardKernel& backward_kernel(DType dtype) { return *kernels_of(dtype).backward; }

}  // namespace cmab::cpu
