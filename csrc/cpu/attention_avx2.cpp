#define CMAB_VECTOR_BYTES 32
#include "attention_backward_kernel.h"

namespace cmab::cpu {
const AttentionKernels attention_avx2[2] = {{&Forward<double>::kernel, &Backward<double>::kernel},
                                            {&Forward<float>::kernel, &Backward<float>::kernel}};
}  // namespace cmab::cpu
