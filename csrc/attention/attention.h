// Latent cross-attention on the CPU: the interface between the driver and the kernels of each instruction set.
//
// The driver (forward.cpp, backward.cpp) decides about threads, the split over keys, the order of merges and the
// workspace. A kernel decides about arithmetic and layout: how queries are packed, how a partial state is laid out, how
// a tile of keys is converted. It sees one head: a block of query rows against a range of keys.
//
// Rules for a kernel. It allocates nothing and starts no thread; its buffers are 64-byte aligned and uninitialised. The
// result of a query row depends on that row, on the keys, and on how the calls divide the keys into ranges, but never
// on other rows of the block (so a batch element has the same bits alone or within a batch). The driver's ranges start
// at multiples of kKeyTile of the head's keys. Source files are compiled with their own instruction set flags, so
// everything but the exported table has internal linkage: put it in an anonymous namespace.
#pragma once

#include "common/operands.h"

namespace cmab::cpu {

constexpr int64_t kMaxWidth = 256;

// The parameters that all heads of a call share.
struct Shape {
  DType dtype;          // of query, key and value
  int key_width;        // D, 1 .. kMaxWidth
  int value_width;      // E, 1 .. kMaxWidth
  double scale;         // logits are scale * q k'
  bool biased = false;  // logits are scale * q k' + bias; else Keys::bias is null
};

// A block of query rows, packed, and its partial state.
struct QueryBlock {
  int rows;
  const void* packed;
  void* state;
};

// The forward kernel. A partial state holds, for each row of a block and the keys seen so far: a reference logit in
// base 2 (any bound of the row's logits that keeps exp2 in range; -inf before the first key), the sum of exp2(logit -
// reference), and the same sum weighted with the values.
struct ForwardKernel {
  int block;  // rows of a block; the last block of a head may have fewer
  size_t (*packed_bytes)(const Shape&, int rows);
  size_t (*state_bytes)(const Shape&, int rows);
  size_t (*scratch_bytes)(const Shape&);  // per thread; the contents are not kept between calls
  void (*pack)(const Shape&, int rows, const Matrix& query, void* packed);
  void (*clear)(const Shape&, int rows, void* state);  // to the state of no keys
  // Adds one range of keys to the states of all `count` blocks.
  void (*attend)(const Shape&, const QueryBlock* blocks, int count, const Keys&, void* scratch);
  // Writes the state by rows: reference[rows], sum[rows], acc[rows][E]. A row without keys gives -inf, 0 and zeros.
  void (*read)(const Shape&, int rows, const void* state, double* reference, double* sum, double* acc);
};

// The inputs of the backward pass for a block of rows. P = exp(logit - lse) is recomputed from lse. The kernel splits
// lse, a double, into a high and a low part: a float32 lse of 1e4 would be off by 5e-4. A row with lse = -inf has no
// keys, so its P is 0.
struct QueryRows {
  Matrix query;
  const void* dout;  // (rows, E), in the type of sums: float32, or float64 for float64
  int64_t dout_row_stride;
  int64_t dout_col_stride;
  const double* lse;    // [rows], natural log
  const double* delta;  // [rows], rowsum(dout * out) - dlse; dS = P * (dout V' - delta)
};

// Which gradients are needed.
struct Needs {
  bool query, key, value;
  bool bias = false;
};

// Outputs for a range of keys: contiguous (count, D), (count, E) and (count,), or null if not needed. Every row is
// written; rows of ignored keys become zeros. `type` is Shape::dtype, to which results are rounded (to nearest even).
// If the driver adds the parts of several groups of queries, it is the type of sums (float32, or float64 for float64).
struct KeyGradient {
  void* dkey;
  void* dvalue;
  DType type;
  void* dbias = nullptr;  // (count,), always in the type of sums
};

// The backward kernel. The state of a block is dS K, summed over the keys seen so far, without the scale.
struct BackwardKernel {
  int block;
  size_t (*packed_bytes)(const Shape&, int rows);
  size_t (*state_bytes)(const Shape&, int rows);
  size_t (*scratch_bytes)(const Shape&);
  void (*pack)(const Shape&, int rows, const QueryRows&, void* packed);
  void (*clear)(const Shape&, int rows, void* state);
  // Processes all `count` blocks against one range of keys: adds to their states (unless !needs.query), and writes
  // dkey, dvalue and dbias.
  void (*attend)(const Shape&, const Needs&, const QueryBlock* blocks, int count, const Keys&, const KeyGradient&,
                 void* scratch);
  void (*read)(const Shape&, int rows, const void* state, double* dquery);  // [rows][D]
  // Whether dout is rounded to bfloat16. delta must then be that of the rounded dout: dS of a row with a single key is
  // dout V' - delta = 0.
  bool rounds_dout;
};

// The tables of kernels. The tables for float64 and float32 exist for every instruction set. The float32 tables also
// take bfloat16 and float16, which they convert tile by tile.
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
extern const AttentionKernels attention_amx_emulated;  // AMX simulated in software, for tests
#endif

// The kernels for inputs of this type on the instruction set in use.
const ForwardKernel& forward_kernel(DType);
const BackwardKernel& backward_kernel(DType);

}  // namespace cmab::cpu
