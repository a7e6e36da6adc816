// Linear layers on the CPU: the interface between the drivers (layers/, projected/) and the kernels of each instruction
// set. A driver passes up to kRowTile rows of features at a time through load, normalise, multiply, activate and store,
// and back through the gradients of these, so that intermediate results stay in the cache.
//
// The rules for a kernel are those of attention/attention.h: it allocates nothing and starts no thread; its buffers are
// 64-byte aligned and uninitialised; a row of a result depends on that row only. Everything but the exported tables has
// internal linkage.
#pragma once

#include "common/operands.h"

namespace cmab::cpu {

constexpr int kRowTile = 48;

// Rows in the compute type, `stride` elements apart, padded to whole vectors. The padding of rows that were loaded,
// normalised, multiplied or activated is 0. There is room for a multiple of kRowStep rows. The contents of rows past
// the last do not matter for a result; load, normalise and activate write zeros there.
struct RowTile {
  void* data;
  int64_t stride;
};
constexpr int kRowStep = 6;

// geglu(features, gate) = features * gelu(gate); gelu and relu take only features. gelu(x) = x * Phi(x), exact.
enum class Activation { kGeglu, kGelu, kRelu };

// The residual to which a layer adds its result: its input x, or norm(x), as in the code of the papers. Without a norm,
// both are the same.
enum class Residual { kInput, kNormed };

// The LayerNorm of a row: its weight and bias in the compute type, padded with zeros, and eps.
struct Norm {
  const void *weight, *bias;
  double eps;
};

// The parameters of a linear layer, as torch.nn.Linear holds them; without data there is none.
struct Weights {
  Matrix weight;     // (out, in)
  const void* bias;  // (out,), contiguous, or null
};

// The parameters of a LayerNorm; without data there is none.
struct NormWeights {
  const void *weight, *bias;  // (width,), contiguous; a null bias is 0
  double eps;
};

// The gradients of a layer's weight and bias; contiguous, in the inputs' dtype, null if not needed.
struct WeightGradients {
  void *weight, *bias;
};

struct LinearKernels {
  int64_t (*stride)(int width);                  // of a tile
  size_t (*tile_bytes)(int rows, int width);     // for a tile of this number of rows
  size_t (*packed_bytes)(int depth, int width);  // of a packed matrix
  size_t (*stats_bytes)();                       // for the means and reciprocal deviations of a tile
  void (*pack)(DType, const Matrix&, int depth, int width, void* packed);

  // Rows that are `ignored` (null: none) are read as zeros.
  void (*load)(DType, const Matrix&, int count, int width, const uint8_t* ignored, int64_t ignored_stride, RowTile to);
  // Reads rows whose columns are heads of width `width` that are not adjacent in memory.
  void (*load_heads)(DType, const void* from, int64_t row_stride, int64_t head_stride, int heads, int width, int count,
                     RowTile to);
  void (*store_heads)(RowTile, int count, int heads, int width, DType, void* to, int64_t row_stride,
                      int64_t head_stride);
  void (*store)(RowTile, int count, int width, DType, void* to, int64_t row_stride);

  // to = rows times the packed matrix, plus bias (width,) unless null; or to += the same, if `add`.
  void (*multiply)(RowTile, int count, int depth, const void* packed, int width, const void* bias, bool add,
                   RowTile to);
  // sums (left_width, right_width) += left' right; sums is a tile of left_width rows.
  void (*add_products)(RowTile left, int left_width, RowTile right, int right_width, int count, RowTile sums);
  void (*add_rows)(RowTile, int count, int width, void* sums);  // sums (width,) += the sum of the rows
  void (*add_tile)(RowTile, int count, int width, RowTile to);  // to += rows

  void (*normalise)(RowTile, int count, int width, const Norm&, void* stats, RowTile to);
  // drows += the gradient of the rows that were normalised, `rows`, given the gradient of the result. The function also
  // adds to dweight (width,) and dbias (width,). `stats` are the values that normalise wrote.
  void (*normalise_backward)(RowTile rows, RowTile dnormed, int count, int width, const Norm&, const void* stats,
                             RowTile drows, void* dweight, void* dbias);

  // fold puts a norm's weight and bias (scale and shift) into the weight (rows, width) of the next
  // layer, and unfold computes the gradients. folded (rows, width) and bias (rows,) are contiguous.
  // dweight has the shape and type of the weight, and is contiguous or null. unfold adds to dscale
  // and dshift (width,). All but the weight and dweight are in the compute type.
  void (*fold)(DType, const Matrix& weight, int rows, int width, const void* scale, const void* shift, void* folded,
               void* bias);
  void (*unfold)(DType, const Matrix& weight, int rows, int width, const void* scale, const void* shift,
                 const void* dfolded, const void* dbias, void* dweight, void* dscale, void* dshift);

  void (*activate)(Activation, RowTile features, RowTile gate, int count, int width, RowTile to);
  // Overwrites features and gate with their gradients, given the gradient of the result. It computes the result again.
  void (*activate_backward)(Activation, RowTile features, RowTile gate, RowTile dresult, int count, int width,
                            RowTile result);

  // Writes `count` elements of a sum of `pieces` parts that are `step` bytes apart. The parts are added in ascending
  // order.
  void (*sum_parts)(const void* parts, size_t step, int pieces, int64_t count, DType, void* to);
};

// [0] computes in float64, from any type; [1] computes in float32, from all types but float64.
extern const LinearKernels linear_portable[2];
#if defined(__x86_64__)
extern const LinearKernels linear_avx2[2];
extern const LinearKernels linear_avx512[2];
#endif

// The kernels for tensors of this type on the instruction set in use.
const LinearKernels& linear_kernels(DType);

}  // namespace cmab::cpu
