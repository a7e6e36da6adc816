// The extension module cmab_kernels._C: the usable instruction sets, and the bindings of each family. Python allocates
// the outputs, C++ fills them.
#include "common/arguments.h"
#include "common/bindings.h"
#include "common/instruction_sets.h"

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

namespace cmab {
namespace {

// Their names, in a list.
python::Object usable() {
  auto names = python::Object::owned(PyList_New(0));
  for (const std::string& name : cpu::usable_instruction_sets())
    if (PyList_Append(names.get(), python::Object::owned(PyUnicode_FromString(name.c_str())).get()) != 0)
      throw python::Raised();
  return names;
}

python::Object used() { return python::Object::owned(PyUnicode_FromString(name(cpu::instruction_set()))); }

// Adds a function without arguments to the module.
template <python::Object (*kFunction)()>
void define_constant(PyObject* module, const char* name) {
  const PyCFunction call = [](PyObject*, PyObject*) { return python::guarded([] { return kFunction().release(); }); };
  static PyMethodDef definition = {name, call, METH_NOARGS, nullptr};
  python::add_function(module, definition);
}

void fill(PyObject* module) {
  define_constant<usable>(module, "instruction_sets");
  define_constant<used>(module, "instruction_set");
  bind_attention(module);
  bind_continual(module);
  bind_gram(module);
  bind_layers(module);
  bind_modules(module);
  bind_pinv(module);
  bind_projected(module);
  bind_prefix(module);
  bind_solve(module);
  bind_stack(module);
}

}  // namespace
}  // namespace cmab

PyMODINIT_FUNC PyInit__C() { return cmab::python::make_module("_C", cmab::fill); }
