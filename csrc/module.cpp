// The extension module cmab_kernels._C: the usable instruction sets, and the bindings of each family. Python allocates
// the outputs, and C++ fills them.
#include <pybind11/pybind11.h>

#include "common/arguments.h"
#include "common/bindings.h"
#include "common/instruction_sets.h"

// The parts of pybind11 that pybind11/pytypes.h needs, for files that include only that header (common/python.h).
template std::string pybind11::handle::cast<std::string>() const;

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

namespace py = pybind11;
using namespace cmab;

PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
  module.def("instruction_sets", [] {
    py::list names;
    for (const std::string& name : cpu::usable_instruction_sets()) names.append(name);
    return names;
  });
  module.def("instruction_set", [] { return cpu::name(cpu::instruction_set()); });
  bind_attention(module.ptr());
  bind_continual(module.ptr());
  bind_gram(module.ptr());
  bind_layers(module.ptr());
  bind_modules(module.ptr());
  bind_pinv(module.ptr());
  bind_projected(module.ptr());
  bind_prefix(module.ptr());
  bind_solve(module.ptr());
  bind_stack(module.ptr());
}
