// The host's part of the CUDA kernels for tensors on the CPU: a module with the functions of cmab_kernels._cuda, whose
// launches go to a Python function that `set_launch` names.
#include "common/launch.cuh"

#include "common/arguments.cpp"
#include "common/tensor_view.cpp"
#include "continual/attention_step.cu"
#include "continual/cuda_binding.cpp"
#include "continual/fields.cpp"
#include "continual/nystrom_step.cu"
#include "gram/cuda_binding.cpp"
#include "gram/ridge_solve.cu"
#include "solve/cuda_binding.cpp"
#include "solve/regularised_solve.cu"

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

PyObject* cmab::cuda::on_launch = nullptr;

using namespace cmab;

namespace {

void set_launch(Arguments& in) { Py_XSETREF(cuda::on_launch, Py_NewRef(in.object("function"))); }

void fill(PyObject* module) {
  define<set_launch>(module, "set_launch");
  cuda::bind_continual(module);
  cuda::bind_ridge(module);
  cuda::bind_solve(module);
}

}  // namespace

PyMODINIT_FUNC PyInit_launches() { return python::make_module("launches", fill); }
