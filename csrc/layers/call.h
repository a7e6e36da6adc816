// The fused layers of latents on the CPU, over raw memory; the caller allocates everything.
#pragma once

#include "linear/linear.h"

namespace cmab::cpu {

// x + contract(activation(expand(norm(x)))) for rows x (rows, width).
struct FeedForward {
  DType dtype;  // of x and of all parameters
  int64_t rows;
  int width, inner;
  Activation activation;  // for geglu, expand gives (features, gate), each `inner` wide
  Matrix x;
  NormWeights norm;
  Weights expand, contract;
  int threads;
};

// Fills y (rows, width) and, unless null, hidden: what expand gave, in the type of sums. Both are contiguous.
void feed_forward(const FeedForward&, void* y, void* hidden);

struct FeedForwardGradients {
  void* x;  // (rows, width), contiguous
  WeightGradients norm, expand, contract;
};
// dy (rows, width); hidden as feed_forward wrote it.
void feed_forward_backward(const FeedForward&, const Matrix& dy, const void* hidden, const FeedForwardGradients&);

// x + output(attention of norm(x) over context_norm(context)), with x (batch, latents, width) and context (batch, keys,
// context_width), both as rows one after the other; without a context, norm(x) is it.
struct AttentionLayer {
  DType dtype;
  int64_t batch, latents, keys;
  int width, context_width, heads;
  int key_width, value_width;  // of a head: D, E
  double scale;
  bool crosses;  // the context is another tensor, which may have no rows
  Matrix x, context;
  const uint8_t* ignored;  // (batch * keys,), contiguous, or null
  NormWeights norm, context_norm;
  Weights query, key, value, output;
  int threads;
};

// What the forward pass keeps, contiguous: query (B, L, H D), key (B, N, H D), value (B, N, H E) and out (B, H, L, E)
// in the type of sums; lse (B, H, L).
struct AttentionKept {
  void *query, *key, *value, *out;
  double* lse;
};
void attention_layer(const AttentionLayer&, const AttentionKept&, void* y);

struct AttentionLayerGradients {
  void *x, *context;
  WeightGradients norm, context_norm, query, key, value, output;
};
void attention_layer_backward(const AttentionLayer&, const Matrix& dy, const AttentionKept&,
                              const AttentionLayerGradients&);

}  // namespace cmab::cpu
