// Continual attention on the CPU: what the driver (continual.cpp) and the kernels of the instruction sets owe each
// other. Everything but tokens is contiguous, (batch, heads, rows, width); what is said of the state stands in
// cmab_kernels/nystrom/continual/state.py.
//
// The rules for a kernel are those of attention/attention.h: it allocates nothing, starts no thread and sees one head;
// its scratch is 64-byte aligned and uninitialised. What a token leaves behind depends on the tokens before it, never
// on the capacity of the rings, on where their rows wrap around or on how many tokens come at once.
#pragma once

#include "common/operands.h"
#include "continual/schedule.h"

namespace cmab::cpu {

// What is the same for every head.
struct StreamShape {
  DType dtype;  // of tokens, rings and outputs; sums and landmarks have the state's type
  int64_t batch, heads;
  int64_t window;              // n
  int64_t capacity;            // C > n, rows of the rings
  int64_t position;            // tokens taken before these
  int64_t tokens;              // t >= 1
  int key_width, value_width;  // D, E >= 1
  double scale;                // logits are scale * q k'
  bool retroactive;            // one output for the whole window instead of each new token's
};

// The rings already hold the window; the kernel adds the tokens, and reads the one that leaves, which is still there.
struct Stream {
  StreamShape shape;
  Operand query, key, value;      // the new tokens
  void *queries, *keys, *values;  // rings
  const void* sums;               // before
  void* new_sums;                 // after: other memory of the same size
  void* out;                      // (B, H, t, E), or retroactive (B, H, n, E)
};

struct NystromStream : Stream {
  int64_t landmarks;  // m
  int iterations;     // of the pseudo-inverse
  bool fixed;
  void *landmark_queries, *landmark_keys, *inverse;  // written where a landmark is replaced, else only read
};

// A row of sums for each of the window's queries; null where there are none yet. Single outputs need none.
struct AttentionStream : Stream {};

struct ContinualKernel {
  bool (*finite)(const Stream&, int64_t head);  // whether its new tokens are
  size_t (*nystrom_bytes)(const NystromStream&);
  void (*nystrom)(const NystromStream&, int64_t head, void* scratch);
  size_t (*attention_bytes)(const AttentionStream&);
  void (*attention)(const AttentionStream&, int64_t head, void* scratch);
};

// The tables: [0] computes in float64, [1] in float32.
extern const ContinualKernel continual_portable[2];
#if defined(__x86_64__)
extern const ContinualKernel continual_avx2[2];
extern const ContinualKernel continual_avx512[2];
#endif

}  // namespace cmab::cpu
