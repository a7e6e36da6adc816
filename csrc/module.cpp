// The extension module cmab_kernels._C: the usable instruction sets, and the bindings of each family. Python allocates
// the outputs, C++ fills them.
#include "common/bindings.h"

#include <pybind11/stl.h>

#include "common/arguments.h"

#include "common/instruction_sets.h"

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

PYBIND11_MODULE(_C, module) {
  module.def("instruction_sets", cmab::cpu::usable_instruction_sets);
  module.def("instruction_set", [] { return std::string(name(cmab::cpu::instruction_set())); });
  cmab::bind_attention(module);
  cmab::bind_continual(module);
  cmab::bind_gram(module);
  cmab::bind_layers(module);
  cmab::bind_pinv(module);
  cmab::bind_projected(module);
  cmab::bind_prefix(module);
  cmab::bind_solve(module);
  cmab::bind_stack(module);
}
