// Typed access to the inputs on a GPU; four elements are loaded at once if they are contiguous and aligned.
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

template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T x[4];
};

// One head's (rows, width) matrix in the caller's memory; strides in elements.
template <class T>
struct Matrix {
  const T* data;
  int64_t row_stride, column_stride;
  int width;

  // Whether four neighbouring columns of a row can be loaded at once.
  CMAB_DEVICE bool in_quads() const {
    return column_stride == 1 && row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % sizeof(Quad<T>) == 0;
  }

  CMAB_DEVICE double wide(int row, int column) const { return as_sum(data[row * row_stride + column * column_stride]); }

  // Loads the four columns from `column` on; columns past the last are zero.
  CMAB_DEVICE Quad<T> quad(int row, int column, bool in_quads) const {
    const T* from = data + row * row_stride + column * column_stride;
    if (in_quads && column + 4 <= width) return *reinterpret_cast<const Quad<T>*>(from);
    Quad<T> quad{};
    CMAB_UNROLL
    for (int j = 0; j < 4; ++j)
      if (column + j < width) quad.x[j] = from[j * column_stride];
    return quad;
  }
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
