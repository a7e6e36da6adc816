#define CMAB_VECTOR_BYTES 64
#include "continual_kernel.h"

namespace cmab::cpu {
const ContinualKernel continual_avx512[2] = {kContinualKernel<double>, kContinualKernel<float>};
}  // namespace cmab::cpu
