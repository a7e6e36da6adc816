// The driver of the batched solve. It chooses which matrices are solved one per lane and which are solved one by one,
// and divides them among threads. Both methods give the same bits, so the choice does not affect results.
#include "solve/solve.h"

#include <omp.h>

#include "common/instruction_sets.h"
#include "common/plan.h"

namespace cmab::cpu {
namespace {

// Up to this order, one matrix per lane is faster if enough lanes are filled: a fifth at order 16, four fifths at order
// 64.
constexpr int64_t kLanesOrder = 64;
constexpr int64_t kAllLanesOrder = 80;

// The number of matrices, counted from the first, that are solved one per lane; the rest are solved one by one.
int64_t matrices_in_lanes(const Systems& systems, int64_t lanes) {
  const int64_t rest = systems.count % lanes;
  if (systems.order > kLanesOrder) return 0;
  return kAllLanesOrder * rest >= lanes * systems.order ? systems.count : systems.count - rest;
}

const SolveKernel& solve_kernel(DType dtype) {
#if defined(__x86_64__)
  const SolveKernels& kernels = widest(solve_portable, solve_avx2, solve_avx512);
#else
  const SolveKernels& kernels = solve_portable;
#endif
  return kernels.of[dtype == DType::kFloat32];
}

double multiplications(const Systems& systems) {
  return double(systems.count) * systems.order * systems.order * (systems.order + systems.columns);
}

}  // namespace

void regularised_solve(DType dtype, const Systems& systems, int threads) {
  if (systems.count == 0) return;
  const SolveKernel& kernel = solve_kernel(dtype);
  const int64_t lanes = kernel.lanes, in_lanes = matrices_in_lanes(systems, lanes);
  const int64_t groups = ceil_div(in_lanes, lanes), tasks = groups + systems.count - in_lanes;
  const size_t bytes =
      align(std::max(groups ? kernel.lanes_bytes(systems) : 0, groups < tasks ? kernel.rows_bytes(systems) : 0));
  const int team = int(std::min<int64_t>(useful_threads(multiplications(systems), threads), tasks));
  Workspace workspace;
  workspace.reserve(team * bytes);
#pragma omp parallel for num_threads(team) if (team > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    char* scratch = workspace.at(omp_get_thread_num() * bytes);
    if (task < groups)
      kernel.solve_lanes(systems, task * lanes, int(std::min(lanes, in_lanes - task * lanes)), scratch);
    else
      kernel.solve_rows(systems, in_lanes + task - groups, scratch);
  }
}

}  // namespace cmab::cpu
