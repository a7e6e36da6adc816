#define CMAB_VECTOR_BYTES 16
#include "pinv_landmarks_kernel.h"

namespace cmab::cpu {
const PinvKernels pinv_portable = {{Pinv<double>::kernel, Pinv<float>::kernel}};
}  // namespace cmab::cpu
