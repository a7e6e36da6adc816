// Access to torch tensors without linking against torch: views of their memory, and new tensors over memory allocated
// here. Uses the C functions that DLPack 1.3 keeps on the tensor's type (50 ns a tensor), or Python where torch has
// none (1 us).
#pragma once

#include <Python.h>

#include <cstdint>
#include <initializer_list>

#include "common/dtype.h"

namespace pybind11 {
class object;
}

namespace cmab {

constexpr int kMaxDims = 4;

enum class Device : int { kCpu, kCuda };

// A tensor's memory and layout; strides in elements. Valid as long as the Python object is.
struct TensorView {
  void* data;
  DType dtype;
  Device device;
  int device_index;
  int dims;
  int64_t shape[kMaxDims], stride[kMaxDims];

  // Whether it has this type and the shape (batch, heads, rows, columns).
  bool is(DType type, int64_t batch, int64_t heads, int64_t rows, int64_t columns) const {
    return dtype == type && dims == 4 && shape[0] == batch && shape[1] == heads && shape[2] == rows &&
           shape[3] == columns;
  }
  bool contiguous() const;
};

bool is_tensor(PyObject* object);

// Fills in the view of a tensor; false if its type, device, layout or number of dimensions is one that a view cannot
// have. Leaves no Python error behind.
bool view(PyObject* tensor, TensorView& view);

// As view(), for any object: also false unless it is a torch.Tensor, not of a subclass, on the CPU, whose memory holds
// its values and not their negatives.
bool view_plain(PyObject* object, TensorView& view);

// Whether torch has marked the tensor as the negative of what its memory holds.
bool is_negated(PyObject* tensor);
bool requires_grad(PyObject* tensor);

using Extents = std::initializer_list<int64_t>;  // of a shape, at most kMaxDims

// A contiguous, uninitialised CPU tensor of a floating type or int64, and the address of its memory.
pybind11::object new_tensor(DType dtype, Extents shape, void*& data);

// torch.get_num_threads(); 1 in the child of a fork, where OpenMP would wait for threads that the fork has not copied.
int torch_threads();

}  // namespace cmab
