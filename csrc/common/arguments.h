// Keyword arguments of a call from Python. Each is read by name, once, and checked as it is read.
//
//   const TensorView key = in.tensor("key", "BHND", kFloating);
//   const TensorView value = in.tensor("value", "BHNE", key.dtype);
//
// Each letter of `dims` names an extent: the first tensor that has the letter defines it, all others must agree. A
// digit is the extent itself. Python has already checked the arguments: a failure here is a bug of the package, and is
// reported as an exception that names the argument.
#pragma once

#include <bitset>
#include <string>
#include <type_traits>
#include <vector>

#include "common/tensor_view.h"

namespace cmab {

// The device on which all tensors of this extension's calls must be; each extension defines it.
extern const Device kDevice;

// A set of element types.
class Types {
 public:
  constexpr Types(DType one) : bits_(1u << int(one)) {}
  constexpr Types operator|(Types other) const { return Types(bits_ | other.bits_); }
  constexpr bool has(DType dtype) const { return bits_ >> int(dtype) & 1; }

 private:
  constexpr explicit Types(unsigned bits) : bits_(bits) {}
  unsigned bits_;
};
constexpr Types kWide = Types(DType::kFloat64) | DType::kFloat32;
constexpr Types kFloating = kWide | DType::kBFloat16 | DType::kFloat16;

// Calls work(given) without the interpreter's lock.
void call_unlocked(void (*work)(const void*), const void* given);

template <class Work>
void unlocked(const Work& work) {
  call_unlocked([](const void* given) { (*static_cast<const Work*>(given))(); }, &work);
}

class Arguments {
 public:
  // Takes the arguments of a vectorcall: `values`. The last values have keywords, which are in the tuple `names` (null
  // for no keywords).
  Arguments(const char* function, PyObject* const* values, Py_ssize_t positional, PyObject* names);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  TensorView tensor(const char* name, const char* dims, Types types) { return read(argument(name), name, dims, types); }
  // Like tensor(); for None, the data of the view is null.
  TensorView optional(const char* name, const char* dims, Types types) {
    PyObject* object = argument(name);
    return object == Py_None ? TensorView{} : read(object, name, dims, types);
  }
  // Like tensor(), and contiguous: for outputs, and for inputs that kernels read without strides.
  TensorView contiguous(const char* name, const char* dims, Types types) {
    const TensorView view = tensor(name, dims, types);
    require(view.contiguous(), name, "is not contiguous");
    return view;
  }
  TensorView optional_contiguous(const char* name, const char* dims, Types types) {
    const TensorView view = optional(name, dims, types);
    require(view.contiguous(), name, "is not contiguous");
    return view;
  }
  // Reads a tensor that is part of an argument, such as a field of a state; checks it like tensor().
  TensorView read(PyObject* object, const char* name, const char* dims, Types types);
  // Like read(), for a contiguous copy that lives as long as the arguments.
  TensorView read_copy(PyObject* object, const char* name, const char* dims, Types types);

  // Scalars by name, and the object itself, unchecked.
  double number(const char* name);
  int64_t integer(const char* name);
  bool flag(const char* name);
  PyObject* object(const char* name) { return argument(name); }

  // All arguments of a call by position, for functions in which reading names would take too long. Raises TypeError
  // with the message `needed` unless there are `count` arguments.
  PyObject* const* by_position(Py_ssize_t count, const char* needed) const;

  // The extent that belongs to a letter of `dims`.
  int64_t extent(char letter) const { return extents_[int(letter)]; }
  int device_index() const { return device_index_ < 0 ? 0 : device_index_; }

  // Raises ValueError unless `holds`; the message is the name of the argument, followed by `problem`.
  void require(bool holds, const char* name, const char* problem) const {
    if (!holds) refuse(name, problem);
  }

  // Calls `work` without the interpreter's lock. Raises TypeError if an argument was not read.
  template <class Work>
  void run(const Work& work) const {
    check_all_read();
    unlocked(work);
  }

 private:
  static constexpr int kLetters = 128;

  PyObject* argument(const char* name);
  [[noreturn]] void refuse(const char* name, const std::string& problem) const;
  void check_all_read() const;

  const char* const function_;
  PyObject* const* const values_;
  const Py_ssize_t positional_;
  PyObject* const names_;
  Py_ssize_t next_ = 0, read_ = 0;
  int device_index_ = -1;
  int64_t extents_[kLetters];
  std::bitset<kLetters> known_;
  std::vector<pybind11::object> copies_;
};

void set_constant(PyObject* module, const char* name, long number);
void add_function(PyObject* module, const char* name, PyObject* (*function)(Arguments&));

// Adds kFunction(Arguments&) to the module under the name `name`. It returns void (None in Python) or a new reference.
template <auto kFunction>
void define(PyObject* module, const char* name) {
  add_function(module, name, [](Arguments& in) -> PyObject* {
    if constexpr (std::is_void_v<decltype(kFunction(in))>)
      return kFunction(in), Py_NewRef(Py_None);
    else
      return kFunction(in);
  });
}

}  // namespace cmab
