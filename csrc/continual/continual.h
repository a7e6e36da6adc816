// Continual attention on the CPU: the interface between the driver (continual.cpp) and the kernels of each instruction
// set. All tensors but the new tokens are contiguous, (batch, heads, rows, width). The state is documented in
// cmab_kernels/nystrom/continual/state.py.
//
// The rules for a kernel are those of attention/attention.h: it allocates nothing, starts no thread and sees one head;
// its scratch is 64-byte aligned and uninitialised. The state after a token depends on the tokens before it. It never
// depends on the capacity of the rings, on where their rows wrap around, or on how many tokens come at once.
#pragma once

#include "common/operands.h"
#include "continual/schedule.h"

namespace cmab::cpu {

// The parameters that all heads of a step share.
struct StreamShape {
  DType dtype;  // of tokens, rings and outputs; sums and landmarks have the state's type
  int64_t batch, heads;
  int64_t window;              // n
  int64_t capacity;            // C > n, rows of the rings
  int64_t tokens;              // t >= 1
  int key_width, value_width;  // D, E >= 1
  double scale;                // logits are scale * q k'
  bool retroactive;            // outputs of the whole window after the last token, not one for each new token
};

// One step. The rings already hold the window. The kernel adds the new tokens; it also reads the tokens that leave the
// window, which are still in the rings.
struct Stream {
  StreamShape shape;
  const int64_t* positions;       // (B, H), the number of tokens that each head's stream had before this step
  const char* absent;             // (B), nonzero if a row of the batch has no token and keeps its state; or null
  Operand query, key, value;      // the new tokens
  void *queries, *keys, *values;  // rings
  const void* sums;               // before the step
  void* new_sums;                 // after the step; this is never the memory of `sums`
  // For the gradient, (B, H, t rows, history_columns()): what it reads of each row of sums after each token. Null if
  // no gradient is needed.
  void* history;
  void* out;  // (B, H, t, E), or (B, H, n, E) if retroactive; NaN if a row has no token

  bool has_tokens(int64_t head) const { return !absent || !absent[head / shape.heads]; }
};

// A step of Nyström attention; `sums` has a row for each landmark.
struct NystromStream : Stream {
  int64_t landmarks;  // m
  int iterations;     // of the pseudo-inverse
  bool fixed;
  void *landmark_queries, *landmark_keys, *inverse;  // written only if a landmark is replaced
};

// The last columns of a row of the history: the log-scale, and 1 if the row was recomputed from the window, else 0.
// Before them, single outputs need the sums of values and phi.
constexpr int kRecorded = 2;
constexpr int64_t history_columns(bool retroactive, int value_width) {
  return (retroactive ? 0 : value_width + 1) + kRecorded;
}

// A step of exact attention. `sums` has a row for each query of the window, or is null if there are none yet. Single
// outputs use no sums.
struct AttentionStream : Stream {};

// The gradient of a recorded step of at most n tokens. All tensors are contiguous, of the state's type, (B, H, ...).
struct StepGradient {
  DType dtype;
  int64_t batch, heads, window, tokens;
  int64_t capacity, new_capacity;  // of the rings before and after the step
  int key_width, value_width;
  double scale;
  bool retroactive;
  const int64_t* positions;  // (B, H), before the step
  // The tokens that the gradient reads: the oldest of the window before the step, then the t new ones. There are n + t
  // queries for retroactive outputs, else t.
  int64_t query_rows, rows;
  const void *query, *keys, *values;
  const void* dout;                                    // null: zero
  const void *dnew_queries, *dnew_keys, *dnew_values;  // of the rings after the step; null: zero
  void *dquery, *dkey, *dvalue;                        // of the new tokens
  void *dqueries, *dkeys, *dvalues;                    // of the rings before the step; null if it is zero
};

// A step with rows of sums. It read n + t keys and values if it recomputed a row. Otherwise it read 2 t of them, which
// left or entered the window.
struct SumsGradient : StepGradient {
  int64_t count;               // rows: m, or n
  const void *sums, *history;  // `sums` before the step; null if there were none
  const void* new_sums;        // after the step, for retroactive outputs
  const void* dnew_sums;       // null: zero
  void* dsums;                 // null if there were no sums
  // The queries of the rows, which do not change, and their gradient. Null for exact attention: after each token, the
  // rows are those of the queries of the window.
  const void* landmark_queries;
  void* dlandmark_queries;
};

// A step whose landmarks do not change. A stream has its own gradient of the landmarks.
struct NystromGradient : SumsGradient {
  const void *landmark_keys, *inverse;
  void *dlandmark_keys, *dinverse;
};

// A step of exact attention, which read n + t keys and values. Single outputs use no sums.
struct AttentionGradient : SumsGradient {};

// The entry points of one instruction set and type; each call handles one head.
struct ContinualKernel {
  bool (*finite)(const Stream&, int64_t head);  // whether the head's new tokens are finite
  size_t (*nystrom_bytes)(const NystromStream&);
  void (*nystrom)(const NystromStream&, int64_t head, void* scratch);
  size_t (*attention_bytes)(const AttentionStream&);
  void (*attention)(const AttentionStream&, int64_t head, void* scratch);
  size_t (*nystrom_backward_bytes)(const NystromGradient&);
  void (*nystrom_backward)(const NystromGradient&, int64_t head, void* scratch);
  size_t (*attention_backward_bytes)(const AttentionGradient&);
  void (*attention_backward)(const AttentionGradient&, int64_t head, void* scratch);
};

// The tables of kernels: [0] computes in float64, [1] in float32.
extern const ContinualKernel continual_portable[2];
#if defined(__x86_64__)
extern const ContinualKernel continual_avx2[2];
extern const ContinualKernel continual_avx512[2];
#endif

}  // namespace cmab::cpu
