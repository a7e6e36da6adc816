// Drivers of rows times per-head matrices: a solution applied to queries, and the gradient of the sums. Rows are
// independent, so their assignment to threads changes no bit.
#include <omp.h>

#include "gram/plan.h"

namespace cmab::cpu {
namespace {

constexpr int64_t kPieceRows = 2048;  // packing the matrices for each piece takes 1 to 2 % of its time

// Calls function(b, h, first row, rows, scratch) for pieces of the rows of every head. Heads vary fastest: those that
// share cache lines are neighbours.
template <class Function>
void for_each_piece(int64_t batch, int64_t heads, int64_t rows, size_t scratch_bytes, int threads, Function function) {
  const int64_t pieces = ceil_div(rows, kPieceRows);
  Workspace workspace;
  workspace.reserve(threads * scratch_bytes);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < batch * pieces * heads; ++task) {
    const int64_t piece = task / heads % pieces;
    const int64_t first = piece_start(rows, pieces, piece, 1), end = piece_start(rows, pieces, piece + 1, 1);
    function(task / heads / pieces, task % heads, first, end - first,
             workspace.at(omp_get_thread_num() * scratch_bytes));
  }
}

Coefficients matrix_of(const Operand& x, int64_t b, int64_t h) {
  return {x.at<const double>(b, h, 0), x.stride[2], x.stride[3]};
}

void* row_of(void* rows, int64_t row, int64_t width, DType dtype) {
  return rows ? static_cast<char*>(rows) + row * width * element_bytes(dtype) : nullptr;
}

}  // namespace

void apply_rows(const RowsInputs& in, void* out) {
  const RowsKernel& kernel = *gram_kernels(in.dtype == DType::kFloat64).rows;
  const size_t packed = align(kernel.packed_bytes(in.depth, in.width));
  const size_t scratch = align(kernel.apply_scratch_bytes(in.depth, in.width));
  const double work = double(in.batch) * in.heads * in.rows * in.depth * in.width;
  prefer_huge_pages(out, in.batch * in.heads * in.rows * in.width * element_bytes(in.dtype));
  for_each_piece(in.batch, in.heads, in.rows, packed + scratch, useful_threads(work, in.threads, kLittleGram),
                 [&](int64_t b, int64_t h, int64_t first, int64_t rows, char* memory) {
                   kernel.pack(matrix_of(in.matrix, b, h), nullptr, in.depth, in.width, memory);
                   kernel.apply(in.dtype, rows_of(in.dtype, in.query, b, h, first), rows, in.depth, in.width, memory,
                                row_of(out, (b * in.heads + h) * in.rows + first, in.width, in.dtype), memory + packed);
                 });
}

void gram_backward(const GramInputs& in, const Operand& dgram, const Operand& dmoment, const GramGradient& gradient) {
  const GramShape& shape = in.shape;
  const int width = shape.key_width, value_width = shape.value_width;
  const RowsKernel& kernel = *gram_kernels(in.exact || shape.dtype == DType::kFloat64).rows;
  const size_t gram_bytes = align(kernel.packed_bytes(width, width));
  const size_t transposed_bytes = align(kernel.packed_bytes(value_width, width));
  const size_t packed = gram_bytes + transposed_bytes + align(kernel.packed_bytes(width, value_width));
  const size_t scratch = align(kernel.differentiate_scratch_bytes(shape));
  const int64_t all = in.batch * in.heads * in.keys;
  prefer_huge_pages(gradient.key, all * width * element_bytes(shape.dtype));
  prefer_huge_pages(gradient.value, all * value_width * element_bytes(shape.dtype));
  for_each_piece(in.batch, in.heads, in.keys, packed + scratch,
                 useful_threads(double(all) * width * (width + 2 * value_width), in.threads, kLittleGram),
                 [&](int64_t b, int64_t h, int64_t first, int64_t rows, char* memory) {
                   char *const transposed = memory + gram_bytes, *const moment = transposed + transposed_bytes;
                   const Coefficients slope = matrix_of(dgram, b, h), mirrored = slope.transposed();
                   const Coefficients moment_slope = matrix_of(dmoment, b, h);
                   kernel.pack(slope, &mirrored, width, width, memory);
                   kernel.pack(moment_slope.transposed(), nullptr, value_width, width, transposed);
                   kernel.pack(moment_slope, nullptr, width, value_width, moment);
                   const int64_t row = (b * in.heads + h) * in.keys + first;
                   const GramGradient to{row_of(gradient.key, row, width, shape.dtype),
                                         row_of(gradient.value, row, value_width, shape.dtype),
                                         row_of(gradient.weight, row, 1, state_type(shape.dtype))};
                   kernel.differentiate(shape, keys_of(in, b, h, first, rows), {memory, transposed, moment}, to,
                                        memory + packed);
                 });
}

}  // namespace cmab::cpu
