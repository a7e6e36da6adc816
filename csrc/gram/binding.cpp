// The streams of family C as Python calls them.
#include "common/bindings.h"
#include "gram/call.h"

namespace py = pybind11;
using namespace cmab::cpu;

namespace cmab {
namespace {

// (dtype, B, H, N, D, E, exact, threads)
using Sizes = std::tuple<int, int64_t, int64_t, int64_t, int, int, bool, int>;

GramInputs inputs(const Sizes& sizes, uintptr_t key, const py::tuple& key_strides, uintptr_t value,
                  const py::tuple& value_strides, uintptr_t weight, const py::tuple& weight_strides, uintptr_t ignored,
                  const py::tuple& ignored_strides) {
  GramInputs in{};
  int dtype;
  std::tie(dtype, in.batch, in.heads, in.keys, in.shape.key_width, in.shape.value_width, in.exact, in.threads) = sizes;
  in.shape.dtype = DType(dtype);
  in.key = operand(key, key_strides);
  in.value = operand(value, value_strides);
  in.weight = operand(weight, weight_strides);
  in.ignored = pointer<const uint8_t>(ignored);
  read_strides(ignored_strides, in.ignored_stride);
  return in;
}

void sums(const Sizes& sizes, uintptr_t key, const py::tuple& key_strides, uintptr_t value,
          const py::tuple& value_strides, uintptr_t weight, const py::tuple& weight_strides, uintptr_t ignored,
          const py::tuple& ignored_strides, uintptr_t gram_out, uintptr_t moment_out) {
  const GramInputs in =
      inputs(sizes, key, key_strides, value, value_strides, weight, weight_strides, ignored, ignored_strides);
  py::gil_scoped_release release;
  gram(in, pointer<double>(gram_out), pointer<double>(moment_out));
}

void backward(const Sizes& sizes, uintptr_t key, const py::tuple& key_strides, uintptr_t value,
              const py::tuple& value_strides, uintptr_t weight, const py::tuple& weight_strides, uintptr_t ignored,
              const py::tuple& ignored_strides, uintptr_t dgram, const py::tuple& dgram_strides, uintptr_t dmoment,
              const py::tuple& dmoment_strides, uintptr_t dkey, uintptr_t dvalue, uintptr_t dweight) {
  const GramInputs in =
      inputs(sizes, key, key_strides, value, value_strides, weight, weight_strides, ignored, ignored_strides);
  const Operand dgram_in = operand(dgram, dgram_strides), dmoment_in = operand(dmoment, dmoment_strides);
  const GramGradient gradient{pointer<void>(dkey), pointer<void>(dvalue), pointer<void>(dweight)};
  py::gil_scoped_release release;
  gram_backward(in, dgram_in, dmoment_in, gradient);
}

// (dtype, B, H, M, D, E, threads)
using RowsSizes = std::tuple<int, int64_t, int64_t, int64_t, int, int, int>;

void apply(const RowsSizes& sizes, uintptr_t query, const py::tuple& query_strides, uintptr_t matrix,
           const py::tuple& matrix_strides, uintptr_t out) {
  RowsInputs in{};
  int dtype;
  std::tie(dtype, in.batch, in.heads, in.rows, in.depth, in.width, in.threads) = sizes;
  in.dtype = DType(dtype);
  in.query = operand(query, query_strides);
  in.matrix = operand(matrix, matrix_strides);
  py::gil_scoped_release release;
  apply_rows(in, pointer<void>(out));
}

}  // namespace

void bind_gram(py::module_& module) {
  module.def("gram", sums);
  module.def("gram_backward", backward);
  module.def("apply_rows", apply);
}

}  // namespace cmab
