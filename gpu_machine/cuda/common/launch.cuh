// In place of csrc/common/launch.cuh, for a C++ compiler without CUDA: a launch goes to a Python function, with the
// name of the kernel, that of its type T, and the bytes of its arguments. Kernels themselves are not compiled here.
#pragma once

#include <Python.h>

#include <stdexcept>
#include <string>
#include <typeinfo>

#include "common/python.h"
#include "common/stream.h"

#define __global__
#define __shared__
#define __grid_constant__
#define __align__(bytes)
#define __launch_bounds__(...)

inline struct {
  int x;
} blockIdx, blockDim;

constexpr int cudaDevAttrMaxSharedMemoryPerBlockOptin = 0;
inline int cudaDeviceGetAttribute(int* bytes, int, int) { return *bytes = 163 << 10, 0; }

// T is what the sources call the kernel's type where they launch it.
#define launch(kernel, blocks, threads, bytes, on, ...) \
  record(#kernel, typeid(T).name(), blocks, threads, bytes, __VA_ARGS__)

namespace cmab::cuda {

extern PyObject* on_launch;
inline void check(int, const char*) {}

// Takes the interpreter's lock until it is destroyed.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { PyGILState_Release(state_); }

 private:
  const PyGILState_STATE state_;
};

inline python::Object as_bytes(const void* data, size_t bytes) {
  return python::Object::owned(PyBytes_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(bytes)));
}

template <class... Arguments>
void record(const char* kernel, const char* type, int64_t blocks, int threads, int bytes,
            const Arguments&... arguments) {
  const Locked locked;
  const auto given =
      python::Object::owned(PyTuple_Pack(sizeof...(Arguments), as_bytes(&arguments, sizeof arguments).get()...));
  python::Object::owned(
      PyObject_CallFunction(on_launch, "ssLiiO", kernel, type, (long long)(blocks), threads, bytes, given.get()));
}

}  // namespace cmab::cuda
