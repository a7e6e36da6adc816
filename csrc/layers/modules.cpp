// Looks up the parameters of layers for a call that replaces the calls of all their modules. This is in C++ only for
// speed. A stack of six blocks has 264 modules, and every streaming update must check that none of
// them was replaced or changed. The same look-up in Python makes an update of one key longer by a
// quarter. No other part of the package reads modules in C++.
#include "common/arguments.h"
#include "common/bindings.h"
#include "common/python.h"

namespace cmab {
namespace {

// Names and types that are looked up once and never released.
struct Known {
  const py::object hooks[4] = {name("_forward_hooks"), name("_forward_pre_hooks"), name("_backward_hooks"),
                               name("_backward_pre_hooks")};
  const py::object forward = name("forward"), weight = name("weight"), bias = name("bias"), eps = name("eps"),
                   normalized_shape = name("normalized_shape"), dtype = name("dtype"), parameters = name("_parameters"),
                   modules = name("_modules");
  const py::object nn = import("torch.nn"), norm = nn.attr("LayerNorm"), parameter = nn.attr("Parameter"),
                   tensor = import("torch").attr("Tensor");

  static const Known& get() {
    static const Known* const kept = new Known;
    return *kept;
  }

 private:
  static py::object name(const char* text) { return owned(PyUnicode_InternFromString(text)); }
};

// The value of a key, or null.
py::object item(py::handle dict, py::handle key) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  if (PyDict_GetItemRef(dict.ptr(), key.ptr(), &found) < 0) throw py::error_already_set();
#else
  found = Py_XNewRef(PyDict_GetItemWithError(dict.ptr(), key.ptr()));
  if (!found && PyErr_Occurred()) throw py::error_already_set();
#endif
  return py::reinterpret_steal<py::object>(found);
}

bool is_true(py::handle object) {
  const int answer = PyObject_IsTrue(object.ptr());
  if (answer < 0) throw py::error_already_set();
  return answer != 0;
}

py::handle type_of(py::handle object) { return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())); }

// The module's own attributes; null if the module is not exactly a `kind`, by the rule of nn.layers.plain_parameters.
py::object plain_attributes(py::handle module, py::handle kind) {
  const Known& known = Known::get();
  if (!type_of(module).is(kind)) return {};
  py::object found = owned(PyObject_GenericGetDict(module.ptr(), nullptr));
  for (const py::handle name : known.hooks) {
    const py::object hooks = item(found, name);
    if (!hooks || is_true(hooks)) return {};
  }
  for (const py::handle name : {known.forward, known.weight, known.bias})
    if (item(found, name)) return {};
  return found;
}

// The result of the search: a list of tensors, and a set of the eps of norms.
struct Found {
  PyObject *tensors, *eps;

  // Adds a parameter. Returns whether the value is a parameter or a tensor, and not of a subclass.
  bool add(const py::object& parameter) const {
    const py::handle type = parameter ? type_of(parameter) : py::handle();
    if (!type.is(Known::get().parameter) && !type.is(Known::get().tensor)) return false;
    if (PyList_Append(tensors, parameter.ptr()) != 0) throw py::error_already_set();
    return true;
  }
};

bool collect_leaf(py::handle module, py::handle kind, bool biased, const Found& to) {
  const Known& known = Known::get();
  const py::object attributes = plain_attributes(module, kind);
  if (!attributes) return false;
  const py::object parameters = item(attributes, known.parameters);
  if (!parameters) return false;
  const py::object weight = item(parameters, known.weight), bias = item(parameters, known.bias);
  if (!to.add(weight) || (biased ? !to.add(bias) : !bias.is_none())) return false;
  if (!kind.is(known.norm)) return true;
  // Norms may be kept in float32, which a single call does not support.
  const py::object first = borrowed(PyList_GET_ITEM(to.tensors, 0));
  const auto dtype = [&](const py::object& of) { return owned(PyObject_GetAttr(of.ptr(), known.dtype.ptr())); };
  if (!dtype(weight).is(dtype(first))) return false;
  const py::object shape = item(attributes, known.normalized_shape);
  if (!shape || !PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != 1) return false;
  const py::object eps = item(attributes, known.eps);
  if (eps && PySet_Add(to.eps, eps.ptr()) != 0) throw py::error_already_set();
  return bool(eps);
}

// A tuple of a name, a kind, and the values that belong to them.
struct Entry {
  PyObject *name, *kind, *rest;

  explicit Entry(PyObject* tuple) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 3)
      throw py::value_error("collect_parameters: `layers` holds an object that is not a tuple of three");
    name = PyTuple_GET_ITEM(tuple, 0), kind = PyTuple_GET_ITEM(tuple, 1), rest = PyTuple_GET_ITEM(tuple, 2);
  }
};

// Calls function(module, entry) for the modules of the entries until the function returns false.
// Returns true if it returned true for all of them.
template <class Function>
bool for_each_module(py::handle modules, PyObject* entries, Function function) {
  if (!PyTuple_Check(entries))
    throw py::value_error("collect_parameters: `layers` is not a tuple, or holds a layer without a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); ++i) {
    const Entry entry(PyTuple_GET_ITEM(entries, i));
    const py::object module = item(modules, entry.name);
    if (!module || !function(module, entry)) return false;
  }
  return true;
}

// Whether a layer agrees with `settings`, a dict of values that all layers share, in those settings that the layer has.
bool has_settings(py::handle attributes, PyObject* settings) {
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(settings, &at, &name, &value);) {
    const py::object own = item(attributes, name);
    if (own && !own.equal(py::handle(value))) return false;
  }
  return true;
}

bool collect_layer(py::handle layer, const Entry& entry, PyObject* settings, const Found& to) {
  const py::object attributes = plain_attributes(layer, entry.kind);
  if (!attributes || !has_settings(attributes, settings)) return false;
  const py::object modules = item(attributes, Known::get().modules);
  return modules && for_each_module(modules, entry.rest, [&](py::handle module, const Entry& leaf) {
           return collect_leaf(module, leaf.kind, leaf.rest == Py_True, to);
         });
}

// Appends the parameters of the layers among `modules`, and adds the eps of their norms. A layer is given by its name,
// its kind, and for each module in it the name, the kind and whether it has a bias. False if a module is not exactly
// its kind, if a parameter is absent or of a subclass, or if a layer has other settings.
PyObject* collect_parameters(Arguments& in) {
  PyObject* const modules = in.object("modules");
  PyObject* const layers = in.object("layers");
  PyObject* const settings = in.object("settings");
  const Found to{in.object("tensors"), in.object("eps")};
  in.require(PyDict_Check(modules), "modules", "is not a dict");
  in.require(PyDict_Check(settings), "settings", "is not a dict");
  in.require(PyList_Check(to.tensors), "tensors", "is not a list");
  in.require(PySet_Check(to.eps), "eps", "is not a set");
  return PyBool_FromLong(for_each_module(modules, layers, [&](py::handle layer, const Entry& entry) {
    return collect_layer(layer, entry, settings, to);
  }));
}

}  // namespace

void bind_modules(PyObject* module) { define<collect_parameters>(module, "collect_parameters"); }

}  // namespace cmab
