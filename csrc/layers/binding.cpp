// Python bindings of the fused layers on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "layers/call.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

Matrix matrix(const TensorView& view) { return {view.data, view.stride[0], view.stride[1]}; }

Weights read_weights(Arguments& in, const char* weight, const char* dims, const char* bias, const char* out,
                     DType dtype) {
  const TensorView read = in.tensor(weight, dims, dtype);
  return {matrix(read), in.optional_contiguous(bias, out, dtype).data};
}

NormWeights read_norm(Arguments& in, const char* weight, const char* bias, const char* eps, const char* width,
                      DType dtype) {
  const void* data = in.optional_contiguous(weight, width, dtype).data;
  return {data, in.optional_contiguous(bias, width, dtype).data, in.number(eps)};
}

WeightGradients read_gradients(Arguments& in, const char* weight, const char* dims, const char* bias, const char* out,
                               DType dtype) {
  void* data = in.optional_contiguous(weight, dims, dtype).data;
  return {data, in.optional_contiguous(bias, out, dtype).data};
}

FeedForward read_feed_forward(Arguments& in) {
  const TensorView x = in.tensor("x", "RC", kFloating);
  FeedForward layer{};
  layer.dtype = x.dtype, layer.x = matrix(x);
  layer.norm = read_norm(in, "norm_weight", "norm_bias", "eps", "C", x.dtype);
  layer.expand = read_weights(in, "expand_weight", "GC", "expand_bias", "G", x.dtype);
  layer.contract = read_weights(in, "contract_weight", "CF", "contract_bias", "C", x.dtype);
  layer.activation = Activation(in.integer("activation")), layer.residual = Residual(in.integer("residual"));
  layer.rows = in.extent('R'), layer.width = int(in.extent('C')), layer.inner = int(in.extent('F'));
  in.require(in.extent('G') == in.extent('F') * (layer.activation == Activation::kGeglu ? 2 : 1), "expand_weight",
             "does not have the rows that the activation needs");
  layer.threads = torch_threads();
  return layer;
}

void forward(Arguments& in) {
  const FeedForward layer = read_feed_forward(in);
  void* y = in.contiguous("y", "RC", layer.dtype).data;
  in.run([&] { feed_forward(layer, y); });
}

void backward(Arguments& in) {
  const FeedForward layer = read_feed_forward(in);
  const Matrix dy = matrix(in.tensor("dy", "RC", layer.dtype));
  FeedForwardGradients gradients{};
  gradients.x = in.optional_contiguous("dx", "RC", layer.dtype).data;
  gradients.norm = read_gradients(in, "dnorm_weight", "C", "dnorm_bias", "C", layer.dtype);
  gradients.expand = read_gradients(in, "dexpand_weight", "GC", "dexpand_bias", "G", layer.dtype);
  gradients.contract = read_gradients(in, "dcontract_weight", "CF", "dcontract_bias", "C", layer.dtype);
  in.run([&] { feed_forward_backward(layer, dy, gradients); });
}

// Letters: R = B L rows of x, S = B N rows of the context, P = H D and Q = H E columns of the heads.
AttentionLayer read_attention_layer(Arguments& in) {
  const TensorView x = in.tensor("x", "RC", kFloating);
  PyObject* const given = in.object("context");  // a context without rows has no memory, but is still a context
  const bool crosses = given != Py_None;
  const TensorView context = crosses ? in.read(given, "context", "SK", x.dtype) : TensorView{};
  const char* const keys = crosses ? "S" : "R";
  const TensorView ignored = in.optional_contiguous("key_padding_mask", keys, DType::kBool);
  AttentionLayer layer{};
  layer.dtype = x.dtype, layer.x = matrix(x);
  layer.crosses = crosses, layer.context = crosses ? matrix(context) : Matrix{};
  layer.ignored = static_cast<const uint8_t*>(ignored.data);
  layer.norm = read_norm(in, "norm_weight", "norm_bias", "eps", "C", x.dtype);
  layer.context_norm =
      read_norm(in, "context_norm_weight", "context_norm_bias", "context_eps", crosses ? "K" : "C", x.dtype);
  layer.query = read_weights(in, "query_weight", "PC", "query_bias", "P", x.dtype);
  layer.key = read_weights(in, "key_weight", crosses ? "PK" : "PC", "key_bias", "P", x.dtype);
  layer.value = read_weights(in, "value_weight", crosses ? "QK" : "QC", "value_bias", "Q", x.dtype);
  layer.output = read_weights(in, "output_weight", "CQ", "output_bias", "C", x.dtype);
  layer.scale = in.number("scale"), layer.residual = Residual(in.integer("residual"));
  layer.batch = in.integer("batch"), layer.heads = int(in.integer("num_heads"));
  in.require(layer.batch >= 1 && in.extent('R') % layer.batch == 0, "batch", "does not divide the rows of x");
  in.require(in.extent(*keys) % layer.batch == 0, "batch", "does not divide the rows of context");
  in.require(layer.heads >= 1 && in.extent('P') % layer.heads == 0 && in.extent('Q') % layer.heads == 0, "num_heads",
             "does not divide the columns of the heads");
  layer.latents = in.extent('R') / layer.batch, layer.keys = in.extent(*keys) / layer.batch;
  layer.width = int(in.extent('C')), layer.context_width = crosses ? int(in.extent('K')) : layer.width;
  layer.key_width = int(in.extent('P') / layer.heads), layer.value_width = int(in.extent('Q') / layer.heads);
  layer.threads = torch_threads();
  return layer;
}

AttentionKept read_kept(Arguments& in, const AttentionLayer& layer) {
  const DType sums = state_type(layer.dtype);
  const char* const keys = layer.crosses ? "SP" : "RP";
  const char* const values = layer.crosses ? "SQ" : "RQ";
  AttentionKept kept{};
  kept.query = in.contiguous("query", "RP", sums).data;
  kept.key = in.contiguous("key", keys, sums).data;
  kept.value = in.contiguous("value", values, sums).data;
  const TensorView out = in.contiguous("out", "BHLE", sums);
  in.require(out.is(sums, layer.batch, layer.heads, layer.latents, layer.value_width), "out", "has another shape");
  kept.out = out.data;
  kept.lse = static_cast<double*>(in.contiguous("lse", "BHL", DType::kFloat64).data);
  return kept;
}

void attention_forward_layer(Arguments& in) {
  const AttentionLayer layer = read_attention_layer(in);
  const AttentionKept kept = read_kept(in, layer);
  void* y = in.contiguous("y", "RC", layer.dtype).data;
  in.run([&] { attention_layer(layer, kept, y); });
}

void attention_backward_layer(Arguments& in) {
  const AttentionLayer layer = read_attention_layer(in);
  const AttentionKept kept = read_kept(in, layer);
  const DType dtype = layer.dtype;
  const bool crosses = layer.crosses;
  const Matrix dy = matrix(in.tensor("dy", "RC", dtype));
  AttentionLayerGradients gradients{};
  gradients.x = in.optional_contiguous("dx", "RC", dtype).data;
  gradients.context = in.optional_contiguous("dcontext", crosses ? "SK" : "RC", dtype).data;
  gradients.norm = read_gradients(in, "dnorm_weight", "C", "dnorm_bias", "C", dtype);
  gradients.context_norm =
      read_gradients(in, "dcontext_norm_weight", crosses ? "K" : "C", "dcontext_norm_bias", crosses ? "K" : "C", dtype);
  gradients.query = read_gradients(in, "dquery_weight", "PC", "dquery_bias", "P", dtype);
  gradients.key = read_gradients(in, "dkey_weight", crosses ? "PK" : "PC", "dkey_bias", "P", dtype);
  gradients.value = read_gradients(in, "dvalue_weight", crosses ? "QK" : "QC", "dvalue_bias", "Q", dtype);
  gradients.output = read_gradients(in, "doutput_weight", "CQ", "doutput_bias", "C", dtype);
  in.run([&] { attention_layer_backward(layer, dy, kept, gradients); });
}

}  // namespace

void bind_layers(PyObject* module) {
  define<forward>(module, "feed_forward_layer");
  define<backward>(module, "feed_forward_layer_backward");
  define<attention_forward_layer>(module, "attention_layer");
  define<attention_backward_layer>(module, "attention_layer_backward");
}

}  // namespace cmab
