// The batched regularised solve as Python calls it.
#include "common/bindings.h"
#include "solve/solve.h"

namespace py = pybind11;
using namespace cmab::cpu;

namespace cmab {
namespace {

Matrices matrices(uintptr_t address, const py::tuple& strides) {
  Matrices made{pointer<const void>(address), {}};
  read_strides(strides, made.stride);
  return made;
}

// (dtype, M, D, E, threads)
using Sizes = std::tuple<int, int64_t, int64_t, int64_t, int>;

void solve(const Sizes& sizes, uintptr_t gram, const py::tuple& gram_strides, uintptr_t rhs,
           const py::tuple& rhs_strides, uintptr_t alpha, int64_t alpha_stride, uintptr_t weight, uintptr_t info) {
  const auto [dtype, count, order, columns, threads] = sizes;
  const Systems systems{count,
                        order,
                        columns,
                        matrices(gram, gram_strides),
                        matrices(rhs, rhs_strides),
                        pointer<const void>(alpha),
                        alpha_stride,
                        pointer<void>(weight),
                        pointer<int32_t>(info)};
  py::gil_scoped_release release;
  regularised_solve(DType(dtype), systems, threads);
}

}  // namespace

void bind_solve(py::module_& module) { module.def("regularised_solve", solve); }

}  // namespace cmab
