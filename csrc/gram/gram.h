// Regularised least squares on the CPU, what grows with the number of rows: sums over keys, and rows times matrices.
// What the drivers (sums.cpp, rows.cpp) and the kernels of the instruction sets owe each other.
//
// The rules for a kernel are those of attention/attention.h: it allocates nothing and starts no thread; its buffers are
// 64-byte aligned and uninitialised; what it computes for a row of a result depends on that row alone (or, for sums, on
// the keys of one run alone), in one order of additions. Everything but the exported tables has internal linkage.
#pragma once

#include "common/operands.h"

namespace cmab::cpu {

// What is the same for every head.
struct GramShape {
  DType dtype;      // of keys and values
  int key_width;    // D >= 1
  int value_width;  // E >= 0
};

// A range of keys of one head, with their values and weights. Of an ignored key nothing, not even a NaN, may reach a
// result.
struct GramKeys {
  Matrix key;          // (count, D)
  Matrix value;        // (count, E)
  const void* weight;  // float32, float64 for float64 keys; null: all are 1
  int64_t weight_stride;
  const uint8_t* ignored;  // null: none is; else nonzero where the key is absent
  int64_t ignored_stride;
  int64_t count;
};

// Sums are formed run by run: in the compute type within a run, in float64 from run to run.
constexpr int kMaxRunKeys = 512;

struct GramKernel {
  size_t (*scratch_bytes)(const GramShape&, int keys);  // per thread, contents not kept between calls
  // One run: gram (D, D) += K'WK and moment (D, E) += K'WV, or = where `first`; null: not wanted. Entries of gram below
  // the diagonal are left undefined.
  void (*add_run)(const GramShape&, const GramKeys&, bool first, double* gram, double* moment, void* scratch);
};

// A matrix of float64 in the caller's memory; strides in elements.
struct Coefficients {
  const double* data;
  int64_t row_stride, col_stride;

  Coefficients transposed() const { return {data, col_stride, row_stride}; }
};

// The matrices that the gradient of the sums multiplies with, packed: S = dgram + dgram', dmoment' and dmoment.
struct PackedSlopes {
  const void *gram, *moment_transposed, *moment;
};

// Where gradients of a range of keys go: rows next to each other, in the types of keys, values and weights. Null: not
// needed. Every row is written, those of ignored keys with zeros.
struct GramGradient {
  void *key, *value, *weight;
};

struct RowsKernel {
  // The matrix, or its sum with `addend`, (depth, width), in the compute type.
  size_t (*packed_bytes)(int depth, int width);
  void (*pack)(const Coefficients&, const Coefficients* addend, int depth, int width, void* packed);
  size_t (*apply_scratch_bytes)(int depth, int width);
  // out (count, width), rows next to each other, = query (count, depth) times the packed matrix.
  void (*apply)(DType, const Matrix& query, int64_t count, int depth, int width, const void* packed, void* out,
                void* scratch);
  size_t (*differentiate_scratch_bytes)(const GramShape&);
  void (*differentiate)(const GramShape&, const GramKeys&, const PackedSlopes&, const GramGradient&, void* scratch);
};

// The tables: [0] computes in float64, from any type; [1] in float32, from all but float64.
struct GramKernels {
  const GramKernel* sums;
  const RowsKernel* rows;
};

extern const GramKernels gram_portable[2];
#if defined(__x86_64__)
extern const GramKernels gram_avx2[2];
extern const GramKernels gram_avx512[2];
#endif

}  // namespace cmab::cpu
