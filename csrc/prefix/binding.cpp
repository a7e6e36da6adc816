// Python bindings of the states of all prefixes on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "prefix/call.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

PrefixInputs read_inputs(Arguments& in) {
  PrefixInputs call{};
  Inputs& inputs = call.inputs;
  const TensorView query = in.tensor("query", "BHLD", kFloating);
  const TensorView key = in.tensor("key", "BHND", query.dtype), value = in.tensor("value", "BHNE", query.dtype);
  const TensorView ignored = in.optional("key_padding_mask", "BN", DType::kBool);
  const DType sums = state_type(query.dtype);
  call.state_out = operand(in.optional("state_out", "BHLE", sums));
  call.state_lse = operand(in.optional("state_lse", "BHL", DType::kFloat64));
  call.every = in.integer("every");
  in.require(call.every >= 1, "every", "is not positive");
  in.require(key.shape[3] >= 1 && key.shape[3] <= kMaxWidth, "key", "has a width that no kernel supports");
  in.require(value.shape[3] >= 1 && value.shape[3] <= kMaxWidth, "value", "has a width that no kernel supports");
  in.require(!call.state_out.data == !call.state_lse.data, "state_lse", "and state_out are not both given");
  const TensorView bias = in.optional("key_bias", "BHN", sums);
  const TensorView decay = in.optional("log_decay", "BHT", DType::kFloat64);
  inputs.shape = {query.dtype, int(key.shape[3]), int(value.shape[3]), in.number("scale"), bias.data != nullptr};
  inputs.batch = query.shape[0], inputs.heads = query.shape[1], inputs.queries = query.shape[2];
  inputs.keys = key.shape[2];
  inputs.query = operand(query), inputs.key = operand(key), inputs.value = operand(value);
  inputs.ignored = static_cast<const uint8_t*>(ignored.data);
  inputs.ignored_stride[0] = ignored.stride[0], inputs.ignored_stride[1] = ignored.stride[1];
  inputs.key_bias = operand(bias), call.log_decay = operand(decay);
  in.require(!decay.data || decay.shape[2] == call.prefixes(), "log_decay", "must have an element for each prefix");
  inputs.threads = torch_threads();
  return call;
}

// Rows of prefixes are given as (B, H, T * L, *).
void check_rows(const Arguments& in, const PrefixInputs& call, const char* name) {
  in.require(in.extent('R') == call.prefixes() * call.inputs.queries, name,
             "must have a row for each prefix and query");
}

void forward(Arguments& in) {
  const PrefixInputs call = read_inputs(in);
  void* out = in.contiguous("out", "BHRE", state_type(call.inputs.shape.dtype)).data;
  auto* lse = static_cast<double*>(in.contiguous("lse", "BHR", DType::kFloat64).data);
  check_rows(in, call, "out");
  in.run([&] { prefix_forward(call, out, lse); });
}

void backward(Arguments& in) {
  const PrefixInputs call = read_inputs(in);
  const DType dtype = call.inputs.shape.dtype, sums = state_type(dtype);
  const Operand dout = operand(in.tensor("dout", "BHRE", sums));
  const Operand dlse = operand(in.tensor("dlse", "BHR", DType::kFloat64));
  void* out = in.contiguous("out", "BHRE", sums).data;
  auto* lse = static_cast<double*>(in.contiguous("lse", "BHR", DType::kFloat64).data);
  check_rows(in, call, "out");
  const PrefixGradients gradients{
      in.optional_contiguous("dquery", "BHLD", dtype).data,
      in.optional_contiguous("dkey", "BHND", dtype).data,
      in.optional_contiguous("dvalue", "BHNE", dtype).data,
      in.optional_contiguous("dstate_out", "BHLE", sums).data,
      static_cast<double*>(in.optional_contiguous("dstate_lse", "BHL", DType::kFloat64).data),
      in.optional_contiguous("dkey_bias", "BHN", sums).data,
      static_cast<double*>(in.optional_contiguous("dlog_decay", "BHT", DType::kFloat64).data)};
  in.require(!gradients.key_bias || call.inputs.key_bias.data, "dkey_bias", "needs key_bias");
  in.require(!gradients.log_decay || call.log_decay.data, "dlog_decay", "needs log_decay");
  in.run([&] { prefix_backward(call, dout, dlse, out, lse, gradients); });
}

}  // namespace

void bind_prefix(PyObject* module) {
  define<forward>(module, "prefix_forward");
  define<backward>(module, "prefix_backward");
}

}  // namespace cmab
