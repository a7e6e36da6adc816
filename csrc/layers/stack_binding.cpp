// Python bindings of stacked Constant Memory Attention Blocks on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "layers/call.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

// The tensors of a block, as read_block reads them, and the subset of them that read_reading reads.
constexpr int kOfBlock = 57, kOfReading = 8;

// The tensors of all blocks, one after the other: parameters, or their gradients. Some gradients may be None, which
// gives null.
class Tensors {
 public:
  Tensors(Arguments& in, const char* name, DType dtype, bool filled, int of_block = kOfBlock)
      : in_(in), name_(name), items_(in.object(name)), dtype_(dtype), filled_(filled), of_block_(of_block) {
    in.require(PyTuple_Check(items_) && count() > 0 && count() % of_block == 0, name,
               "is not a tuple with the right number of tensors for each block");
  }

  int64_t blocks() const { return count() / of_block_; }
  void* contiguous(const char* dims) {
    const TensorView view = next(dims);
    if (view.contiguous()) return view.data;
    in_.require(!filled_, name_, "holds a tensor that is not contiguous");
    return in_.read_copy(PyTuple_GET_ITEM(items_, next_ - 1), name_, dims, dtype_).data;
  }
  Weights weights(const char* dims, const char* bias) {
    const TensorView weight = next(dims);
    return {{weight.data, weight.stride[0], weight.stride[1]}, bias ? contiguous(bias) : nullptr};
  }
  NormWeights norm(double eps) {
    const void* weight = contiguous("C");
    return {weight, contiguous("C"), eps};
  }
  WeightGradients gradients(const char* dims, const char* bias) {
    void* weight = contiguous(dims);
    return {weight, bias ? contiguous(bias) : nullptr};
  }

 private:
  int64_t count() const { return PyTuple_GET_SIZE(items_); }
  TensorView next(const char* dims) {
    PyObject* item = PyTuple_GET_ITEM(items_, next_++);
    return filled_ && item == Py_None ? TensorView{} : in_.read(item, name_, dims, dtype_);
  }

  Arguments& in_;
  const char* const name_;
  PyObject* const items_;
  const DType dtype_;
  const bool filled_;
  const int of_block_;
  int64_t next_ = 0;
};

// Calls feed_forward(number) and attention(number) in the order of a block's layers after the first layer.
template <class FeedForward, class Attention>
void for_each_layer(FeedForward feed_forward, Attention attention) {
  feed_forward(0), attention(0), feed_forward(1), attention(1), feed_forward(2), attention(2), feed_forward(3);
}

void read_reading(Tensors& read, double eps, LatentBlock& block, BlockReading& reading) {
  block.block = read.contiguous("MC");
  block.norm = read.norm(eps), reading.context_norm = read.norm(eps);
  reading.query = read.weights("CC", nullptr), reading.key = read.weights("CC", nullptr);
  reading.value = read.weights("CC", nullptr);
}

void read_block(Tensors& read, double eps, LatentBlock& block, BlockReading& reading) {
  read_reading(read, eps, block, reading);
  block.output = read.weights("CC", "C");
  for_each_layer(
      [&](int number) {
        FeedForwardWeights& weights = block.feed_forward[number];
        weights.norm = read.norm(eps);
        weights.expand = read.weights("GC", "G"), weights.contract = read.weights("CF", "C");
      },
      [&](int number) {
        AttentionWeights& weights = block.attention[number];
        weights.norm = read.norm(eps);
        if (number == 1) weights.context_norm = read.norm(eps);
        weights.query = read.weights("CC", nullptr), weights.key = read.weights("CC", nullptr);
        weights.value = read.weights("CC", nullptr), weights.output = read.weights("CC", "C");
      });
}

void read_gradients(Tensors& read, LatentBlockGradients& block, BlockReadingGradients& reading) {
  block.block = read.contiguous("MC");
  block.norm = read.gradients("C", "C"), reading.context_norm = read.gradients("C", "C");
  reading.query = read.gradients("CC", nullptr), reading.key = read.gradients("CC", nullptr);
  reading.value = read.gradients("CC", nullptr), block.output = read.gradients("CC", "C");
  for_each_layer(
      [&](int number) {
        FeedForwardWeightGradients& of = block.feed_forward[number];
        of.norm = read.gradients("C", "C");
        of.expand = read.gradients("GC", "G"), of.contract = read.gradients("CF", "C");
      },
      [&](int number) {
        AttentionWeightGradients& of = block.attention[number];
        of.norm = read.gradients("C", "C");
        if (number == 1) of.context_norm = read.gradients("C", "C");
        of.query = read.gradients("CC", nullptr), of.key = read.gradients("CC", nullptr);
        of.value = read.gradients("CC", nullptr), of.output = read.gradients("CC", "C");
      });
}

// The values that all blocks share, for latents x (BLC) or inputs x (BNC).
LatentBlock read_common(Arguments& in, const TensorView& x) {
  LatentBlock common{};
  common.dtype = x.dtype, common.threads = torch_threads();
  common.batch = in.extent('B'), common.width = int(in.extent('C'));
  common.heads = int(in.integer("num_heads"));
  in.require(common.heads >= 1 && common.width % common.heads == 0, "num_heads", "does not divide the columns");
  return common;
}

void read_inputs(Arguments& in, const TensorView& inputs, BlockStack& stack) {
  const TensorView ignored = in.optional("key_padding_mask", "BN", DType::kBool);
  stack.inputs = operand(inputs), stack.rows = stack.reads ? in.extent('N') : 0;
  stack.ignored = static_cast<const uint8_t*>(ignored.data);
  stack.ignored_stride[0] = ignored.stride[0], stack.ignored_stride[1] = ignored.stride[1];
}

// Letters: B, L and M latents, N inputs, C columns, S = K B sets of H heads of D, F = inner and G = 2 F columns of the
// feed-forward layers.
BlockStack read_stack(Arguments& in) {
  const TensorView x = in.contiguous("x", "BLC", kFloating);
  PyObject* const given = in.object("inputs");  // inputs without rows have no memory, but still exist
  const bool reads = given != Py_None;
  const TensorView inputs = reads ? in.read(given, "inputs", "BNC", x.dtype) : TensorView{};
  const double eps = in.number("eps");
  LatentBlock common = read_common(in, x);
  common.latents = in.extent('L'), common.scale = in.number("scale");
  common.residual = Residual(in.integer("residual"));
  Tensors read(in, "parameters", x.dtype, false);
  BlockStack stack{};
  stack.blocks.resize(read.blocks(), common), stack.readings.resize(read.blocks());
  for (int64_t k = 0; k < read.blocks(); ++k) read_block(read, eps, stack.blocks[k], stack.readings[k]);
  in.require(in.extent('G') == 2 * in.extent('F'), "parameters", "has features and a gate of different widths");
  for (LatentBlock& block : stack.blocks) {
    block.block_latents = in.extent('M');
    block.inner = int(in.extent('F'));
  }
  stack.x = {x.data, x.shape[2], 1};
  stack.reads = reads;
  read_inputs(in, inputs, stack);
  const TensorView between = in.optional_contiguous("between", "WBLC", x.dtype);
  in.require(!between.data || between.shape[0] == read.blocks() - 1, "between", "has another number of blocks");
  stack.between = between.data;
  return stack;
}

// A state, or a part of one, of all blocks.
TensorView read_part(Arguments& in, const TensorView& view, const BlockStack& stack, const char* name) {
  const LatentBlock& any = stack.blocks[0];
  const bool fits =
      !view.data || (view.shape[0] == int64_t(stack.blocks.size()) * any.batch && view.shape[1] == any.heads &&
                     view.shape[2] == any.block_latents && (view.dims == 3 || view.shape[3] == any.width / any.heads));
  in.require(fits, name, "has another shape");
  return view;
}

void* read_kept(Arguments& in, const BlockStack& stack, bool optional) {
  const TensorView kept =
      optional ? in.optional_contiguous("kept", "Z", DType::kFloat64) : in.contiguous("kept", "Z", DType::kFloat64);
  in.require(!kept.data || size_t(kept.shape[0]) * sizeof(double) == block_stack_bytes(stack), "kept",
             "has another size");
  return kept.data;
}

// The incoming state and the new one, of all blocks.
struct States {
  Operand before_out, before_lse;
  void* out;
  double* lse;
};

States read_states(Arguments& in, const BlockStack& stack) {
  const DType sums = state_type(stack.blocks[0].dtype);
  const auto part = [&](const TensorView& view, const char* name) { return read_part(in, view, stack, name); };
  const Operand out = operand(part(in.optional("state_out", "SHMD", sums), "state_out"));
  const Operand lse = operand(part(in.optional("state_lse", "SHM", DType::kFloat64), "state_lse"));
  void* new_out = part(in.contiguous("out", "SHMD", sums), "out").data;
  const DType wide = DType::kFloat64;
  const TensorView lse_view =
      stack.reads ? in.contiguous("lse", "SHM", wide) : in.optional_contiguous("lse", "SHM", wide);
  void* new_lse = part(lse_view, "lse").data;
  return {out, lse, new_out, static_cast<double*>(new_lse)};
}

void stack_forward(Arguments& in) {
  const BlockStack stack = read_stack(in);
  const States states = read_states(in, stack);
  void* y = in.contiguous("y", "BLC", stack.blocks[0].dtype).data;
  void* kept = read_kept(in, stack, true);
  in.run([&] { block_stack(stack, states.before_out, states.before_lse, states.out, states.lse, y, kept); });
}

// Only the first cross-attentions; they use the first parameters of each block.
void stack_read(Arguments& in) {
  const TensorView inputs = in.tensor("inputs", "BNC", kFloating);
  LatentBlock common = read_common(in, inputs);
  common.scale = in.number("scale");
  Tensors read(in, "parameters", inputs.dtype, false, kOfReading);
  BlockStack stack{};
  stack.reads = true;
  stack.blocks.resize(read.blocks(), common), stack.readings.resize(read.blocks());
  const double eps = in.number("eps");
  for (int64_t k = 0; k < read.blocks(); ++k) read_reading(read, eps, stack.blocks[k], stack.readings[k]);
  for (LatentBlock& block : stack.blocks) block.block_latents = in.extent('M');
  read_inputs(in, inputs, stack);
  const States states = read_states(in, stack);
  in.run([&] { block_stack_read(stack, states.before_out, states.before_lse, states.out, states.lse); });
}

void stack_backward(Arguments& in) {
  const BlockStack stack = read_stack(in);
  const DType dtype = stack.blocks[0].dtype, sums = state_type(dtype);
  const auto part = [&](const TensorView& view, const char* name) { return read_part(in, view, stack, name); };
  const void* out = part(in.contiguous("out", "SHMD", sums), "out").data;
  const void* lse = part(in.optional_contiguous("lse", "SHM", DType::kFloat64), "lse").data;
  in.require(lse || !stack.reads, "lse", "is None");
  const TensorView dy = in.contiguous("dy", "BLC", dtype);
  const TensorView dbetween = in.optional_contiguous("dbetween", "WBLC", dtype);
  in.require(!dbetween.data || dbetween.shape[0] == int64_t(stack.blocks.size()) - 1, "dbetween",
             "has another number of blocks");
  void* kept = read_kept(in, stack, false);
  BlockStackGradients to{};
  to.x = in.contiguous("dx", "BLC", dtype).data;
  to.inputs = in.optional_contiguous("dinputs", "BNC", dtype).data;
  to.attended = part(in.optional_contiguous("dattended", "SHMD", sums), "dattended").data;
  in.require(to.attended || stack.reads, "dattended", "is None");
  Tensors read(in, "gradients", dtype, true);
  in.require(read.blocks() == int64_t(stack.blocks.size()), "gradients", "are those of another number of blocks");
  to.blocks.resize(read.blocks()), to.readings.resize(read.blocks());
  for (int64_t k = 0; k < read.blocks(); ++k) read_gradients(read, to.blocks[k], to.readings[k]);
  in.run([&] {
    block_stack_backward(stack, {dy.data, dy.shape[2], 1}, dbetween.data, out, static_cast<const double*>(lse), kept,
                         to);
  });
}

}  // namespace

void bind_stack(PyObject* module) {
  set_constant(module, "TENSORS_OF_BLOCK", kOfBlock);
  set_constant(module, "TENSORS_OF_READING", kOfReading);
  define<stack_read>(module, "block_stack_read");
  define<stack_forward>(module, "block_stack");
  define<stack_backward>(module, "block_stack_backward");
}

}  // namespace cmab
