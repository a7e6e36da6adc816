// Reads and checks the arguments of a call from Python, and calls functions with them (arguments.h).
#include "common/arguments.h"

#include <pybind11/gil_simple.h>

#include <cstring>
#include <new>

#include "common/python.h"

namespace cmab {
namespace {

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float64", "float32", "bfloat16", "float16", "bool", "int32", "int64"};
  return kNames[int(dtype)];
}

std::string names_of(Types types) {
  std::string names;
  for (int i = 0; i <= int(DType::kInt64); ++i)
    if (types.has(DType(i))) names += (names.empty() ? "" : " or ") + std::string(name_of(DType(i)));
  return names;
}

// A function of a module; Python keeps the address of the function's definition.
struct Method {
  PyMethodDef definition;
  PyObject* (*function)(Arguments&);
};

// Turns a C++ exception into a Python exception.
PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
  const auto* const method = static_cast<const Method*>(PyCapsule_GetPointer(self, nullptr));
  try {
    Arguments in(method->definition.ml_name, values, positional, names);
    return method->function(in);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace

void call_unlocked(void (*work)(const void*), const void* given) {
  const py::gil_scoped_release_simple released;
  work(given);
}

Arguments::Arguments(const char* function, PyObject* const* values, Py_ssize_t positional, PyObject* names)
    : function_(function), values_(values), positional_(positional), names_(names) {}

Arguments::~Arguments() = default;

void Arguments::refuse(const char* name, const std::string& problem) const {
  throw py::value_error(std::string(function_) + ": `" + name + "` " + problem);
}

// Most callers pass arguments in the order in which they are read, so the search starts after the argument that was
// found last.
PyObject* Arguments::argument(const char* name) {
  if (positional_ > 0) throw py::type_error(std::string(function_) + " takes its arguments by keyword");
  const Py_ssize_t count = names_ ? PyTuple_GET_SIZE(names_) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_ssize_t at = (next_ + i) % count;
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names_, at), name) != 0) continue;
    next_ = at + 1;
    ++read_;
    return values_[at];
  }
  throw py::type_error(std::string(function_) + ": `" + name + "` is missing");
}

TensorView Arguments::read(PyObject* object, const char* name, const char* dims, Types types) {
  TensorView view{};
  if (!is_tensor(object))
    throw py::type_error(std::string(function_) + ": `" + name + "` is a " + Py_TYPE(object)->tp_name +
                         ", not a torch.Tensor");
  const int count = int(std::strlen(dims));
  if (!cmab::view(object, view) || view.dims != count)
    refuse(name, "is not a dense tensor of " + std::to_string(count) + " dimensions, (" + dims + ")");
  if (!types.has(view.dtype))
    throw py::type_error(std::string(function_) + ": `" + name + "` is " + name_of(view.dtype) + ", not " +
                         names_of(types));
  if (device_index_ < 0) device_index_ = view.device_index;
  if (view.device != kDevice || view.device_index != device_index_) refuse(name, "is on another device");
  for (int i = 0; i < count; ++i) {
    const int letter = dims[i];
    const bool digit = letter >= '0' && letter <= '9';
    if (!digit && !known_[letter]) extents_[letter] = view.shape[i], known_[letter] = true;
    const int64_t wanted = digit ? letter - '0' : extents_[letter];
    if (view.shape[i] != wanted)
      refuse(name, "has " + std::to_string(view.shape[i]) + " in dimension " + std::to_string(i) + " of (" + dims +
                       "), not " + std::to_string(wanted));
  }
  return view;
}

double Arguments::number(const char* name) {
  const double value = PyFloat_AsDouble(argument(name));
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

int64_t Arguments::integer(const char* name) { return to_integer(argument(name)); }

bool Arguments::flag(const char* name) {
  PyObject* object = argument(name);
  if (!PyBool_Check(object)) throw py::type_error(std::string(function_) + ": `" + name + "` is not a bool");
  return object == Py_True;
}

TensorView Arguments::read_copy(PyObject* object, const char* name, const char* dims, Types types) {
  copies_.push_back(owned(PyObject_CallMethod(object, "contiguous", nullptr)));
  return read(copies_.back().ptr(), name, dims, types);
}

PyObject* const* Arguments::by_position(Py_ssize_t count, const char* needed) const {
  if (positional_ != count || names_) throw py::type_error(std::string(function_) + ": " + needed);
  return values_;
}

void Arguments::check_all_read() const {
  if (names_ && read_ != PyTuple_GET_SIZE(names_))
    throw py::type_error(std::string(function_) + " was given an argument that it does not have");
}

void set_constant(PyObject* module, const char* name, long number) { py::handle(module).attr(name) = py::int_(number); }

void add_function(PyObject* module, const char* name, PyObject* (*function)(Arguments&)) {
  const auto as_method = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call));
  auto* const kept = new Method{{name, as_method, METH_FASTCALL | METH_KEYWORDS, nullptr}, function};  // for good
  py::handle(module).attr(name) = owned(PyCFunction_New(&kept->definition, py::capsule(kept).ptr()));
}

}  // namespace cmab
