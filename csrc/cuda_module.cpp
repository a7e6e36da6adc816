// The extension module cmab_kernels._cuda: Python bindings of the CUDA kernels.
#include "common/cuda_bindings.h"

using namespace cmab::cuda;

const cmab::Device cmab::kDevice = cmab::Device::kCuda;

PYBIND11_MODULE(_cuda, module) {
  module.def("shared_memory", shared_memory);
  bind_continual(module);
  bind_ridge(module);
  bind_solve(module);
}
