// The steps of continual attention on the CPU, over raw memory; the caller allocates everything.
#pragma once

#include "continual/continual.h"

namespace cmab::cpu {

// The rings that hold the window before the step, if the step moves to new ones.
struct OldRings {
  const void* queries = nullptr;  // null: the step stays in the stream's rings
  const void *keys = nullptr, *values = nullptr;
  int64_t capacity = 0;
};

// The landmarks before the step, if the step replaces one and therefore writes them to new memory; null otherwise.
struct OldLandmarks {
  const void* queries = nullptr;
  const void *keys = nullptr, *inverse = nullptr;
};

const ContinualKernel& continual_kernel(DType);

// Whether one of the new tokens of the stream ends a segment; then the means of the segment replace a landmark.
bool replaces_landmark(const NystromStream&);

// The approximate number of multiplications of a step.
double multiplications(const NystromStream&);
double multiplications(const AttentionStream&);

// Whether all new tokens of all heads are finite.
bool finite(const ContinualKernel&, const Stream&, int threads);
void continual_nystrom(const ContinualKernel&, const NystromStream&, const OldRings&, const OldLandmarks&, int threads);
void continual_attention(const ContinualKernel&, const AttentionStream&, const OldRings&, int threads);

// Whether the history of a step with `count` rows of sums has a row that was recomputed from the window.
bool recomputes(const Stream&, int64_t count);
// Copies the oldest `rows` - t tokens of the window before the step, then the t new ones, from a ring of n + t rows in
// which the step has put them, to (B, H, rows, width).
void record_tokens(const Stream&, const void* ring, int width, int64_t rows, void* to);
void continual_nystrom_backward(const NystromGradient&, int threads);
void continual_attention_backward(const AttentionGradient&, int threads);

}  // namespace cmab::cpu
