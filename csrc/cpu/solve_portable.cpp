#define CMAB_VECTOR_BYTES 16
#include "solve_kernel.h"

namespace cmab::cpu {
const SolveKernels solve_portable = {{Solve<double>::kernel, Solve<float>::kernel}};
}  // namespace cmab::cpu
