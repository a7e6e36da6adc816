#define CMAB_VECTOR_BYTES 16
#include "attention_backward_kernel.h"

namespace cmab::cpu {
const AttentionKernels attention_portable[2] = {{&Forward<double>::kernel, &Backward<double>::kernel},
                                                {&Forward<float>::kernel, &Backward<float>::kernel}};
}  // namespace cmab::cpu
