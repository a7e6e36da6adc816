// The table of pseudo-inverse and landmark kernels for the instruction set that this file is compiled for.
#include "common/instance.h"
#include "nystrom/landmarks_kernel.h"

namespace cmab::cpu {

extern const PinvKernels CMAB_TABLE(pinv) = {{Pinv<double>::kernel, Pinv<float>::kernel}};

}  // namespace cmab::cpu
