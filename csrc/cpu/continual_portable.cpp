#define CMAB_VECTOR_BYTES 16
#include "continual_kernel.h"

namespace cmab::cpu {
const ContinualKernel continual_portable[2] = {kContinualKernel<double>, kContinualKernel<float>};
}  // namespace cmab::cpu
