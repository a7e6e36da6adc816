// The fused ridge kernel and its launches.
#include "common/launch.cuh"
#include "intention/ridge_solve.cuh"

namespace cmab::cuda {
namespace {

// Two blocks per multiprocessor (float32 sums), so that one multiplies while the other waits for its keys.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(Sum<T>) == 4 ? 2 : 1)
    ridge_kernel(const __grid_constant__ RidgeCall call, const __grid_constant__ Cut cut, int64_t first_matrix) {
  extern __shared__ __align__(32) char shared[];
  const Block block{shared, kThreads};
  RidgeBlock<T>(block, call, cut, first_matrix, blockIdx.x).run();
}

template <class T>
void run(const RidgeCall& call, Stream on) {
  const int64_t matrices = call.batch * call.heads;
  const Cut cut = make_cut(call.keys, call.key_width, call.value_width);
  const int bytes = ridge_shared_bytes<T>(call.key_width, call.value_width);
  for (int64_t first = 0; first < matrices; first += call.together) {
    const int64_t count = first + call.together < matrices ? call.together : matrices - first;
    launch(ridge_kernel<T>, count * cut.leaves * cut.panels, kThreads, bytes, on, call, cut, first);
  }
}

}  // namespace

void ridge_solve(const RidgeCall& call, Stream on) {
  with_type(call.dtype, [&](auto element) { run<decltype(element)>(call, on); });
}

}  // namespace cmab::cuda
