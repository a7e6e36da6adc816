#define CMAB_VECTOR_BYTES 16
#include "gram_kernel.h"
#include "gram_rows_kernel.h"

namespace cmab::cpu {
const GramKernels gram_portable[2] = {{&GramSums<double>::kernel, &Rows<double>::kernel},
                                      {&GramSums<float>::kernel, &Rows<float>::kernel}};
}  // namespace cmab::cpu
