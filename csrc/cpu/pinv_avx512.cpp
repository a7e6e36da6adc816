#define CMAB_VECTOR_BYTES 64
#include "pinv_landmarks_kernel.h"

namespace cmab::cpu {
const PinvKernels pinv_avx512 = {{Pinv<double>::kernel, Pinv<float>::kernel}};
}  // namespace cmab::cpu
