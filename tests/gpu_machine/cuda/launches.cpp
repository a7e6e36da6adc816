// The host's part of the CUDA kernels for tensors on the CPU: a module with the functions of cmab_kernels._cuda, whose
// launches go to a Python function that `set_launch` names.
#include "common/launch.cuh"

#include "common/arguments.cpp"
#include "common/tensor_view.cpp"
#include "continual/attention_step.cu"
#include "continual/cuda_binding.cpp"
#include "continual/fields.cpp"
#include "continual/next_state.cpp"
#include "continual/nystrom_step.cu"
#include "gram/cuda_binding.cpp"
#include "gram/ridge_solve.cu"
#include "solve/cuda_binding.cpp"
#include "solve/regularised_solve.cu"

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

// Never destroyed: Python has ended when the module's variables are.
pybind11::function& cmab::cuda::on_launch = *new pybind11::function;

using namespace cmab::cuda;

PYBIND11_MODULE(launches, module) {
  module.def("set_launch", [](pybind11::function function) { on_launch = function; });
  bind_continual(module);
  bind_ridge(module);
  bind_solve(module);
}
