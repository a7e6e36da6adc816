// Tensors of torch without torch: read where they lie and made around memory of ours, through the table of functions
// that DLPack 1.3 keeps on the tensor's type (50 ns a tensor), or where torch has none, through Python (1 us).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "common/dtype.h"

namespace cmab {

constexpr int kMaxDims = 4;

enum class Device : int { kCpu, kCuda };

// Valid as long as the Python object is.
struct TensorView {
  void* data;
  DType dtype;
  Device device;
  int device_index;
  int dims;
  int64_t shape[kMaxDims], stride[kMaxDims];

  // Whether it is of this type, and (batch, heads, rows, columns).
  bool is(DType type, int64_t batch, int64_t heads, int64_t rows, int64_t columns) const {
    return dtype == type && dims == 4 && shape[0] == batch && shape[1] == heads && shape[2] == rows &&
           shape[3] == columns;
  }
  bool contiguous() const;
};

bool is_tensor(PyObject* object);

// The view of a tensor; false where it has a type, a device, a layout or more dimensions than a view can have. No
// Python error is left behind.
bool view(PyObject* tensor, TensorView& view);

// The same of any object; false as well unless it is a torch.Tensor, of no subclass, on the CPU.
bool view_plain(PyObject* object, TensorView& view);

// Whether the tensor's numbers are the negatives of those in its memory.
bool is_negated(PyObject* tensor);
bool requires_grad(PyObject* tensor);

struct NewTensor {
  pybind11::object object;
  void* data;
};

// Contiguous and uninitialised, (batch, heads, rows, columns), on the CPU.
NewTensor new_tensor(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns);

// The same by torch's own allocator, on the device of `like`.
pybind11::object new_tensor_like(PyObject* like, DType dtype, int64_t batch, int64_t heads, int64_t rows,
                                 int64_t columns);

// Uninitialised, like another in everything.
pybind11::object empty_like(PyObject* tensor);

int torch_threads();

}  // namespace cmab
