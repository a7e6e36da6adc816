// Python binding of the batched regularised solve on a GPU.
#include "common/cuda_bindings.h"
#include "solve/regularised_solve.cuh"

namespace cmab::cuda {
namespace {

void solve(Arguments& in) {
  SolveCall call{};
  const TensorView gram = in.tensor("gram", "MDD", kWide), rhs = in.tensor("rhs", "MDE", gram.dtype);
  in.require(gram.shape[1] <= kMaxOrder, "gram", "has an order that the kernel does not support");
  call.wide = gram.dtype == DType::kFloat64;
  call.matrices = rhs.shape[0];
  call.order = int(rhs.shape[1]), call.columns = int(rhs.shape[2]);
  call.gram = gram.data, call.rhs = rhs.data;
  std::copy_n(gram.stride, 3, call.gram_stride);
  std::copy_n(rhs.stride, 3, call.rhs_stride);
  const TensorView alpha = in.tensor("alpha", "M", gram.dtype);
  call.alpha = alpha.data, call.alpha_stride = alpha.stride[0];
  call.weight = in.contiguous("weight", "MDE", gram.dtype).data;
  call.info = static_cast<int32_t*>(in.contiguous("info", "M", DType::kInt32).data);
  const Stream on = read_stream(in);
  in.run([&] { regularised_solve(call, on); });
}

}  // namespace

int solve_bytes(int order, int columns, bool wide) {
  return wide ? SolveBlock<double>::shared_bytes(order, columns) : SolveBlock<float>::shared_bytes(order, columns);
}

void bind_solve(PyObject* module) {
  set_constant(module, "MAX_ORDER", kMaxOrder);
  define<solve>(module, "regularised_solve");
}

}  // namespace cmab::cuda
