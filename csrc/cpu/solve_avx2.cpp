#define CMAB_VECTOR_BYTES 32
#include "solve_kernel.h"

namespace cmab::cpu {
const SolveKernels solve_avx2 = {{Solve<double>::kernel, Solve<float>::kernel}};
}  // namespace cmab::cpu
