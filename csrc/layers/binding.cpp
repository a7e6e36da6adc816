// Python bindings of the fused layers on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "layers/call.h"

namespace py = pybind11;
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
  layer.activation = Activation(in.integer("activation"));
  layer.rows = in.extent('R'), layer.width = int(in.extent('C')), layer.inner = int(in.extent('F'));
  in.require(in.extent('G') == in.extent('F') * (layer.activation == Activation::kGeglu ? 2 : 1), "expand_weight",
             "does not have the rows that the activation needs");
  layer.threads = torch_threads();
  return layer;
}

void forward(Arguments& in) {
  const FeedForward layer = read_feed_forward(in);
  void* y = in.contiguous("y", "RC", layer.dtype).data;
  const auto running = in.run();
  feed_forward(layer, y);
}

void backward(Arguments& in) {
  const FeedForward layer = read_feed_forward(in);
  const Matrix dy = matrix(in.tensor("dy", "RC", layer.dtype));
  FeedForwardGradients gradients{};
  gradients.x = in.optional_contiguous("dx", "RC", layer.dtype).data;
  gradients.norm = read_gradients(in, "dnorm_weight", "C", "dnorm_bias", "C", layer.dtype);
  gradients.expand = read_gradients(in, "dexpand_weight", "GC", "dexpand_bias", "G", layer.dtype);
  gradients.contract = read_gradients(in, "dcontract_weight", "CF", "dcontract_bias", "C", layer.dtype);
  const auto running = in.run();
  feed_forward_backward(layer, dy, gradients);
}

// Letters: R = B L rows of x, S = B N rows of the context, P = H D and Q = H E columns of the heads.
AttentionLayer read_attention_layer(Arguments& in) {
  const TensorView x = in.tensor("x", "RC", kFloating);
  PyObject* const given = in.object("context");  // a context without rows has no memory, but is one
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
  layer.scale = in.number("scale");
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
  const auto running = in.run();
  attention_layer(layer, kept, y);
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
  const auto running = in.run();
  attention_layer_backward(layer, dy, kept, gradients);
}

// The parameters of a block, or their gradients, one after the other; null where an optional one is None.
class Parameters {
 public:
  Parameters(Arguments& in, const char* name, DType dtype, bool optional)
      : in_(in), name_(name), items_(in.object(name)), dtype_(dtype), optional_(optional) {
    in.require(PyTuple_Check(items_) && PyTuple_GET_SIZE(items_) == kCount, name, "is not a tuple of 49 tensors");
  }

  Weights weights(const char* dims, const char* bias) {
    const TensorView weight = next(dims);
    return {matrix(weight), bias ? vector(bias) : nullptr};
  }
  NormWeights norm(const char* width, double eps) {
    const void* weight = vector(width);
    return {weight, vector(width), eps};
  }
  WeightGradients gradients(const char* dims, const char* bias) {
    void* weight = vector(dims);
    return {weight, bias ? vector(bias) : nullptr};
  }

 private:
  static constexpr int kCount = 49;

  TensorView next(const char* dims) {
    PyObject* item = PyTuple_GET_ITEM(items_, next_++);
    return optional_ && item == Py_None ? TensorView{} : in_.read(item, name_, dims, dtype_);
  }
  void* vector(const char* dims) {
    const TensorView view = next(dims);
    in_.require(view.contiguous(), name_, "holds a tensor that is not contiguous");
    return view.data;
  }

  Arguments& in_;
  const char* const name_;
  PyObject* const items_;
  const DType dtype_;
  const bool optional_;
  int next_ = 0;
};

// Letters: B, L and M latents, C columns, H heads of D, F = inner and G = 2 F columns of the feed-forward layers.
LatentBlock read_block(Arguments& in) {
  const TensorView x = in.contiguous("x", "BLC", kFloating), block = in.contiguous("block", "MC", x.dtype);
  LatentBlock layer{};
  layer.dtype = x.dtype, layer.x = {x.data, x.shape[2], 1}, layer.block = block.data;
  layer.attended = in.contiguous("attended", "BHMD", state_type(x.dtype)).data;
  layer.scale = in.number("scale");
  const double eps = in.number("eps");
  layer.batch = in.extent('B'), layer.latents = in.extent('L'), layer.block_latents = in.extent('M');
  layer.width = int(in.extent('C')), layer.heads = int(in.extent('H'));
  in.require(in.extent('H') * in.extent('D') == in.extent('C'), "attended", "does not have C columns in all heads");
  Parameters read(in, "parameters", x.dtype, false);
  layer.output = read.weights("CC", "C");
  const auto feed_forward = [&](int number) {
    FeedForwardWeights& weights = layer.feed_forward[number];
    weights.norm = read.norm("C", eps);
    weights.expand = read.weights("GC", "G"), weights.contract = read.weights("CF", "C");
  };
  const auto attention = [&](int number) {
    AttentionWeights& weights = layer.attention[number];
    weights.norm = read.norm("C", eps);
    if (number == 1) weights.context_norm = read.norm("C", eps);
    weights.query = read.weights("CC", nullptr), weights.key = read.weights("CC", nullptr);
    weights.value = read.weights("CC", nullptr), weights.output = read.weights("CC", "C");
  };
  feed_forward(0), attention(0), feed_forward(1), attention(1), feed_forward(2), attention(2), feed_forward(3);
  layer.inner = int(in.extent('F'));
  in.require(in.extent('G') == 2 * in.extent('F'), "parameters", "has features and a gate of other widths");
  layer.threads = torch_threads();
  return layer;
}

void* read_kept(Arguments& in, const LatentBlock& layer, bool optional) {
  const TensorView kept =
      optional ? in.optional_contiguous("kept", "K", DType::kFloat64) : in.contiguous("kept", "K", DType::kFloat64);
  in.require(!kept.data || size_t(kept.shape[0]) * sizeof(double) == latent_block_bytes(layer), "kept",
             "has another size");
  return kept.data;
}

py::object block_bytes(Arguments& in) {
  const LatentBlock layer = read_block(in);
  return py::int_(latent_block_bytes(layer));
}

void block_forward(Arguments& in) {
  const LatentBlock layer = read_block(in);
  void* y = in.contiguous("y", "BLC", layer.dtype).data;
  void* kept = read_kept(in, layer, true);
  const auto running = in.run();
  latent_block(layer, y, kept);
}

void block_backward(Arguments& in) {
  const LatentBlock layer = read_block(in);
  const DType dtype = layer.dtype;
  const TensorView dy = in.contiguous("dy", "BLC", dtype);
  void* kept = read_kept(in, layer, false);
  LatentBlockGradients to{};
  to.x = in.contiguous("dx", "BLC", dtype).data;
  to.block = in.contiguous("dblock", "BMC", dtype).data;
  to.attended = in.contiguous("dattended", "BMC", state_type(dtype)).data;
  Parameters read(in, "gradients", dtype, true);
  to.output = read.gradients("CC", "C");
  const auto feed_forward = [&](int number) {
    to.feed_forward[number] = {read.gradients("C", "C"), read.gradients("GC", "G"), read.gradients("CF", "C")};
  };
  const auto attention = [&](int number) {
    AttentionWeightGradients& of = to.attention[number];
    of.norm = read.gradients("C", "C");
    if (number == 1) of.context_norm = read.gradients("C", "C");
    of.query = read.gradients("CC", nullptr), of.key = read.gradients("CC", nullptr);
    of.value = read.gradients("CC", nullptr), of.output = read.gradients("CC", "C");
  };
  feed_forward(0), attention(0), feed_forward(1), attention(1), feed_forward(2), attention(2), feed_forward(3);
  const auto running = in.run();
  latent_block_backward(layer, {dy.data, dy.shape[2], 1}, kept, to);
}

}  // namespace

void bind_layers(py::module_& module) {
  define<forward>(module, "feed_forward_layer");
  define<backward>(module, "feed_forward_layer_backward");
  define<block_bytes>(module, "latent_block_bytes");
  define<block_forward>(module, "latent_block");
  define<block_backward>(module, "latent_block_backward");
  define<attention_forward_layer>(module, "attention_layer");
  define<attention_backward_layer>(module, "attention_layer_backward");
}

}  // namespace cmab
