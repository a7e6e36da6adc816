// Access to torch tensors without linking against torch: views of their memory, and new tensors over memory allocated
// here. It uses the C functions that DLPack 1.3 stores in the tensor's type (50 ns per tensor), or Python if torch does
// not have them (1 us).
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

// A tensor's memory and layout; strides in elements. It is valid as long as the Python object exists.
struct TensorView {
  void* data;
  DType dtype;
  Device device;
  int device_index;
  int dims;
  int64_t shape[kMaxDims], stride[kMaxDims];

  // Whether the tensor has this type and the shape (batch, heads, rows, columns).
  bool is(DType type, int64_t batch, int64_t heads, int64_t rows, int64_t columns) const {
    return dtype == type && dims == 4 && shape[0] == batch && shape[1] == heads && shape[2] == rows &&
           shape[3] == columns;
  }
  bool contiguous() const;
};

bool is_tensor(PyObject* object);

// Fills in the view of a tensor. Returns false if a view does not support the type, device, layout or number of
// dimensions of the tensor. It leaves no Python error set.
bool view(PyObject* tensor, TensorView& view);

// Like view(), for any object. Also false unless the object is a torch.Tensor and not of a subclass, is on the CPU, and
// its memory holds its values and not their negatives.
bool view_plain(PyObject* object, TensorView& view);

// Whether torch has marked the tensor as the negative of its memory.
bool is_negated(PyObject* tensor);
bool requires_grad(PyObject* tensor);

using Extents = std::initializer_list<int64_t>;  // for shapes with at most kMaxDims dimensions

// A contiguous, uninitialised CPU tensor of a floating type or int64, and the address of its memory.
pybind11::object new_tensor(DType dtype, Extents shape, void*& data);

// torch.get_num_threads(), or 1 in a forked child process, where OpenMP would wait for threads that the fork has not
// copied.
int torch_threads();

}  // namespace cmab
