// Owned references to Python objects. They are pybind11's. Files without such references do not need this header: it
// takes 0.6 s to compile, and all of pybind11 takes 3 s.
#pragma once

#include <pybind11/pytypes.h>

namespace cmab {

namespace py = pybind11;

// Takes ownership of a new reference. Null means that a function of Python has set an exception.
inline py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}
inline py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

inline py::object import(const char* module) { return owned(PyImport_ImportModule(module)); }

inline int64_t to_integer(PyObject* object) {
  const int64_t number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

}  // namespace cmab
