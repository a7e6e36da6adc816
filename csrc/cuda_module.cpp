// The extension module cmab_kernels._cuda: Python bindings of the CUDA kernels.
#include <pybind11/pybind11.h>

#include "common/cuda_bindings.h"

// The parts of pybind11 that pybind11/pytypes.h needs, for files that include only that header (common/python.h).
template std::string pybind11::handle::cast<std::string>() const;

const cmab::Device cmab::kDevice = cmab::Device::kCuda;

PYBIND11_MODULE(_cuda, module, pybind11::mod_gil_not_used()) {
  module.def("shared_memory", cmab::cuda::shared_memory);
  cmab::cuda::bind_kernels(module);
}
