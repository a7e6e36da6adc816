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

// Reads the argument `stream`, a cudaStream_t as an integer. To be called after the tensors, which set the device.
inline Stream read_stream(Arguments& in) { return {in.device_index(), uintptr_t(in.integer("stream"))}; }

// Each is defined in <family>/cuda_binding.cpp.
void bind_continual(PyObject* module);
void bind_ridge(PyObject* module);
void bind_solve(PyObject* module);

}  // namespace cmab::cuda
