// Tensors of torch without torch: read where they lie and made around memory of ours, through the table of functions
// that DLPack 1.3 keeps on the tensor's type (50 ns a tensor), or where torch has none, through Python (1 us).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>

#include "cpu/operands.h"

namespace cmab {

constexpr int kMaxDims = 4;

// Valid as long as the Python object is.
struct Borrowed {
  void* data;
  cpu::DType dtype;
  int dims;
  int64_t shape[kMaxDims], stride[kMaxDims];

  bool is(cpu::DType type, std::initializer_list<int64_t> sizes) const;
  bool contiguous() const;
};

// False unless the object is a torch.Tensor, no subclass, on the CPU, of a type that kernels take, with no more than
// kMaxDims dimensions, whose memory is there. No Python error is left behind.
bool borrow(PyObject* object, Borrowed& tensor);

// Whether the tensor's numbers are the negatives of those in its memory.
bool is_negated(PyObject* tensor);
bool requires_grad(PyObject* tensor);

// Contiguous and uninitialised.
pybind11::object new_tensor(cpu::DType dtype, std::initializer_list<int64_t> shape);

int torch_threads();

}  // namespace cmab
