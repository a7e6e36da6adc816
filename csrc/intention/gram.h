// Regularised least squares on the CPU, the part whose time grows with the number of rows: sums over keys, and rows
// times matrices. The interface between the drivers (sums.cpp, rows.cpp) and the kernels of each instruction set.
//
// The rules for a kernel are those of attention/attention.h: it allocates nothing and starts no thread; its buffers are
// 64-byte aligned and uninitialised; a row of a result depends on that row only (or, for sums, on
// the keys of one run), and is added up in one order. Everything but the exported tables has
// internal linkage.
#pragma once

#include "common/operands.h"

namespace cmab::cpu {

// The parameters that all heads of a call share.
struct GramShape {
  DType dtype;      // of keys and values
  int key_width;    // D >= 1
  int value_width;  // E >= 0
};

// A range of keys of one head, with their values and weights. No part of an ignored key, not even a NaN, may reach a
// result.
struct GramKeys {
  Matrix key;          // (count, D)
  Matrix value;        // (count, E)
  const void* weight;  // float32, or float64 for float64 keys; null: all weights are 1
  int64_t weight_stride;
  const uint8_t* ignored;  // nonzero for an ignored key; null: none is ignored
  int64_t ignored_stride;
  int64_t count;
};

// The largest number of keys of a run. Sums are accumulated in the compute type within a run, and in float64 from run
// to run.
constexpr int kMaxRunKeys = 512;

// A run of keys. The runs of a sequence are summed in ascending order with the same scratch.
struct GramRun {
  GramKeys keys;
  const GramKeys* next;  // the next run, which is prefetched at the same time; null: there is none
  int64_t index;         // in the sequence
  int most;              // the largest number of keys of a run of the sequence
};

struct GramKernel {
  size_t (*scratch_bytes)(const GramShape&, int most);  // per thread, contents kept between the runs of a sequence
  // Sums one run: gram (D, D) += K'WK and moment (D, E) += K'WV, or = if `first`. A null result is not needed. Entries
  // of gram below the diagonal are undefined.
  void (*add_run)(const GramShape&, const GramRun&, bool first, double* gram, double* moment, void* scratch);
};

// A matrix of float64 in the caller's memory; strides in elements.
struct Coefficients {
  const double* data;
  int64_t row_stride, col_stride;

  Coefficients transposed() const { return {data, col_stride, row_stride}; }
};

// The packed matrices of the gradient of the sums: S = dgram + dgram', dmoment' and dmoment.
struct PackedSlopes {
  const void *gram, *moment_transposed, *moment;
};

// Outputs for a range of keys: contiguous rows, in the types of keys, values and weights; null if not needed. Every row
// is written; rows of ignored keys become zeros.
struct GramGradient {
  void *key, *value, *weight;
};

// Rows in the caller's memory that are prefetched while other rows are computed; strides and widths in bytes.
struct Upcoming {
  const char* data = nullptr;
  int64_t stride = 0, width = 0, rows = 0;
};

struct RowsKernel {
  // Packs a (depth, width) matrix, or its sum with `addend`, in the compute type.
  size_t (*packed_bytes)(int depth, int width);
  void (*pack)(const Coefficients&, const Coefficients* addend, int depth, int width, void* packed);
  size_t (*apply_scratch_bytes)(int depth, int width);
  // out (count, width), contiguous, = query (count, depth) times the packed matrix.
  void (*apply)(DType, const Matrix& query, int64_t count, int depth, int width, const void* packed, void* out,
                const Upcoming&, void* scratch);
  size_t (*differentiate_scratch_bytes)(const GramShape&);
  void (*differentiate)(const GramShape&, const GramKeys&, const PackedSlopes&, const GramGradient&,
                        const Upcoming (&key_and_value)[2], void* scratch);
};

// The tables of kernels: [0] computes in float64, from any type; [1] computes in float32, from all types but float64.
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
