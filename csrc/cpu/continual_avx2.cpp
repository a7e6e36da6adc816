#define CMAB_VECTOR_BYTES 32
#include "continual_kernel.h"

namespace cmab::cpu {
const ContinualKernel continual_avx2[2] = {kContinualKernel<double>, kContinualKernel<float>};
}  // namespace cmab::cpu
