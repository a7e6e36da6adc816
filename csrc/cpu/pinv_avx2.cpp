#define CMAB_VECTOR_BYTES 32
#include "pinv_landmarks_kernel.h"

namespace cmab::cpu {
const PinvKernels pinv_avx2 = {{Pinv<double>::kernel, Pinv<float>::kernel}};
}  // namespace cmab::cpu
