// The m x m part of Nyström attention on the CPU, for a batch of matrices: the interface between the driver and the
// kernels of each instruction set. All tensors of a call are float64, or all are float32.
#pragma once

#include "common/operands.h"

namespace cmab::cpu {

// A call of the iterative pseudo-inverse, or of its gradient.
struct PinvCall {
  DType dtype;
  int64_t count, order;  // M, m
  int iterations;
  Matrices matrix;    // (M, m, m)
  Matrices dinverse;  // (M, m, m); for the gradient
  void* out;          // (M, m, m), contiguous: the inverse, or the gradient of the matrix
};

// A call of W = pinv(softmax(scale q k')) v over the present landmarks, or of its gradients. No part of an absent
// landmark, not even a NaN, reaches a result, and the rows of absent landmarks in results are 0.
struct LandmarkCall {
  DType dtype;
  int64_t count, order, width, value_width;  // M, m, D, E
  int iterations;
  double scale;
  Matrices query, key, value;  // (M, m, D), (M, m, D), (M, m, E)
  const uint8_t* absent;       // (M, m), or null
  int64_t absent_stride[2];
  Matrices dout;                 // (M, m, E); for the gradients
  void* out;                     // (M, m, E), contiguous
  void *dquery, *dkey, *dvalue;  // contiguous
};

// An operation on one matrix of a call: its scratch size in bytes, and the operation. Scratch is 64-byte aligned and
// uninitialised. The operation allocates nothing and starts no thread.
template <class Call>
struct MatrixKernel {
  size_t (*bytes)(const Call&);
  void (*run)(const Call&, int64_t matrix, void* scratch);
};

struct PinvKernel {
  MatrixKernel<PinvCall> pinv, pinv_backward;
  MatrixKernel<LandmarkCall> landmark_values, landmark_values_backward;
};

struct PinvKernels {
  PinvKernel of[2];  // [0] float64, [1] float32
};

extern const PinvKernels pinv_portable;
#if defined(__x86_64__)
extern const PinvKernels pinv_avx2;
extern const PinvKernels pinv_avx512;
#endif

void iterative_pinv(const PinvCall&, int threads);
void iterative_pinv_backward(const PinvCall&, int threads);
void landmark_values(const LandmarkCall&, int threads);
void landmark_values_backward(const LandmarkCall&, int threads);

}  // namespace cmab::cpu
