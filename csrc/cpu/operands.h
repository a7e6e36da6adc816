// Tensors in the caller's memory, as every family takes them. Strides are in elements, of any sign or zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cmab::cpu {

enum class DType : int { kFloat64 = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Static, like everything that files for different instruction sets include: they must not share one copy.
static inline int64_t element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// The type of sums and of weights.
static inline DType state_type(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// A (rows, width) matrix in the caller's memory. Strides are in elements, of any sign or zero.
struct Matrix {
  const void* data;
  int64_t row_stride;
  int64_t col_stride;
};

// (batch, heads, rows, width) in the caller's memory; strides in elements.
struct Operand {
  void* data = nullptr;
  int64_t stride[4] = {};

  template <class T>
  T* at(int64_t b, int64_t h, int64_t row) const {
    return static_cast<T*>(data) + b * stride[0] + h * stride[1] + row * stride[2];
  }
};

}  // namespace cmab::cpu
