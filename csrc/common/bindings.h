// Helpers shared by the CPU bindings: views as kernel operands, and one bind function for each family.
#pragma once

#include <pybind11/pybind11.h>

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

// Each is defined in <family>/binding.cpp.
void bind_attention(pybind11::module_&);
void bind_continual(pybind11::module_&);
void bind_gram(pybind11::module_&);
void bind_layers(pybind11::module_&);
void bind_pinv(pybind11::module_&);
void bind_projected(pybind11::module_&);
void bind_prefix(pybind11::module_&);
void bind_solve(pybind11::module_&);
void bind_stack(pybind11::module_&);

}  // namespace cmab
