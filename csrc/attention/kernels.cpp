// The table of attention kernels for the instruction set for which this file is compiled.
#include "attention/backward_kernel.h"
#include "attention/forward_kernel.h"
#include "common/instance.h"

namespace cmab::cpu {

extern const AttentionKernels CMAB_TABLE(attention)[2] = {{&Forward<double>::kernel, &Backward<double>::kernel},
                                                          {&Forward<float>::kernel, &Backward<float>::kernel}};

}  // namespace cmab::cpu
