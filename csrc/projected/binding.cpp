// Python bindings of latent cross-attention over projected inputs on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "projected/call.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

// G is the number of sets of all K blocks.
ProjectedInputs read_inputs(Arguments& in) {
  ProjectedInputs call{};
  const TensorView query = in.tensor("query", "GHLD", kWide);
  const TensorView offsets = in.optional_contiguous("cu_seqlens", "S", Types(DType::kInt32) | DType::kInt64);
  const bool packed = offsets.data != nullptr;
  const TensorView inputs = in.tensor("inputs", packed ? "1NC" : "BNC", kFloating);
  in.require(state_type(inputs.dtype) == query.dtype, "query", "is not in the type of sums");
  const TensorView ignored = in.optional("key_padding_mask", packed ? "1N" : "BN", DType::kBool);
  const TensorView weight = in.contiguous("weight", "KPC", query.dtype);
  const TensorView bias = in.contiguous("bias", "KP", query.dtype);
  const int64_t sets = packed ? in.extent('S') - 1 : in.extent('B');
  in.require(in.extent('G') == in.extent('K') * sets, "query", "must have one batch element for each set and block");
  const int64_t heads = in.extent('H'), width = in.extent('D'), projected = in.extent('P');
  const int64_t value_width = heads == 0 ? 0 : projected / heads - width;
  in.require(width >= 1 && width <= kMaxWidth, "query", "has a width that no kernel supports");
  in.require(value_width >= 1 && value_width <= kMaxWidth && projected % heads == 0, "weight",
             "has a width that no kernel supports");
  in.require(in.extent('C') >= 1, "inputs", "has no columns");
  call.attention.shape = {query.dtype, int(width), int(value_width), in.number("scale")};
  call.attention.batch = sets, call.attention.heads = heads, call.attention.queries = in.extent('L');
  call.attention.keys = in.extent('N');
  call.attention.query = operand(query);
  call.attention.ignored = static_cast<const uint8_t*>(ignored.data);
  call.attention.ignored_stride[0] = ignored.stride[0], call.attention.ignored_stride[1] = ignored.stride[1];
  call.attention.cu_seqlens = offsets.data;
  call.attention.cu_seqlens_wide = offsets.dtype == DType::kInt64;
  call.attention.threads = torch_threads();
  call.blocks = in.extent('K'), call.dtype = inputs.dtype, call.inputs = operand(inputs);
  call.columns = int(in.extent('C')), call.weight = weight.data, call.bias = bias.data;
  call.normed = in.flag("normed"), call.eps = in.number("eps");
  return call;
}

void forward(Arguments& in) {
  const ProjectedInputs inputs = read_inputs(in);
  const DType sums = inputs.attention.shape.dtype;
  const Operand state_out = operand(in.optional("state_out", "GHLE", sums));
  const Operand state_lse = operand(in.optional("state_lse", "GHL", DType::kFloat64));
  void* out = in.contiguous("out", "GHLE", sums).data;
  in.require(in.extent('E') == inputs.attention.shape.value_width, "out", "is not as wide as the values");
  auto* lse = static_cast<double*>(in.contiguous("lse", "GHL", DType::kFloat64).data);
  in.run([&] { projected_attention_forward(inputs, state_out, state_lse, out, lse); });
}

void backward(Arguments& in) {
  const ProjectedInputs inputs = read_inputs(in);
  const DType sums = inputs.attention.shape.dtype;
  const Operand dout = operand(in.tensor("dout", "GHLE", sums)),
                dlse = operand(in.tensor("dlse", "GHL", DType::kFloat64));
  in.require(in.extent('E') == inputs.attention.shape.value_width, "dout", "is not as wide as the values");
  const void* out = in.contiguous("out", "GHLE", sums).data;
  const auto* lse = static_cast<const double*>(in.contiguous("lse", "GHL", DType::kFloat64).data);
  const ProjectedGradients gradients{
      in.optional_contiguous("dquery", "GHLD", sums).data,
      in.optional_contiguous("dinputs", inputs.attention.cu_seqlens ? "1NC" : "BNC", inputs.dtype).data,
      in.optional_contiguous("dweight", "KPC", sums).data, in.optional_contiguous("dbias", "KP", sums).data};
  in.run([&] { projected_attention_backward(inputs, dout, dlse, out, lse, gradients); });
}

}  // namespace

void bind_projected(PyObject* module) {
  define<forward>(module, "projected_attention_forward");
  define<backward>(module, "projected_attention_backward");
}

}  // namespace cmab
