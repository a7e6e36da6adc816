// The batched regularised solve (A + alpha I) X = B on the CPU: the interface between the driver and the kernels of
// each instruction set.
//
// A kernel has two methods. One solves many small matrices at once, one per lane. The other solves one matrix with its
// rows, or its right-hand sides, in the lanes. Both give the same bits: every element is computed by the same
// operations in the same order: a_ij -= l_ik l_jk for k = 0, 1, .. j - 1, each a single multiply-add, then times 1 /
// l_jj;
//   y_i -= l_ik y_k for k = 0, 1, .. i - 1, then times 1 / l_ii;  x_i -= l_ki x_k for k = D - 1, .. i + 1, likewise.
// A register tile may load a partial element and store it back, but no sum is split into partial sums.
#pragma once

#include "common/operands.h"
#include "solve/info.h"

namespace cmab::cpu {

// A batch of systems; all tensors have one type, float64 or float32. X is called `weight`.
struct Systems {
  int64_t count, order, columns;  // M, D, E
  Matrices gram;                  // (M, D, D); only the lower triangle is read
  Matrices rhs;                   // (M, D, E)
  const void* alpha;              // (M,)
  int64_t alpha_stride;
  void* weight;  // (M, D, E), contiguous
  int32_t* info;

  template <class T>
  T* weight_at(int64_t matrix) const {
    return static_cast<T*>(weight) + matrix * order * columns;
  }
};

// The entry points of one instruction set and type. Scratch is 64-byte aligned and uninitialised. They allocate nothing
// and start no thread.
struct SolveKernel {
  int lanes;  // the largest number of matrices that solve_lanes takes
  size_t (*lanes_bytes)(const Systems&);
  void (*solve_lanes)(const Systems&, int64_t first, int count, void* scratch);
  size_t (*rows_bytes)(const Systems&);
  void (*solve_rows)(const Systems&, int64_t matrix, void* scratch);
};

struct SolveKernels {
  SolveKernel of[2];  // [0] float64, [1] float32
};

extern const SolveKernels solve_portable;
#if defined(__x86_64__)
extern const SolveKernels solve_avx2;
extern const SolveKernels solve_avx512;
#endif

// Solves all systems, on up to `threads` threads; `dtype` is float64 or float32.
void regularised_solve(DType dtype, const Systems&, int threads);

}  // namespace cmab::cpu
