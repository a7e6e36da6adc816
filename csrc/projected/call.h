// Latent cross-attention to inputs that the operation itself projects to keys and values, on the CPU, over raw memory.
// The caller allocates everything.
#pragma once

#include "attention/call.h"

namespace cmab::cpu {

// K blocks of queries read the same inputs. Below, P = H D + H E: first the columns of the keys of all heads, then the
// columns of their values.
struct ProjectedInputs {
  Inputs attention;    // without key and value; shape.dtype is the dtype of sums. query (K * batch, H, L, D)
  int64_t blocks;      // K
  DType dtype;         // of the inputs
  Operand inputs;      // (batch of the keys, N, C), in its first three strides
  int columns;         // C
  const void* weight;  // (K, P, C), contiguous, in the type of sums
  const void* bias;    // (K, P)
  bool normed;         // whether each row is normed first: (x - mean) / sqrt(variance + eps)
  double eps;

  int key_columns() const { return int(attention.heads) * attention.shape.key_width; }
  int value_columns() const { return int(attention.heads) * attention.shape.value_width; }
  int projected_columns() const { return key_columns() + value_columns(); }
};

// Fills out (K * batch, H, L, E), in the type of sums, and lse (K * batch, H, L); both are contiguous. state_out and
// state_lse (width 1) are the incoming state; without data there is none.
void projected_attention_forward(const ProjectedInputs&, const Operand& state_out, const Operand& state_lse, void* out,
                                 double* lse);

// Fills the gradients, which are contiguous and null if not needed. The gradient of the inputs has
// the dtype of the inputs, and all others have the type of sums. dout is (K * batch, H, L, E) and
// dlse (K * batch, H, L, 1); out and lse are the results of forward.
struct ProjectedGradients {
  void *query, *inputs, *weight, *bias;
};
void projected_attention_backward(const ProjectedInputs&, const Operand& dout, const Operand& dlse, const void* out,
                                  const double* lse, const ProjectedGradients&);

}  // namespace cmab::cpu
