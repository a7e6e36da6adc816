// The m x m part of Nyström attention as Python calls it.
#include "common/bindings.h"
#include "pinv/pinv.h"

namespace py = pybind11;
using namespace cmab::cpu;

namespace cmab {
namespace {

Matrices matrices(uintptr_t address, const py::tuple& strides) {
  Matrices made{pointer<const void>(address), {}};
  read_strides(strides, made.stride);
  return made;
}

// (dtype, M, m, iterations, threads)
using Sizes = std::tuple<int, int64_t, int64_t, int, int>;

void pinv(const Sizes& sizes, uintptr_t matrix, const py::tuple& matrix_strides, uintptr_t inverse) {
  const auto [dtype, count, order, iterations, threads] = sizes;
  const PinvCall call{DType(dtype),          count, order, iterations, matrices(matrix, matrix_strides), {},
                      pointer<void>(inverse)};
  py::gil_scoped_release release;
  iterative_pinv(call, threads);
}

void pinv_backward(const Sizes& sizes, uintptr_t dinverse, const py::tuple& dinverse_strides, uintptr_t matrix,
                   const py::tuple& matrix_strides, uintptr_t dmatrix) {
  const auto [dtype, count, order, iterations, threads] = sizes;
  const PinvCall call{DType(dtype),
                      count,
                      order,
                      iterations,
                      matrices(matrix, matrix_strides),
                      matrices(dinverse, dinverse_strides),
                      pointer<void>(dmatrix)};
  py::gil_scoped_release release;
  iterative_pinv_backward(call, threads);
}

// (dtype, M, m, D, E, iterations, scale, threads)
using LandmarkSizes = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int, double, int>;

LandmarkCall landmarks(const LandmarkSizes& sizes, uintptr_t query, const py::tuple& query_strides, uintptr_t key,
                       const py::tuple& key_strides, uintptr_t value, const py::tuple& value_strides, uintptr_t absent,
                       const py::tuple& absent_strides) {
  LandmarkCall call{};
  int dtype, threads;
  std::tie(dtype, call.count, call.order, call.width, call.value_width, call.iterations, call.scale, threads) = sizes;
  call.dtype = DType(dtype);
  call.query = matrices(query, query_strides);
  call.key = matrices(key, key_strides);
  call.value = matrices(value, value_strides);
  call.absent = pointer<const uint8_t>(absent);
  read_strides(absent_strides, call.absent_stride);
  return call;
}

void values(const LandmarkSizes& sizes, uintptr_t query, const py::tuple& query_strides, uintptr_t key,
            const py::tuple& key_strides, uintptr_t value, const py::tuple& value_strides, uintptr_t absent,
            const py::tuple& absent_strides, uintptr_t out) {
  LandmarkCall call =
      landmarks(sizes, query, query_strides, key, key_strides, value, value_strides, absent, absent_strides);
  call.out = pointer<void>(out);
  py::gil_scoped_release release;
  landmark_values(call, std::get<7>(sizes));
}

void values_backward(const LandmarkSizes& sizes, uintptr_t dout, const py::tuple& dout_strides, uintptr_t query,
                     const py::tuple& query_strides, uintptr_t key, const py::tuple& key_strides, uintptr_t value,
                     const py::tuple& value_strides, uintptr_t absent, const py::tuple& absent_strides,
                     uintptr_t dquery, uintptr_t dkey, uintptr_t dvalue) {
  LandmarkCall call =
      landmarks(sizes, query, query_strides, key, key_strides, value, value_strides, absent, absent_strides);
  call.dout = matrices(dout, dout_strides);
  call.dquery = pointer<void>(dquery);
  call.dkey = pointer<void>(dkey);
  call.dvalue = pointer<void>(dvalue);
  py::gil_scoped_release release;
  landmark_values_backward(call, std::get<7>(sizes));
}

}  // namespace

void bind_pinv(py::module_& module) {
  module.def("iterative_pinv", pinv);
  module.def("iterative_pinv_backward", pinv_backward);
  module.def("landmark_values", values);
  module.def("landmark_values_backward", values_backward);
}

}  // namespace cmab
