// The table of continual kernels for the instruction set that this file is compiled for.
#include "common/instance.h"
#include "continual/kernel.h"

namespace cmab::cpu {

extern const ContinualKernel CMAB_TABLE(continual)[2] = {kContinualKernel<double>, kContinualKernel<float>};

}  // namespace cmab::cpu
