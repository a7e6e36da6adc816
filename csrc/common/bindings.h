// Helpers shared by the CPU bindings: views as kernel operands, and one bind function for each family.
#pragma once

#include <algorithm>

#include "common/operands.h"
#include "common/tensor_view.h"

namespace cmab {

// An operand with the data and strides of a view. With fewer than four dimensions, its last strides are not used.
inline cpu::Operand operand(const TensorView& view) {
  cpu::Operand made;
  made.data = view.data;
  std::copy_n(view.stride, kMaxDims, made.stride);
  return made;
}

inline cpu::Matrices matrices(const TensorView& view) {
  return {view.data, {view.stride[0], view.stride[1], view.stride[2]}};
}

// Each function is defined in <family>/binding.cpp.
void bind_attention(PyObject* module);
void bind_continual(PyObject* module);
void bind_gram(PyObject* module);
void bind_layers(PyObject* module);
void bind_modules(PyObject* module);
void bind_pinv(PyObject* module);
void bind_projected(PyObject* module);
void bind_prefix(PyObject* module);
void bind_solve(PyObject* module);
void bind_stack(PyObject* module);

}  // namespace cmab
