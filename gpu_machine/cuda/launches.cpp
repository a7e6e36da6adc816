// The host code of the CUDA kernels for tensors on the CPU: a module with the functions of cmab_kernels._cuda. Its
// launches call a Python function that `set_launch` sets.
#include "common/launch.cuh"

#include "common/arguments.cpp"
#include "common/tensor_view.cpp"
#include "continual/attention_step.cu"
#include "continual/cuda_binding.cpp"
#include "continual/fields.cpp"
#include "continual/nystrom_step.cu"
#include "solve/cuda_binding.cpp"
#include "solve/regularised_solve.cu"

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

pybind11::handle cmab::cuda::on_launch;

PYBIND11_MODULE(launches, module) {
  module.def("set_launch", [](pybind11::object function) { cmab::cuda::on_launch = function.release(); });
  cmab::cuda::bind_kernels(module);
}
