// The kernel of an exact continual attention step, a block per head, and its launch.
#include "common/launch.cuh"
#include "continual/attention_step.cuh"

namespace cmab::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(Sum<T>) == 4 ? 2 : 1)
    attention_step_kernel(const __grid_constant__ StepCall call) {
  extern __shared__ __align__(32) char shared[];
  step_head<T>(Block{shared, kThreads}, call, blockIdx.x);
}

}  // namespace

void attention_step(const StepCall& call, Stream on) {
  if (call.batch * call.heads == 0) return;
  with_type(call.dtype, [&](auto token) {
    using T = decltype(token);
    launch(attention_step_kernel<T>, call.batch * call.heads, kThreads, step_shared_bytes<T>(call.value_width, 0), on,
           call);
  });
}

}  // namespace cmab::cuda
