// What the bindings of the CUDA kernels share. The same bindings call the kernels as a CPU plays them,
// cuda_emulated.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>

#include "common/arguments.h"
#include "common/elements.cuh"
#include "common/stream.h"

namespace cmab::cuda {

inline Operand operand(const TensorView& view) {
  Operand made{view.data, {}};
  std::copy_n(view.stride, kMaxDims, made.stride);
  return made;
}

// Once the tensors have been read, which say on which device.
inline Stream read_stream(Arguments& in) { return {in.device_index(), uintptr_t(in.integer("stream"))}; }

// One file a family, <family>/cuda_binding.cpp.
void bind_continual(pybind11::module_&);
void bind_ridge(pybind11::module_&);
void bind_solve(pybind11::module_&);

}  // namespace cmab::cuda
