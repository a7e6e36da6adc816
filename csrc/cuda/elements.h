// Elements of the inputs, four at a time where they lie side by side.
#pragma once

#include "../common/dtype.h"
#include "block.h"

namespace cmab::cuda {

template <class T>
struct SumType {
  using type = float;
};
template <>
struct SumType<double> {
  using type = double;
};
// What products of T are summed in, and the type of the weights.
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

  // Whether four neighbours of a row can be loaded at once.
  CMAB_DEVICE bool in_quads() const {
    return column_stride == 1 && row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % sizeof(Quad<T>) == 0;
  }

  CMAB_DEVICE double wide(int row, int column) const { return as_sum(data[row * row_stride + column * column_stride]); }

  // Columns from `column` on; zeros (all bits of every type's zero) past the last.
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

}  // namespace cmab::cuda
