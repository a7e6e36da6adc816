// The element types of tensors on a GPU.
#pragma once

#include "common/block.cuh"
#include "common/dtype.h"

namespace cmab::cuda {

// Calls `work` with a value-initialised element of the C++ type of `dtype`, one of the floating types.
template <class Work>
void with_type(DType dtype, Work work) {
  switch (dtype) {
    case DType::kFloat64:
      return work(double());
    case DType::kFloat32:
      return work(float());
    case DType::kBFloat16:
      return work(BFloat16());
    default:
      return work(Float16());
  }
}

template <class T>
struct SumType {
  using type = float;
};
template <>
struct SumType<double> {
  using type = double;
};
// The accumulator type for products of T, and the type of the weights.
template <class T>
using Sum = typename SumType<T>::type;

CMAB_DEVICE double as_sum(double x) { return x; }
CMAB_DEVICE float as_sum(float x) { return x; }
#if defined(__CUDACC__)
CMAB_DEVICE float as_sum(BFloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
CMAB_DEVICE float as_sum(Float16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
#else
inline float as_sum(BFloat16 x) { return widen(x); }
inline float as_sum(Float16 x) { return widen(x); }
#endif

// One head's (rows, width) matrix in the caller's memory; strides in elements.
template <class T>
struct Matrix {
  const T* data;
  int64_t row_stride, column_stride;
  int width;
};

// (B, H, N, width) in the caller's memory; strides in elements.
struct Operand {
  const void* data;
  int64_t stride[4];

  template <class T>
  CMAB_DEVICE Matrix<T> rows(int64_t b, int64_t h, int64_t first, int width) const {
    return {static_cast<const T*>(data) + b * stride[0] + h * stride[1] + first * stride[2], stride[2], stride[3],
            width};
  }
};

}  // namespace cmab::cuda
