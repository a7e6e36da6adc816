// Reads and checks the arguments of a call from Python (arguments.h).
#include "common/arguments.h"

#include <cstring>
#include <string>

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

}  // namespace

void Arguments::refuse(const char* name, const std::string& problem) const {
  throw python::ValueError(std::string(function_) + ": `" + name + "` " + problem);
}

// Callers mostly pass arguments in the order in which they are read, so the search starts after the last one found.
PyObject* Arguments::argument(const char* name) {
  const Py_ssize_t count = names_ ? PyTuple_GET_SIZE(names_) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_ssize_t at = (next_ + i) % count;
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names_, at), name) != 0) continue;
    next_ = at + 1;
    ++read_;
    return values_[at];
  }
  throw python::TypeError(std::string(function_) + ": `" + name + "` is missing");
}

TensorView Arguments::read(PyObject* object, const char* name, const char* dims, Types types) {
  TensorView view{};
  if (!is_tensor(object))
    throw python::TypeError(std::string(function_) + ": `" + name + "` is a " + Py_TYPE(object)->tp_name +
                            ", not a torch.Tensor");
  const int count = int(std::strlen(dims));
  if (!cmab::view(object, view) || view.dims != count)
    refuse(name, "is not a dense tensor of " + std::to_string(count) + " dimensions, (" + dims + ")");
  if (!types.has(view.dtype))
    throw python::TypeError(std::string(function_) + ": `" + name + "` is " + name_of(view.dtype) + ", not " +
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
  if (value == -1 && PyErr_Occurred()) throw python::Raised();
  return value;
}

int64_t Arguments::integer(const char* name) { return python::to_integer(argument(name)); }

bool Arguments::flag(const char* name) {
  PyObject* object = argument(name);
  if (!PyBool_Check(object)) throw python::TypeError(std::string(function_) + ": `" + name + "` is not a bool");
  return object == Py_True;
}

python::Unlocked Arguments::run() const {
  if (names_ && read_ != PyTuple_GET_SIZE(names_))
    throw python::TypeError(std::string(function_) + " was given an argument that it does not have");
  return python::Unlocked();
}

}  // namespace cmab
