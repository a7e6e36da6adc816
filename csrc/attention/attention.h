// Latent cross-attention on the CPU: what the driver and the kernels of the instruction sets owe each other.
//
// The driver (forward.cpp, backward.cpp) owns threads, the split over keys, the order of merges and
// the workspace. A kernel owns arithmetic and layout: how queries are packed, what a partial state looks like in
// memory, how a tile of keys is converted. It sees one head: a block of query rows against a range of keys.
//
// Rules for a kernel. It allocates nothing and starts no thread; every buffer that it gets is 64-byte aligned and
// uninitialised. What it computes for a query row depends on that row, on the keys and on how the calls cut them into
// ranges, never on the other rows of the block (repeatable bits for a batch element alone or within a batch). Driver
// ranges start at multiples of kKeyTile of the head's keys. Source files are compiled with instruction set flags of
// their own, so everything in them but the exported table has internal linkage: put it in an anonymous namespace.
#pragma once

#include "common/operands.h"

namespace cmab::cpu {

constexpr int64_t kMaxWidth = 256;

// What is the same for every head.
struct Shape {
  DType dtype;      // of query, key and value
  int key_width;    // D, 1 .. kMaxWidth
  int value_width;  // E, 1 .. kMaxWidth
  double scale;     // logits are scale * q k'
};

// Forward. A partial state is what a set of keys has left behind for each row of a block: a reference logit in base 2
// (any bound of the row's logits that keeps exp2 in range; -inf while no key was seen), the sum of exp2(logit -
// reference), and the same sum weighted with the values.
struct ForwardKernel {
  int block;  // rows of a block, at most; the last block of a head has the rest
  size_t (*packed_bytes)(const Shape&, int rows);
  size_t (*state_bytes)(const Shape&, int rows);
  size_t (*scratch_bytes)(const Shape&);  // per thread, contents not kept between calls
  void (*pack)(const Shape&, int rows, const Matrix& query, void* packed);
  void (*clear)(const Shape&, int rows, void* state);  // the state of no keys
  void (*attend)(const Shape&, int rows, const void* packed, const Keys&, void* state, void* scratch);
  // Gives the state out by row: reference[rows], sum[rows], acc[rows][E]. A row without a key: -inf, 0, zeros.
  void (*read)(const Shape&, int rows, const void* state, double* reference, double* sum, double* acc);
};

// What the backward needs of a block of rows. P = exp(logit - lse) is recomputed from lse, with its low part: lse is a
// double of any size, and a float32 of 1e4 is off by 5e-4. A row with lse = -inf saw no key: P is 0.
struct QueryRows {
  Matrix query;
  const void* dout;  // rows of E, in the type of sums: float32, float64 for float64
  int64_t dout_row_stride;
  int64_t dout_col_stride;
  const double* lse;    // [rows], natural log
  const double* delta;  // [rows], rowsum(dout * out) - dlse; dS = P * (dout V' - delta)
};

struct Needs {
  bool query, key, value;
};

// One block of rows as BackwardKernel::attend takes it.
struct BackwardBlock {
  int rows;
  const void* packed;
  void* state;
};

// Where gradients of a range of keys go: rows next to each other, (count, D) and (count, E). Null: not needed. Every
// row is written, those of ignored keys with zeros. `type` is Shape::dtype (round to nearest even), or the type of sums
// (float32, float64 for float64) where the driver adds the parts of several groups of queries.
struct KeyGradient {
  void* dkey;
  void* dvalue;
  DType type;
};

// Backward. The state of a block is the sum dS K of its rows, without the scale.
struct BackwardKernel {
  int block;
  size_t (*packed_bytes)(const Shape&, int rows);
  size_t (*state_bytes)(const Shape&, int rows);
  size_t (*scratch_bytes)(const Shape&);
  void (*pack)(const Shape&, int rows, const QueryRows&, void* packed);
  void (*clear)(const Shape&, int rows, void* state);
  // All blocks of the group against one range: adds to the states (unless !needs.query), writes dkey and dvalue.
  void (*attend)(const Shape&, const Needs&, const BackwardBlock* blocks, int count, const Keys&, const KeyGradient&,
                 void* scratch);
  void (*read)(const Shape&, int rows, const void* state, double* dquery);  // [rows][D]
};

// The tables. float64 and float32 kernels exist for every instruction set; the same kernels take bfloat16 and float16,
// which they convert tile by tile and compute in float32.
struct AttentionKernels {
  const ForwardKernel* forward;
  const BackwardKernel* backward;
};

extern const AttentionKernels attention_portable[2];  // [0] float64, [1] the rest
#if defined(__x86_64__)
extern const AttentionKernels attention_avx2[2];
extern const AttentionKernels attention_avx512[2];
// bfloat16 inputs only.
extern const AttentionKernels attention_avx512bf16;
extern const AttentionKernels attention_amx;
extern const AttentionKernels attention_amx_emulated;  // the same data flow on tiles in software, for tests
#endif

// Those of the instruction set in use.
const ForwardKernel& forward_kernel(DType);
const BackwardKernel& backward_kernel(DType);

}  // namespace cmab::cpu
