// What the bindings of the operator families share: Python passes addresses and strides as numbers, nothing of torch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "common/operands.h"

namespace cmab {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void read_strides(const pybind11::tuple& strides, int64_t* to) {
  for (size_t i = 0; i < strides.size(); ++i) to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), i));
}

inline cpu::Operand operand(uintptr_t address, const pybind11::tuple& strides) {
  cpu::Operand made;
  made.data = pointer<void>(address);
  read_strides(strides, made.stride);
  return made;
}

// One file a family, <family>/binding.cpp.
void bind_attention(pybind11::module_&);
void bind_continual(pybind11::module_&);
void bind_gram(pybind11::module_&);
void bind_pinv(pybind11::module_&);
void bind_solve(pybind11::module_&);

}  // namespace cmab
