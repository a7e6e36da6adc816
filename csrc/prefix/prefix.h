// The attention states of all prefixes of a row of keys on the CPU: the interface between the driver, which owns
// threads and memory, and the kernels of each instruction set. The states, and their gradient as a scan in reverse, are
// defined in cmab_kernels/attention/prefix/reference.py.
//
// A kernel sees one head. Its scratch memory is 64-byte aligned and uninitialised. The result of a query row depends
// only on that row and the keys. Gradients of keys are sums over the blocks of queries in ascending order. So the bits
// depend neither on threads nor on neighbours.
#pragma once

#include "attention/attention.h"

namespace cmab::cpu {

// The states of one head: prefix t, row l is row t * queries + l of each.
struct States {
  void* out;  // (T * L, E), in the type of sums
  double* lse;
};

// The state of one head before the first key. Without lse there is no such state.
struct Incoming {
  Matrix out;  // (L, E), in the type of sums
  const double* lse;
  int64_t lse_stride;
};

// The numbers that are added, before each chunk, to the lse of all earlier keys. Without data they
// are 0.
struct Decay {
  const double* log;
  int64_t stride;

  double before(int64_t chunk) const { return log ? log[chunk * stride] : 0.0; }
};

struct PrefixForward {
  Shape shape;
  int64_t queries, every;
  Matrix query;  // (L, D)
  Keys keys;
  Incoming state;
  Decay decay;
  States to;
};

struct PrefixBackward {
  Shape shape;
  int64_t queries, every;
  Matrix query;
  Keys keys;
  Incoming state;
  Decay decay;
  States states;  // as written by forward
  Matrix dout;    // (T * L, E), in the type of sums
  const double* dlse;
  int64_t dlse_stride;
  void* dquery;  // (L, D), contiguous, in the inputs' type; null: not needed
  KeyGradient dkeys;
  void* dstate_out;  // (L, E), contiguous, in the type of sums, and (L,); null: not needed
  double* dstate_lse;
  double* dlog_decay;  // (T,); null: not needed
};

struct PrefixKernels {
  int block;  // rows of a block of queries
  size_t (*forward_bytes)(const Shape&);
  // Writes the states of rows `first` to `first` + `rows`, at most a block.
  void (*forward)(const PrefixForward&, int64_t first, int rows, void* scratch);
  size_t (*backward_bytes)(const Shape&, int64_t queries);
  void (*backward)(const PrefixBackward&, void* scratch);
};

extern const PrefixKernels prefix_portable[2];  // [0] float64, [1] the rest
#if defined(__x86_64__)
extern const PrefixKernels prefix_avx2[2];
extern const PrefixKernels prefix_avx512[2];
#endif

}  // namespace cmab::cpu
