// The fused layers of latents on the CPU, over raw memory; the caller allocates everything.
#pragma once

#include <vector>

#include "linear/linear.h"

namespace cmab::cpu {

// Rows of a layer, of all sets one after the other, from `first` on.
struct Rows {
  int64_t first, count;
  int64_t end() const { return first + count; }
};

// r + contract(activation(expand(norm(x)))) for rows x (rows, width), with r = x or norm(x).
struct FeedForward {
  DType dtype;  // of x and of all parameters
  int64_t rows;
  int width, inner;
  Activation activation;  // for geglu, expand gives (features, gate), each `inner` wide
  Residual residual;
  Matrix x;
  NormWeights norm;
  Weights expand, contract;
  int threads;
};

// Fills y (rows, width), contiguous.
void feed_forward(const FeedForward&, void* y);
// Fills some of the rows of y, on the calling thread; y may be x.
void feed_forward_rows(const FeedForward&, const Rows&, void* y);

struct FeedForwardGradients {
  void* x;  // (rows, width), contiguous
  WeightGradients norm, expand, contract;
};
// The same with the gradient dy (rows, width).
void feed_forward_backward(const FeedForward&, const Matrix& dy, const FeedForwardGradients&);

// r + output(attention of norm(x) over context_norm(context)), r = x or norm(x), with x (batch, latents, width) and
// context (batch, keys, context_width), both as rows one after the other. Without a context, norm(x) takes its place.
struct AttentionLayer {
  DType dtype;
  int64_t batch, latents, keys;
  int width, context_width, heads;
  int key_width, value_width;  // of a head: D, E
  double scale;
  Residual residual;
  bool crosses;  // the context is a separate tensor, which may have no rows
  Matrix x, context;
  const uint8_t* ignored;  // (batch * keys,), contiguous, or null
  NormWeights norm, context_norm;
  Weights query, key, value, output;
  int threads;
};

// The tensors that the forward pass keeps, contiguous: query (B, H, L, D), key (B, H, N, D), value (B, H, N, E) and out
// (B, H, L, E) in the type of sums; lse (B, H, L).
struct AttentionKept {
  void *query, *key, *value, *out;
  double* lse;
};
void attention_layer(const AttentionLayer&, const AttentionKept&, void* y);
// The first step of the layer, on the calling thread. project_latents makes the queries of some rows, and their keys
// and values if there is no context; project_context makes keys and values of some rows of the context.
void project_latents(const AttentionLayer&, const Rows&, const AttentionKept&);
void project_context(const AttentionLayer&, const Rows&, const AttentionKept&);

struct AttentionLayerGradients {
  void *x, *context;
  WeightGradients norm, context_norm, query, key, value, output;
};
void attention_layer_backward(const AttentionLayer&, const Matrix& dy, const AttentionKept&,
                              const AttentionLayerGradients&);

// The same for an attention whose result `out` already exists: y = r + output(out). Only the fields of `in` that are
// needed for this are read. attended_rows fills some rows of y, which may be x, on the calling thread. The gradient
// pass fills dout (B, H, L, E), in the type of sums; the gradient of r is dy.
void attended_rows(const AttentionLayer& in, const Rows&, const void* out, void* y);
void attended_layer_backward(const AttentionLayer& in, const Matrix& dy, const void* out, const WeightGradients& output,
                             void* dout);

// The layers after the first cross-attention of a Constant Memory Attention Block, whose result is `attended` (B, H, M,
// D):
//
//   m = feed-forward(self-attention(feed-forward(r + output(attended))))      for the M block latents
//   y = feed-forward(self-attention(feed-forward(cross-attention(x, m))))      for the L latents x
//
// with r = block or norm(block), as in every layer.
struct FeedForwardWeights {
  NormWeights norm;
  Weights expand, contract;
};
struct AttentionWeights {
  NormWeights norm, context_norm;
  Weights query, key, value, output;
};
struct LatentBlock {
  DType dtype;
  int64_t batch, latents, block_latents;
  int width, heads, inner;
  double scale;
  Residual residual;
  Matrix x;              // (batch * latents, width)
  const void* block;     // (block_latents, width), contiguous
  NormWeights norm;      // of the block latents
  const void* attended;  // contiguous, in the type of sums
  Weights output;
  FeedForwardWeights feed_forward[4];  // in the order of the formulas
  AttentionWeights attention[3];       // of the block latents, of the latents to the block latents, of the latents
  int threads;
};
struct FeedForwardWeightGradients {
  WeightGradients norm, expand, contract;
};
struct AttentionWeightGradients {
  WeightGradients norm, context_norm, query, key, value, output;
};
struct LatentBlockGradients {
  void* x;         // (batch * latents, width), contiguous; not null
  void* block;     // (batch * block_latents, width), contiguous, to be added up over the batch; not null
  void* attended;  // contiguous, in the type of sums
  WeightGradients norm, output;
  FeedForwardWeightGradients feed_forward[4];
  AttentionWeightGradients attention[3];
};

// K blocks. Each block starts from the latents that the block before has made. Their first cross-attentions, of
// norm(block) over context_norm(inputs), read the inputs (batch, rows, width) once for all blocks.
struct BlockReading {
  NormWeights context_norm;
  Weights query, key, value;
};
struct BlockStack {
  std::vector<LatentBlock> blocks;  // without x and attended
  std::vector<BlockReading> readings;
  Matrix x;  // (batch * latents, width), of the first block
  // (K - 1, batch * latents, width), contiguous: receives the latents after all blocks but the last; null: not wanted.
  void* between;
  bool reads;  // false: `out` is given, and the inputs are not read
  Operand inputs;
  int64_t rows;
  const uint8_t* ignored;  // (batch, rows), or null
  int64_t ignored_stride[2];
};
struct BlockReadingGradients {
  WeightGradients context_norm, query, key, value;
};
struct BlockStackGradients {
  void* x;                                   // (batch * latents, width), contiguous; not null
  void* inputs;                              // (batch, rows, width), contiguous, or null
  void* attended;                            // the gradient of `out`, contiguous, in the type of sums; null if in.reads
  std::vector<LatentBlockGradients> blocks;  // `block` is the sum over the batch here; x and attended are not used
  std::vector<BlockReadingGradients> readings;
};

// The number of bytes that the forward pass keeps for the backward pass.
size_t block_stack_bytes(const BlockStack&);
// block_stack fills y (batch * latents, width), contiguous, and `kept` (null: nothing is kept). If in.reads, it first
// does the work of block_stack_read, which fills out (K * batch, H, M, D), in the type of sums, and lse (K * batch, H,
// M): the state of the inputs, merged with the incoming state (without data: there is none).
void block_stack_read(const BlockStack&, const Operand& state_out, const Operand& state_lse, void* out, double* lse);
void block_stack(const BlockStack&, const Operand& state_out, const Operand& state_lse, void* out, double* lse, void* y,
                 void* kept);
// There is no incoming state here. dbetween (null: 0) is contiguous.
void block_stack_backward(const BlockStack&, const Matrix& dy, const void* dbetween, const void* out, const double* lse,
                          void* kept, const BlockStackGradients&);

}  // namespace cmab::cpu
