// What the extensions need of Python's C interface: owned references, exceptions, the interpreter's lock, and functions
// of a module.
#pragma once

#include <Python.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace cmab::python {

// Thrown where Python has set an exception, which then reaches the caller as it is.
struct Raised {};

// Exceptions that reach the caller as Python's of the same name.
struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ValueError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An owned reference to a Python object, or null.
class Object {
 public:
  Object() = default;
  Object(Object&& other) noexcept : object_(other.release()) {}
  Object& operator=(Object&& other) noexcept {
    Py_XSETREF(object_, other.release());
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  // Takes over a new reference. Null is what Python's functions return when they have set an exception.
  static Object owned(PyObject* object) {
    if (!object) throw Raised();
    return Object(object);
  }
  static Object borrowed(PyObject* object) { return Object(Py_NewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Object(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

inline Object attribute(PyObject* object, const char* name) {
  return Object::owned(PyObject_GetAttrString(object, name));
}
inline Object import(const char* module) { return Object::owned(PyImport_ImportModule(module)); }
inline Object call(PyObject* function) { return Object::owned(PyObject_CallNoArgs(function)); }
inline Object call_method(PyObject* object, const char* name) { return call(attribute(object, name).get()); }

inline Object from_integer(int64_t number) { return Object::owned(PyLong_FromLongLong(number)); }
inline int64_t to_integer(PyObject* object) {
  const int64_t number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred()) throw Raised();
  return number;
}

// Releases the interpreter's lock until it is destroyed, if `wanted`.
class Unlocked {
 public:
  explicit Unlocked(bool wanted = true) : thread_(wanted ? PyEval_SaveThread() : nullptr) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (thread_) PyEval_RestoreThread(thread_);
  }

 private:
  PyThreadState* const thread_;
};

// Keeps other threads from a section of the same object until it is destroyed or the thread is detached. It is what the
// interpreter's lock does where there is one; a free-threaded Python has none.
class Section {
 public:
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
#ifdef Py_GIL_DISABLED
  explicit Section(PyObject* object) { PyCriticalSection_Begin(&section_, object); }
  ~Section() { PyCriticalSection_End(&section_); }

 private:
  PyCriticalSection section_;
#else
  explicit Section(PyObject*) {}
#endif
};

// Returns work()'s result; a C++ exception becomes the current Python exception, and the result is null.
template <class Work>
PyObject* guarded(Work work) {
  try {
    return work();
  } catch (const Raised&) {
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// ---- what a module holds

inline void set_constant(PyObject* module, const char* name, long number) {
  if (PyModule_AddIntConstant(module, name, number) != 0) throw Raised();
}

using VectorCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// Adds a function to the module; `definition` must outlive it.
inline void add_function(PyObject* module, PyMethodDef& definition) {
  const Object function = Object::owned(PyCFunction_New(&definition, nullptr));
  if (PyModule_AddObjectRef(module, definition.ml_name, function.get()) != 0) throw Raised();
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <class... Numbers, size_t... kIndex>
PyObject* call_with_numbers(int (*function)(Numbers...), PyObject* const* given, std::index_sequence<kIndex...>) {
  return from_integer(function(static_cast<Numbers>(to_integer(given[kIndex]))...)).release();
}

template <class... Numbers>
PyObject* checked_call(int (*function)(Numbers...), PyObject* const* given, Py_ssize_t count) {
  if (count != Py_ssize_t(sizeof...(Numbers))) throw TypeError("another number of arguments is needed");
  return call_with_numbers(function, given, std::index_sequence_for<Numbers...>());
}

// Adds kFunction, from integers and flags to an integer, to the module: its arguments are given by position.
template <auto kFunction>
void define_of_numbers(PyObject* module, const char* name) {
  const VectorCall call = [](PyObject*, PyObject* const* given, Py_ssize_t count) {
    return guarded([&] { return checked_call(kFunction, given, count); });
  };
  static PyMethodDef definition = {name, as_method(call), METH_FASTCALL, nullptr};
  add_function(module, definition);
}

// Makes the module of an extension, and fills it.
inline PyObject* make_module(const char* name, void (*fill)(PyObject* module)) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, name, nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return guarded([&] {
    Object module = Object::owned(PyModule_Create(&definition));
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(module.get(), Py_MOD_GIL_NOT_USED);
#endif
    fill(module.get());
    return module.release();
  });
}

}  // namespace cmab::python
