// Tensors of torch without torch: read where they lie and made around memory of ours, through the table of functions
// that DLPack 1.3 keeps on the tensor's type (50 ns a tensor), or where torch has none, through Python (1 us).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "common/dtype.h"

namespace cmab {

constexpr int kMaxDims = 4;

// Valid as long as the Python object is.
struct TensorView {
  void* data;
  DType dtype;
  int dims;
  int64_t shape[kMaxDims], stride[kMaxDims];

  // Of this type, and (batch, heads, rows, columns).
  bool is(DType type, int64_t batch, int64_t heads, int64_t rows, int64_t columns) const {
    return dtype == type && dims == 4 && shape[0] == batch && shape[1] == heads && shape[2] == rows &&
           shape[3] == columns;
  }
  bool contiguous() const;
};

// False unless the object is a torch.Tensor, no subclass, on the CPU, of a type that kernels take, with no more than
// kMaxDims dimensions, whose memory is there. No Python error is left behind.
bool borrow(PyObject* object, TensorView& tensor);

// Whether the tensor's numbers are the negatives of those in its memory.
bool is_negated(PyObject* tensor);
bool requires_grad(PyObject* tensor);

struct NewTensor {
  pybind11::object object;
  void* data;
};

// Contiguous and uninitialised, (batch, heads, rows, columns).
NewTensor new_tensor(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns);

int torch_threads();

}  // namespace cmab
