// The table of kernels of regularised least squares for the instruction set for which this file is compiled.
#include "common/instance.h"
#include "intention/rows_kernel.h"
#include "intention/sums_kernel.h"

namespace cmab::cpu {

extern const GramKernels CMAB_TABLE(gram)[2] = {{&GramSums<double>::kernel, &Rows<double>::kernel},
                                                {&GramSums<float>::kernel, &Rows<float>::kernel}};

}  // namespace cmab::cpu
