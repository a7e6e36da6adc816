// The extension module cmab_kernels._cuda: Python bindings of the CUDA kernels.
#include "common/cuda_bindings.h"

const cmab::Device cmab::kDevice = cmab::Device::kCuda;

namespace cmab::cuda {
namespace {

void fill(PyObject* module) {
  python::define_of_numbers<shared_memory>(module, "shared_memory");
  bind_continual(module);
  bind_ridge(module);
  bind_solve(module);
}

}  // namespace
}  // namespace cmab::cuda

PyMODINIT_FUNC PyInit__cuda() { return cmab::python::make_module("_cuda", cmab::cuda::fill); }
