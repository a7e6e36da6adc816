// Looks up the parameters of layers for a call that stands for all their modules: a stack has hundreds, and every
// streaming update looks at each.
#include "common/arguments.h"
#include "common/bindings.h"

using cmab::python::Object;

namespace cmab {
namespace {

// Names and types that are looked up once and never released.
struct Known {
  PyObject* hooks[4] = {name("_forward_hooks"), name("_forward_pre_hooks"), name("_backward_hooks"),
                        name("_backward_pre_hooks")};
  PyObject *forward = name("forward"), *weight = name("weight"), *bias = name("bias"), *eps = name("eps"),
           *dtype = name("dtype"), *parameters = name("_parameters"), *modules = name("_modules");
  Object nn = python::import("torch.nn"), torch = python::import("torch");
  Object norm = python::attribute(nn.get(), "LayerNorm"), parameter = python::attribute(nn.get(), "Parameter"),
         tensor = python::attribute(torch.get(), "Tensor");

  static const Known& get() {
    static const Known* const kept = new Known;
    return *kept;
  }

 private:
  static PyObject* name(const char* text) { return Object::owned(PyUnicode_InternFromString(text)).release(); }
};

// The value of a key, or null.
Object item(PyObject* dict, PyObject* key) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  if (PyDict_GetItemRef(dict, key, &found) < 0) throw python::Raised();
#else
  found = Py_XNewRef(PyDict_GetItemWithError(dict, key));
  if (!found && PyErr_Occurred()) throw python::Raised();
#endif
  return found ? Object::owned(found) : Object();
}

bool is_true(PyObject* object) {
  const int answer = PyObject_IsTrue(object);
  if (answer < 0) throw python::Raised();
  return answer != 0;
}

// The attributes of a module's own; null if it is not just a `kind`, by the rule of nn.layers.plain_parameters.
Object plain_attributes(PyObject* module, PyObject* kind) {
  const Known& known = Known::get();
  if (reinterpret_cast<PyObject*>(Py_TYPE(module)) != kind) return {};
  Object found = Object::owned(PyObject_GenericGetDict(module, nullptr));
  for (PyObject* name : known.hooks) {
    const Object hooks = item(found.get(), name);
    if (!hooks || is_true(hooks.get())) return {};
  }
  for (PyObject* name : {known.forward, known.weight, known.bias})
    if (item(found.get(), name)) return {};
  return found;
}

// What is found: a list of tensors, and a set of the eps of norms.
struct Found {
  PyObject *tensors, *eps;

  // Adds a parameter; whether it is one, or a tensor, and not of a type of its own.
  bool add(const Object& parameter) const {
    PyObject* const type = parameter ? reinterpret_cast<PyObject*>(Py_TYPE(parameter.get())) : nullptr;
    if (type != Known::get().parameter.get() && type != Known::get().tensor.get()) return false;
    if (PyList_Append(tensors, parameter.get()) != 0) throw python::Raised();
    return true;
  }
};

bool collect_leaf(PyObject* module, PyObject* kind, bool biased, const Found& to) {
  const Known& known = Known::get();
  const Object attributes = plain_attributes(module, kind);
  if (!attributes) return false;
  const Object parameters = item(attributes.get(), known.parameters);
  if (!parameters) return false;
  const Object weight = item(parameters.get(), known.weight), bias = item(parameters.get(), known.bias);
  if (!to.add(weight) || (biased ? !to.add(bias) : bias.get() != Py_None)) return false;
  if (kind != known.norm.get()) return true;
  // Norms may be kept in float32, of which one call knows nothing.
  const Object first = Object::borrowed(PyList_GET_ITEM(to.tensors, 0));
  const auto dtype = [&](const Object& of) { return Object::owned(PyObject_GetAttr(of.get(), known.dtype)); };
  if (dtype(weight).get() != dtype(first).get()) return false;
  const Object eps = item(attributes.get(), known.eps);
  if (eps && PySet_Add(to.eps, eps.get()) != 0) throw python::Raised();
  return bool(eps);
}

// A tuple of a name, a kind and what belongs to them.
struct Entry {
  PyObject *name, *kind, *rest;

  explicit Entry(PyObject* tuple) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 3)
      throw python::ValueError("collect_parameters: `layers` holds what is no tuple of three");
    name = PyTuple_GET_ITEM(tuple, 0), kind = PyTuple_GET_ITEM(tuple, 1), rest = PyTuple_GET_ITEM(tuple, 2);
  }
};

// Calls function(module, entry) for the entries' modules until it returns false; whether it never did.
template <class Function>
bool for_each_module(PyObject* modules, PyObject* entries, Function function) {
  if (!PyTuple_Check(entries))
    throw python::ValueError("collect_parameters: `layers` is no tuple, or holds a layer without one");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); ++i) {
    const Entry entry(PyTuple_GET_ITEM(entries, i));
    const Object module = item(modules, entry.name);
    if (!module || !function(module.get(), entry)) return false;
  }
  return true;
}

// Whether those of the `settings`, a dict of what all layers have in common, that a layer has are as they say.
bool has_settings(PyObject* attributes, PyObject* settings) {
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(settings, &at, &name, &value);) {
    const Object own = item(attributes, name);
    const int same = own ? PyObject_RichCompareBool(own.get(), value, Py_EQ) : 1;
    if (same < 0) throw python::Raised();
    if (!same) return false;
  }
  return true;
}

bool collect_layer(PyObject* layer, const Entry& entry, PyObject* settings, const Found& to) {
  const Known& known = Known::get();
  const Object attributes = plain_attributes(layer, entry.kind);
  if (!attributes || !has_settings(attributes.get(), settings)) return false;
  const Object modules = item(attributes.get(), known.modules);
  return modules && for_each_module(modules.get(), entry.rest, [&](PyObject* module, const Entry& leaf) {
           return collect_leaf(module, leaf.kind, leaf.rest == Py_True, to);
         });
}

// Appends the parameters of the layers among `modules`, and adds the eps of their norms. A layer is its name, its kind,
// and the name, the kind of each module in it and whether that has a bias. False if a module is not just its kind, a
// parameter is absent or of a type of its own, or a layer has other settings.
Object collect_parameters(Arguments& in) {
  PyObject* const modules = in.object("modules");
  PyObject* const layers = in.object("layers");
  PyObject* const settings = in.object("settings");
  const Found to{in.object("tensors"), in.object("eps")};
  in.require(PyDict_Check(modules), "modules", "is not a dict");
  in.require(PyDict_Check(settings), "settings", "is not a dict");
  in.require(PyList_Check(to.tensors), "tensors", "is not a list");
  in.require(PySet_Check(to.eps), "eps", "is not a set");
  return Object::borrowed(
      for_each_module(modules, layers,
                      [&](PyObject* layer, const Entry& entry) { return collect_layer(layer, entry, settings, to); })
          ? Py_True
          : Py_False);
}

}  // namespace

void bind_modules(PyObject* module) { define<collect_parameters>(module, "collect_parameters"); }

}  // namespace cmab
