// The extension module cmab_kernels._cuda: Python bindings of the CUDA kernels.
#include <pybind11/pybind11.h>

#include "common/cuda_bindings.h"

// What pybind11/pytypes.h needs of the rest of pybind11, in the files that include it alone (common/python.h).
template std::string pybind11::handle::cast<std::string>() const;

const cmab::Device cmab::kDevice = cmab::Device::kCuda;

PYBIND11_MODULE(_cuda, module, pybind11::mod_gil_not_used()) {
  module.def("shared_memory", cmab::cuda::shared_memory);
  cmab::cuda::bind_kernels(module);
}
