// Family A as Python calls it.
#include "attention/call.h"
#include "common/bindings.h"
#include "common/instruction_sets.h"

namespace py = pybind11;
using namespace cmab::cpu;

namespace cmab {
namespace {

// (dtype, B, H, L, N, D, E, scale, threads)
using Sizes = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int, int, double, int>;

Inputs inputs(const Sizes& sizes, uintptr_t query, const py::tuple& query_strides, uintptr_t key,
              const py::tuple& key_strides, uintptr_t value, const py::tuple& value_strides, uintptr_t ignored,
              const py::tuple& ignored_strides, uintptr_t cu_seqlens, bool cu_seqlens_wide) {
  Inputs in{};
  int dtype;
  std::tie(dtype, in.batch, in.heads, in.queries, in.keys, in.shape.key_width, in.shape.value_width, in.shape.scale,
           in.threads) = sizes;
  in.shape.dtype = DType(dtype);
  in.query = operand(query, query_strides);
  in.key = operand(key, key_strides);
  in.value = operand(value, value_strides);
  in.ignored = pointer<const uint8_t>(ignored);
  read_strides(ignored_strides, in.ignored_stride);
  in.cu_seqlens = pointer<const void>(cu_seqlens);
  in.cu_seqlens_wide = cu_seqlens_wide;
  return in;
}

void forward(const Sizes& sizes, uintptr_t query, const py::tuple& query_strides, uintptr_t key,
             const py::tuple& key_strides, uintptr_t value, const py::tuple& value_strides, uintptr_t ignored,
             const py::tuple& ignored_strides, uintptr_t cu_seqlens, bool cu_seqlens_wide, uintptr_t state_out,
             const py::tuple& state_out_strides, uintptr_t state_lse, const py::tuple& state_lse_strides, uintptr_t out,
             uintptr_t lse) {
  const Inputs in = inputs(sizes, query, query_strides, key, key_strides, value, value_strides, ignored,
                           ignored_strides, cu_seqlens, cu_seqlens_wide);
  const Operand old_out = operand(state_out, state_out_strides), old_lse = operand(state_lse, state_lse_strides);
  py::gil_scoped_release release;
  attention_forward(in, old_out, old_lse, pointer<void>(out), pointer<double>(lse));
}

void backward(const Sizes& sizes, uintptr_t query, const py::tuple& query_strides, uintptr_t key,
              const py::tuple& key_strides, uintptr_t value, const py::tuple& value_strides, uintptr_t ignored,
              const py::tuple& ignored_strides, uintptr_t cu_seqlens, bool cu_seqlens_wide, uintptr_t dout,
              const py::tuple& dout_strides, uintptr_t dlse, const py::tuple& dlse_strides, uintptr_t out,
              uintptr_t lse, uintptr_t dquery, uintptr_t dkey, uintptr_t dvalue) {
  const Inputs in = inputs(sizes, query, query_strides, key, key_strides, value, value_strides, ignored,
                           ignored_strides, cu_seqlens, cu_seqlens_wide);
  const Operand dout_in = operand(dout, dout_strides), dlse_in = operand(dlse, dlse_strides);
  const Gradients gradients{pointer<void>(dquery), pointer<void>(dkey), pointer<void>(dvalue)};
  py::gil_scoped_release release;
  attention_backward(in, dout_in, dlse_in, pointer<const void>(out), pointer<const double>(lse), gradients);
}

}  // namespace

void bind_attention(py::module_& module) {
  module.attr("MAX_WIDTH") = kMaxWidth;
  module.def("attention_forward", forward);
  module.def("attention_backward", backward);
}

}  // namespace cmab
