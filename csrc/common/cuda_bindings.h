// Helpers shared by the CUDA bindings, which also call the emulated kernels of cuda_emulated.cpp.
#pragma once

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

// Reads the argument `stream`, a cudaStream_t as an integer. Call this after reading the tensors,
// which set the device.
inline Stream read_stream(Arguments& in) { return {in.device_index(), uintptr_t(in.integer("stream"))}; }

// Each function is defined in <family>/cuda_binding.cpp. The same files define the number of bytes
// of shared memory that a block of each kernel needs, in float64 if `wide`. A step of exact
// attention has 0 landmarks.
void bind_continual(PyObject* module);
void bind_solve(PyObject* module);
int solve_bytes(int order, int columns, bool wide);
int step_bytes(int value_width, int landmarks, bool wide);

// Fills a module, a pybind11::module_, with the kernels of all families.
template <class Module>
void bind_kernels(Module& module) {
  module.def("solve_shared_bytes", solve_bytes);
  module.def("step_shared_bytes", step_bytes);
  bind_continual(module.ptr());
  bind_solve(module.ptr());
}

}  // namespace cmab::cuda
