// Chooses the kernels of linear layers.
#include "common/instruction_sets.h"
#include "linear/linear.h"

namespace cmab::cpu {

const LinearKernels& linear_kernels(DType dtype) {
  const int sums = dtype == DType::kFloat64 ? 0 : 1;
#if defined(__x86_64__)
  return widest(linear_portable[sums], linear_avx2[sums], linear_avx512[sums]);
#else
  return linear_portable[sums];
#endif
}

}  // namespace cmab::cpu
