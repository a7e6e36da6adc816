// The batched solve kernel, a block per matrix, and its launch.
#include "common/launch.cuh"
#include "solve/regularised_solve.cuh"

namespace cmab::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, 1) solve_kernel(const __grid_constant__ SolveCall call) {
  extern __shared__ __align__(32) char shared[];
  const Block block{shared, int(blockDim.x)};
  const System<T> own = system<T>(call, blockIdx.x);
  SolveBlock<T>(block, own).solve();
}

template <class T>
void run(const SolveCall& call, Stream on) {
  if (call.matrices == 0) return;
  const int bytes = SolveBlock<T>::shared_bytes(call.order, call.columns);
  launch(solve_kernel<T>, call.matrices, solve_threads(call.order), bytes, on, call);
}

}  // namespace

void regularised_solve(const SolveCall& call, Stream on) {
  return call.wide ? run<double>(call, on) : run<float>(call, on);
}

int shared_memory(int device) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory of a block");
  return bytes;
}

}  // namespace cmab::cuda
