// The operations of regularised least squares on the CPU that read rows one after the other, over raw memory. The
// caller allocates everything.
#pragma once

#include "common/packed.h"
#include "intention/gram.h"

namespace cmab::cpu {

struct GramInputs {
  GramShape shape;
  bool exact;                  // compute in float64 for every type
  int64_t batch, heads, keys;  // batch: the sets of keys
  Offsets offsets;             // of packed sets, which share batch element 0 of keys, values, weights and mask
  Operand key, value;
  Operand weight;          // (batch, heads, N); without data: all weights are 1
  const uint8_t* ignored;  // (batch, N), or null
  int64_t ignored_stride[2];
  int threads;
};

// Fills gram (B, H, D, D) = K'WK, both triangles, and moment (B, H, D, E) = K'WV; both are contiguous, and null if not
// needed.
void gram(const GramInputs&, double* gram, double* moment);

// The sums of a state (B, H, D, D) and (B, H, D, E), float64, and its number of keys (B, H), int64. Without data there
// is no state.
struct RidgeSums {
  Operand gram, moment, count;
};

// Adds gram and moment as above, in float64, to the sums of `before`, and fills count (B, H), contiguous, with the
// number of keys that are not ignored plus the number before.
void ridge_update(const GramInputs&, const RidgeSums& before, double* gram, double* moment, int64_t* count);

// Fills the gradients, contiguous and in the types of keys, values and weights; null if not needed. dgram (B, H, D, D),
// not necessarily symmetric, and dmoment (B, H, D, E) are float64. Rows after the last packed set get zeros.
void gram_backward(const GramInputs&, const Operand& dgram, const Operand& dmoment, const GramGradient&);

// Fills out (B, H, M, E), contiguous, with query (B, H, M, D) times matrix (B, H, D, E), which is float64.
struct RowsInputs {
  DType dtype;  // of query and out
  int64_t batch, heads, rows;
  int depth, width;  // D, E
  Operand query, matrix;
  int threads;
};
void apply_rows(const RowsInputs&, void* out);

}  // namespace cmab::cpu
