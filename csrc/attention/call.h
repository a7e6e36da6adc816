// The two operations of latent cross-attention on the CPU, over raw memory; the caller allocates everything.
#pragma once

#include "attention/attention.h"

namespace cmab::cpu {

struct Inputs {
  Shape shape;
  int64_t batch, heads, queries, keys;  // keys: N, the total over all sets if they are packed
  Operand query, key, value;
  const uint8_t* ignored;  // (batch of the keys, N), or null
  int64_t ignored_stride[2];
  const void* cu_seqlens;  // (batch + 1,), or null: every batch element has its own N keys
  bool cu_seqlens_wide;    // int64, else int32
  int threads;
  Operand key_bias;  // (batch of the keys, H, N), in the type of sums; without data there is none
};

// Fills out (B, H, L, E), in the type of sums, and lse (B, H, L); both are contiguous. state_out and state_lse (width
// 1) are the incoming state; without data there is none. With `reliable` (B, H, L), contiguous, the keys are removed
// from the incoming state instead of added to it. `reliable` then says which rows have kept half of their digits.
void attention_forward(const Inputs&, const Operand& state_out, const Operand& state_lse, void* out, double* lse,
                       bool* reliable);
// Does one of `shares` parts of the same work, without an incoming state, on the calling thread. Each part fills rows
// that no other part writes, with the same bits. A share consists of whole batch elements if they can be divided
// evenly.
void attention_forward_share(const Inputs&, int64_t share, int64_t shares, void* out, double* lse);

// Fills out and lse with the state of the union of two disjoint sets of keys; all are contiguous, `rows` rows of
// `width` columns in the type of sums `dtype`.
struct StateRows {
  const void* out;
  const double* lse;
};
void merge_states(DType dtype, int64_t rows, int width, const StateRows& first, const StateRows& second, void* out,
                  double* lse);

// Fills the gradients, which are contiguous and null if not needed. The gradient of key_bias is in
// the type of sums, and all others have the dtype of the inputs. dout is (B, H, L, E) and dlse (B,
// H, L, 1); out and lse are the results of forward.
struct Gradients {
  void *query, *key, *value;
  void* key_bias = nullptr;
};
void attention_backward(const Inputs&, const Operand& dout, const Operand& dlse, const void* out, const double* lse,
                        const Gradients&);

}  // namespace cmab::cpu
