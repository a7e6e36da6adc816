// Replaces csrc/common/launch.cuh for a C++ compiler without CUDA: a launch calls a Python function with the name of
// the kernel, the name of its type T, and the bytes of its arguments. The kernels themselves are not compiled here.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <typeinfo>

#include "common/stream.h"

#define __global__
#define __shared__
#define __grid_constant__
#define __align__(bytes)
#define __launch_bounds__(...)

inline struct {
  int x;
} blockIdx, blockDim;

constexpr int cudaDevAttrMaxSharedMemoryPerBlockOptin = 0;
inline int cudaDeviceGetAttribute(int* bytes, int, int) { return *bytes = 163 << 10, 0; }

// T is the name of the kernel's type in the sources that launch it.
#define launch(kernel, blocks, threads, bytes, on, ...) \
  record(#kernel, typeid(T).name(), blocks, threads, bytes, __VA_ARGS__)

namespace cmab::cuda {

extern pybind11::handle on_launch;
inline void check(int, const char*) {}

template <class... Arguments>
void record(const char* kernel, const char* type, int64_t blocks, int threads, int bytes,
            const Arguments&... arguments) {
  const pybind11::gil_scoped_acquire locked;
  const auto as_bytes = [](const auto& given) {
    return pybind11::bytes(reinterpret_cast<const char*>(&given), sizeof given);
  };
  on_launch(kernel, type, blocks, threads, bytes, pybind11::make_tuple(as_bytes(arguments)...));
}

}  // namespace cmab::cuda
