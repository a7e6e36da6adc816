// The operations of family C that stream over rows, over raw memory; the caller allocates everything.
#pragma once

#include "gram/gram.h"

namespace cmab::cpu {

struct GramInputs {
  GramShape shape;
  bool exact;  // products in float64 whatever the type
  int64_t batch, heads, keys;
  Operand key, value;
  Operand weight;          // width 1; without data: all are 1
  const uint8_t* ignored;  // (batch, N), or null
  int64_t ignored_stride[2];
  int threads;
};

// gram (B, H, D, D) = K'WK, with both its triangles, and moment (B, H, D, E) = K'WV, contiguous; null where not wanted.
void gram(const GramInputs&, double* gram, double* moment);

// dgram (B, H, D, D), not necessarily symmetric, and dmoment (B, H, D, E) are float64. Gradients are contiguous, in the
// types of keys, values and weights; null where not needed.
void gram_backward(const GramInputs&, const Operand& dgram, const Operand& dmoment, const GramGradient&);

// out (B, H, M, E), contiguous, = query (B, H, M, D) times matrix (B, H, D, E), which is float64.
struct RowsInputs {
  DType dtype;  // of query and out
  int64_t batch, heads, rows;
  int depth, width;  // D, E
  Operand query, matrix;
  int threads;
};
void apply_rows(const RowsInputs&, void* out);

}  // namespace cmab::cpu
