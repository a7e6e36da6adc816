// The driver of the m x m part of Nyström attention: it runs a kernel for each matrix, on as many threads as are
// worthwhile.
#include "nystrom/pinv.h"

#include <omp.h>

#include "common/instruction_sets.h"
#include "common/plan.h"

namespace cmab::cpu {
namespace {

const PinvKernel& pinv_kernel(DType dtype) {
#if defined(__x86_64__)
  const PinvKernels& kernels = widest(pinv_portable, pinv_avx2, pinv_avx512);
#else
  const PinvKernels& kernels = pinv_portable;
#endif
  return kernels.of[dtype == DType::kFloat32];
}

template <class Call>
double multiplications(const Call& call) {
  return double(call.count) * call.order * call.order * call.order * (4 * call.iterations + 1);
}

template <class Call>
void run(const MatrixKernel<Call>& kernel, const Call& call, int threads) {
  if (call.count == 0) return;
  const int team = int(std::min<int64_t>(useful_threads(multiplications(call), threads), call.count));
  const size_t bytes = align(kernel.bytes(call));
  Workspace workspace;
  workspace.reserve(team * bytes);
  if (team == 1) {  // without OpenMP, which would take half a microsecond
    const FlushToZero flush;
    for (int64_t matrix = 0; matrix < call.count; ++matrix) kernel.run(call, matrix, workspace.at(0));
    return;
  }
#pragma omp parallel for num_threads(team)
  for (int64_t matrix = 0; matrix < call.count; ++matrix) {
    const FlushToZero flush;
    kernel.run(call, matrix, workspace.at(omp_get_thread_num() * bytes));
  }
}

}  // namespace

void iterative_pinv(const PinvCall& call, int threads) { run(pinv_kernel(call.dtype).pinv, call, threads); }

void iterative_pinv_backward(const PinvCall& call, int threads) {
  run(pinv_kernel(call.dtype).pinv_backward, call, threads);
}

void landmark_values(const LandmarkCall& call, int threads) {
  run(pinv_kernel(call.dtype).landmark_values, call, threads);
}

void landmark_values_backward(const LandmarkCall& call, int threads) {
  run(pinv_kernel(call.dtype).landmark_values_backward, call, threads);
}

}  // namespace cmab::cpu
