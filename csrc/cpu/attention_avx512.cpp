#define CMAB_VECTOR_BYTES 64
#include "attention_backward_kernel.h"

namespace cmab::cpu {
const AttentionKernels attention_avx512[2] = {{&Forward<double>::kernel, &Backward<double>::kernel},
                                              {&Forward<float>::kernel, &Backward<float>::kernel}};
}  // namespace cmab::cpu
