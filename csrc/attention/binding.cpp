// Python bindings of latent cross-attention on the CPU.
#include "attention/call.h"
#include "attention/state.h"
#include "common/arguments.h"
#include "common/bindings.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

Inputs read_inputs(Arguments& in) {
  Inputs inputs{};
  const TensorView query = in.tensor("query", "BHLD", kFloating);
  const TensorView offsets = in.optional_contiguous("cu_seqlens", "S", Types(DType::kInt32) | DType::kInt64);
  const bool packed = offsets.data != nullptr;
  in.require(!packed || in.extent('S') == in.extent('B') + 1, "cu_seqlens",
             "must have one element more than query has sets");
  const TensorView key = in.tensor("key", packed ? "1HND" : "BHND", query.dtype);
  const TensorView value = in.tensor("value", packed ? "1HNE" : "BHNE", query.dtype);
  const TensorView ignored = in.optional("key_padding_mask", packed ? "1N" : "BN", DType::kBool);
  in.require(key.shape[3] >= 1 && key.shape[3] <= kMaxWidth, "key", "has a width that no kernel supports");
  in.require(value.shape[3] >= 1 && value.shape[3] <= kMaxWidth, "value", "has a width that no kernel supports");
  const TensorView bias = in.optional("key_bias", packed ? "1HN" : "BHN", state_type(query.dtype));
  inputs.shape = {query.dtype, int(key.shape[3]), int(value.shape[3]), in.number("scale"), bias.data != nullptr};
  inputs.batch = query.shape[0], inputs.heads = query.shape[1], inputs.queries = query.shape[2];
  inputs.keys = key.shape[2];
  inputs.query = operand(query), inputs.key = operand(key), inputs.value = operand(value);
  inputs.ignored = static_cast<const uint8_t*>(ignored.data);
  inputs.ignored_stride[0] = ignored.stride[0], inputs.ignored_stride[1] = ignored.stride[1];
  inputs.key_bias = operand(bias);
  inputs.cu_seqlens = offsets.data;
  inputs.cu_seqlens_wide = offsets.dtype == DType::kInt64;
  inputs.threads = torch_threads();
  return inputs;
}

void forward(Arguments& in) {
  const Inputs inputs = read_inputs(in);
  const DType sums = state_type(inputs.shape.dtype);
  const Operand state_out = operand(in.optional("state_out", "BHLE", sums));
  const Operand state_lse = operand(in.optional("state_lse", "BHL", DType::kFloat64));
  void* out = in.contiguous("out", "BHLE", sums).data;
  auto* lse = static_cast<double*>(in.contiguous("lse", "BHL", DType::kFloat64).data);
  auto* reliable = static_cast<bool*>(in.optional_contiguous("reliable", "BHL", DType::kBool).data);
  in.require(!reliable || state_lse.data, "reliable", "needs a state from which keys are removed");
  in.run([&] { attention_forward(inputs, state_out, state_lse, out, lse, reliable); });
}

void merge(Arguments& in) {
  const TensorView first = in.contiguous("first_out", "BHLE", kWide),
                   second = in.contiguous("second_out", "BHLE", first.dtype);
  const auto* first_lse = static_cast<double*>(in.contiguous("first_lse", "BHL", DType::kFloat64).data);
  const auto* second_lse = static_cast<double*>(in.contiguous("second_lse", "BHL", DType::kFloat64).data);
  void* out = in.contiguous("out", "BHLE", first.dtype).data;
  auto* lse = static_cast<double*>(in.contiguous("lse", "BHL", DType::kFloat64).data);
  in.run([&] {
    const int64_t rows = first.shape[0] * first.shape[1] * first.shape[2];
    merge_states(first.dtype, rows, int(first.shape[3]), {first.data, first_lse}, {second.data, second_lse}, out, lse);
  });
}

// Whether a log-sum-exp of any shape is a NaN or +inf; None for a tensor whose memory does not show this.
PyObject* is_not_below_infinity(Arguments& in) {
  PyObject* given = in.object("lse");
  TensorView lse;
  if (!is_tensor(given) || is_negated(given) || !view(given, lse) || lse.dtype != DType::kFloat64 ||
      lse.device != Device::kCpu)
    return Py_NewRef(Py_None);
  int64_t shape[kMaxDims] = {1, 1, 1, 1}, stride[kMaxDims] = {};
  std::copy_n(lse.shape, lse.dims, shape), std::copy_n(lse.stride, lse.dims, stride);
  const auto* const data = static_cast<const double*>(lse.data);
  bool refused = false;
  for (int64_t i = 0; i < shape[0]; ++i)
    for (int64_t j = 0; j < shape[1]; ++j)
      for (int64_t k = 0; k < shape[2]; ++k)
        for (int64_t l = 0; l < shape[3]; ++l)
          refused |= is_refused(data[i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3]]);
  return PyBool_FromLong(refused);
}

void backward(Arguments& in) {
  const Inputs inputs = read_inputs(in);
  const DType dtype = inputs.shape.dtype, sums = state_type(dtype);
  const char* const keys = inputs.cu_seqlens ? "1HND" : "BHND";
  const char* const values = inputs.cu_seqlens ? "1HNE" : "BHNE";
  const char* const biases = inputs.cu_seqlens ? "1HN" : "BHN";
  const Operand dout = operand(in.tensor("dout", "BHLE", sums)),
                dlse = operand(in.tensor("dlse", "BHL", DType::kFloat64));
  const void* out = in.contiguous("out", "BHLE", sums).data;
  const auto* lse = static_cast<const double*>(in.contiguous("lse", "BHL", DType::kFloat64).data);
  const Gradients gradients{
      in.optional_contiguous("dquery", "BHLD", dtype).data, in.optional_contiguous("dkey", keys, dtype).data,
      in.optional_contiguous("dvalue", values, dtype).data, in.optional_contiguous("dkey_bias", biases, sums).data};
  in.require(!gradients.key_bias || inputs.key_bias.data, "dkey_bias", "needs key_bias");
  in.run([&] { attention_backward(inputs, dout, dlse, out, lse, gradients); });
}

}  // namespace

void bind_attention(PyObject* module) {
  set_constant(module, "MAX_WIDTH", kMaxWidth);
  define<forward>(module, "attention_forward");
  define<backward>(module, "attention_backward");
  define<merge>(module, "merge_states");
  define<is_not_below_infinity>(module, "is_not_below_infinity");
}

}  // namespace cmab
