// The kernel of (A + alpha I)^-1 B over a batch on a GPU, a block per matrix.
#pragma once

#include "common/stream.h"
#include "solve/solve_block.cuh"

namespace cmab::cuda {

constexpr int kMaxOrder = 128;

// The arguments of a batched solve; strides in elements. All tensors are float64 if `wide`, else float32.
struct SolveCall {
  bool wide;
  int64_t matrices;
  int order, columns;
  const void* gram;  // (M, D, D); only the lower triangle is read
  int64_t gram_stride[3];
  const void* rhs;  // (M, D, E)
  int64_t rhs_stride[3];
  const void* alpha;  // (M,)
  int64_t alpha_stride;
  void* weight;   // (M, D, E), contiguous
  int32_t* info;  // (M,)
};

template <class T>
CMAB_HOST_DEVICE System<T> system(const SolveCall& call, int64_t matrix) {
  return {call.order,
          call.columns,
          static_cast<const T*>(call.gram) + matrix * call.gram_stride[0],
          call.gram_stride[1],
          call.gram_stride[2],
          static_cast<const T*>(call.rhs) + matrix * call.rhs_stride[0],
          call.rhs_stride[1],
          call.rhs_stride[2],
          static_cast<const T*>(call.alpha)[matrix * call.alpha_stride],
          static_cast<T*>(call.weight) + matrix * call.order * call.columns,
          call.info + matrix};
}

// The threads of a block. With small matrices, most threads of a large block would be idle.
CMAB_HOST_DEVICE int solve_threads(int order) { return order <= 32 ? 64 : kThreads; }

// Launches the solve asynchronously; allocates nothing.
void regularised_solve(const SolveCall& call, Stream on);

}  // namespace cmab::cuda
