// Tensors in the caller's memory, in the form that all CPU families take. Strides are in elements,
// of any sign or zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace cmab::cpu {

// A (rows, width) matrix in the caller's memory. Strides are in elements, of any sign or zero.
struct Matrix {
  const void* data;
  int64_t row_stride;
  int64_t col_stride;
};

// A (batch, heads, rows, width) tensor in the caller's memory; strides in elements.
struct Operand {
  void* data = nullptr;
  int64_t stride[4] = {};

  // The address of the first column of a row.
  template <class T>
  T* at(int64_t b, int64_t h, int64_t row) const {
    return static_cast<T*>(data) + b * stride[0] + h * stride[1] + row * stride[2];
  }
};

// A (matrices, rows, columns) tensor in the caller's memory; strides in elements, of any sign or zero.
struct Matrices {
  const void* data;
  int64_t stride[3];

  template <class T>
  const T* at(int64_t matrix) const {
    return static_cast<const T*>(data) + matrix * stride[0];
  }
};

// The number of keys of a tile. Ranges of keys start at multiples of this number.
constexpr int64_t kKeyTile = 64;

// A range of keys of one head, with their values. An ignored key counts as absent: no part of it, not even a NaN, may
// reach a result.
struct Keys {
  Matrix key;              // (count, D)
  Matrix value;            // (count, E)
  const uint8_t* ignored;  // nonzero for an ignored key; null: none is ignored
  int64_t ignored_stride;
  int64_t count;
  const void* bias = nullptr;  // added to the score of each key, in the type of sums; -inf for an ignored key; or null
  int64_t bias_stride = 0;
};

}  // namespace cmab::cpu
