// Replaces Python's header for csrc/*/binding.cpp. These files only pass objects on. Here an object
// is a value of torch, an IValue (cpp/arguments.cpp).
#pragma once

#include <cstddef>

using PyObject = struct _object;  // as in torch's headers
using Py_ssize_t = std::ptrdiff_t;

extern PyObject* const Py_None;
inline PyObject* Py_NewRef(PyObject* object) { return object; }
inline PyObject* PyBool_FromLong(long) { return Py_None; }  // of a function that no operator calls
