// Python bindings of the fused ridge solve on a GPU.
#include "common/cuda_bindings.h"
#include "intention/ridge_solve.cuh"

namespace cmab::cuda {
namespace {

RidgeCall read_rows(Arguments& in) {
  RidgeCall call{};
  const TensorView key = in.tensor("key", "BHND", kFloating), value = in.tensor("value", "BHNE", key.dtype);
  in.require(key.shape[3] >= 1 && key.shape[3] <= kMaxWidth, "key", "has a width that the kernel does not have");
  call.dtype = key.dtype;
  call.batch = key.shape[0], call.heads = key.shape[1], call.keys = key.shape[2];
  call.key_width = int(key.shape[3]), call.value_width = int(value.shape[3]);
  call.key = operand(key), call.value = operand(value);
  return call;
}

// Returns what a call needs in addition to its inputs and outputs: (matrices per launch, float64 elements of workspace,
// tickets).
PyObject* ridge_needs(Arguments& in) {
  const RidgeCall call = read_rows(in);
  const Needs needed =
      needs(call.batch * call.heads, call.keys, call.key_width, call.value_width, in.integer("most_workspace"));
  return Py_BuildValue("(LLL)", needed.together, needed.workspace, needed.tickets);
}

void ridge(Arguments& in) {
  RidgeCall call = read_rows(in);
  const TensorView weights = in.optional("weights", "BHN", state_type(call.dtype));
  const TensorView absent = in.optional("key_padding_mask", "BN", DType::kBool);
  call.weights = weights.data;
  std::copy_n(weights.stride, 3, call.weights_stride);
  call.absent = static_cast<const uint8_t*>(absent.data);
  std::copy_n(absent.stride, 2, call.absent_stride);
  const TensorView alpha = in.tensor("alpha", "BH", DType::kFloat64);
  call.alpha = static_cast<const double*>(alpha.data);
  std::copy_n(alpha.stride, 2, call.alpha_stride);
  call.weight = static_cast<double*>(in.contiguous("weight", "BHDE", DType::kFloat64).data);
  call.gram = static_cast<double*>(in.contiguous("gram", "BHDD", DType::kFloat64).data);
  call.info = static_cast<int32_t*>(in.contiguous("info", "BH", DType::kInt32).data);
  call.workspace = static_cast<double*>(in.contiguous("workspace", "W", DType::kFloat64).data);
  call.tickets = static_cast<unsigned*>(in.contiguous("tickets", "T", DType::kInt32).data);
  call.together = in.integer("together");
  const Cut cut = make_cut(call.keys, call.key_width, call.value_width);
  in.require(in.extent('W') >= cut.workspace() * call.together, "workspace", "is too small");
  in.require(in.extent('T') >= cut.tickets() * call.batch * call.heads, "tickets", "are too few");
  in.require(call.together >= 1 || call.batch * call.heads == 0, "together", "is not positive");
  const Stream on = read_stream(in);
  in.run([&] { ridge_solve(call, on); });
}

}  // namespace

int ridge_bytes(int key_width, int value_width, bool wide) {
  return wide ? ridge_shared_bytes<double>(key_width, value_width) : ridge_shared_bytes<float>(key_width, value_width);
}

void bind_ridge(PyObject* module) {
  set_constant(module, "MAX_WIDTH", kMaxWidth);
  define<ridge_needs>(module, "ridge_needs");
  define<ridge>(module, "ridge_solve");
}

}  // namespace cmab::cuda
