#define CMAB_VECTOR_BYTES 64
#include "solve_kernel.h"

namespace cmab::cpu {
const SolveKernels solve_avx512 = {{Solve<double>::kernel, Solve<float>::kernel}};
}  // namespace cmab::cpu
