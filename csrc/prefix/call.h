// The two operations of the states of all prefixes on the CPU, over raw memory; the caller allocates everything.
#pragma once

#include "attention/call.h"
#include "prefix/prefix.h"

namespace cmab::cpu {

// The operands of both operations, with the names of attention/call.h. Rows of prefixes are (B, H, T * L, *).
struct PrefixInputs {
  Inputs inputs;
  int64_t every;
  Operand state_out, state_lse;  // without data: no incoming state
  Operand log_decay;             // (B, H, T), float64; without data: nothing fades

  int64_t prefixes() const { return (inputs.keys + every - 1) / every; }
};

// Fills out (B, H, T, L, E), in the type of sums, and lse (B, H, T, L); both are contiguous.
void prefix_forward(const PrefixInputs&, void* out, double* lse);

// Fills the gradients, contiguous and in the types of their tensors; null if not needed.
struct PrefixGradients {
  void *query, *key, *value, *state_out;
  double* state_lse;
  void* key_bias;  // in the type of sums
  double* log_decay;
};
void prefix_backward(const PrefixInputs&, const Operand& dout, const Operand& dlse, void* out, double* lse,
                     const PrefixGradients&);

}  // namespace cmab::cpu
