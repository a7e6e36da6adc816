// The steps of continual attention over raw memory; the caller allocates everything.
#pragma once

#include "continual/continual.h"

namespace cmab::cpu {

// Where the window is before the step, if not yet in the rings of the stream.
struct OldRings {
  const void* queries = nullptr;  // null: it is there
  const void *keys = nullptr, *values = nullptr;
  int64_t capacity = 0;
};

// Where the landmarks are before the step, if the step replaces one and so goes to new memory.
struct OldLandmarks {
  const void* queries = nullptr;
  const void *keys = nullptr, *inverse = nullptr;
};

const ContinualKernel& continual_kernel(DType);

// Whether a landmark is replaced by one of the stream's tokens.
bool replaces_landmark(const NystromStream&);

// What a step multiplies, about.
double multiplications(const NystromStream&);
double multiplications(const AttentionStream&);

bool finite(const ContinualKernel&, const Stream&, int threads);
void continual_nystrom(const ContinualKernel&, const NystromStream&, const OldRings&, const OldLandmarks&, int threads);
void continual_attention(const ContinualKernel&, const AttentionStream&, const OldRings&, int threads);

}  // namespace cmab::cpu
