// Drivers of rows times per-head matrices: a solution applied to queries, and the gradient of the sums. Rows are
// independent, so their assignment to threads does not change a bit of the result.
#include <omp.h>

#include <cstring>

#include "intention/plan.h"

namespace cmab::cpu {
namespace {

constexpr int64_t kPieceRows = 2048;  // packing the matrices for each piece takes 1 to 2 % of its time
constexpr int64_t kTurnRows = 96;     // per turn of interleaved heads: these and the next turn's stay in the L2 cache
constexpr size_t kTurnMatrices = 512 << 10;  // bytes of packed matrices that also stay in the cache

// Rows of head h, one of a group of heads [first_head, end_head). The piece of the group has rows
// up to `end`.
struct Turn {
  int64_t b, h, first, rows;
  int64_t first_head, end_head, end;
  const char* packed;
  void* scratch;

  // This head's share of the rows that all heads of the group compute in their next turn. These rows are prefetched in
  // the meantime, row by row in the order of memory. The processor itself prefetches the rows of heads that are not
  // interleaved.
  Upcoming ahead(DType dtype, const Operand& x, int64_t width) const {
    const int64_t heads = end_head - first_head, begin = first + rows, left = std::min(rows, end - begin);
    if (heads == 1 || !interleaved(x)) return {};
    const int64_t from = (h - first_head) * left / heads, to = (h + 1 - first_head) * left / heads;
    const int64_t element = element_bytes(dtype);
    return {static_cast<const char*>(rows_of(dtype, x, b, first_head, begin + from).data), x.stride[2] * element,
            ((heads - 1) * x.stride[1] + width) * element, to - from};
  }
};

// The rows of all heads of all sets, in pieces; interleaved heads take turns.
class Pieces {
 public:
  Pieces(const Operand& x, int64_t row_bytes, int64_t batch, int64_t heads, int64_t rows, const Offsets& offsets,
         size_t packed_bytes, size_t scratch_bytes, int threads)
      : batch_(batch),
        heads_(heads),
        rows_(rows),
        offsets_(offsets),
        pieces_(ceil_div(offsets.longest(batch, rows), kPieceRows)),
        packed_bytes_(packed_bytes),
        scratch_bytes_(scratch_bytes),
        threads_(threads),
        together_(interleaved(x) ? most_together(row_bytes) : 1) {}

  // Calls pack(set, h, packed) for the heads of each piece, and then compute(Turn).
  template <class Pack, class Compute>
  void for_each(Pack pack, Compute compute) const {
    const int64_t groups = ceil_div(heads_, together_), most = together_ > 1 ? kTurnRows : kPieceRows;
    const size_t bytes = together_ * packed_bytes_ + scratch_bytes_;
    Workspace workspace;
    workspace.reserve(threads_ * bytes);
#pragma omp parallel for schedule(dynamic) num_threads(threads_)
    for (int64_t task = 0; task < batch_ * pieces_ * groups; ++task) {
      char* const packed = workspace.at(omp_get_thread_num() * bytes);
      const auto of_head = [&](int64_t i) { return packed + i * packed_bytes_; };
      const int64_t b = task / groups / pieces_, piece = task / groups % pieces_;
      const RowSet set = offsets_.set(b, rows_);
      const int64_t pieces = ceil_div(set.count, kPieceRows);
      if (piece >= pieces) continue;
      const int64_t first_head = task % groups * together_, end_head = std::min(first_head + together_, heads_);
      const int64_t end = set.first + piece_start(set.count, pieces, piece + 1, 1);
      for (int64_t h = first_head; h < end_head; ++h) pack(b, h, of_head(h - first_head));
      for (int64_t first = set.first + piece_start(set.count, pieces, piece, 1); first < end; first += most)
        for (int64_t h = first_head; h < end_head; ++h)
          compute(Turn{set.batch, h, first, std::min(most, end - first), first_head, end_head, end,
                       of_head(h - first_head), of_head(together_)});
    }
  }

 private:
  int64_t most_together(int64_t row_bytes) const {
    const int64_t most = heads_together(row_bytes, heads_, batch_ * heads_ * pieces_, threads_);
    return std::clamp<int64_t>(kTurnMatrices / std::max<size_t>(packed_bytes_, 1), 1, most);
  }

  const int64_t batch_, heads_, rows_;
  const Offsets offsets_;
  const int64_t pieces_;                       // of the largest set
  const size_t packed_bytes_, scratch_bytes_;  // of a head, of a thread
  const int threads_;
  const int64_t together_;
};

Coefficients matrix_of(const Operand& x, int64_t b, int64_t h) {
  return {x.at<const double>(b, h, 0), x.stride[2], x.stride[3]};
}

void* row_of(void* rows, int64_t row, int64_t width, DType dtype) {
  return rows ? static_cast<char*>(rows) + row * width * element_bytes(dtype) : nullptr;
}

// The gradients from row `row` on, counted over all heads.
GramGradient gradient_at(const GramShape& shape, const GramGradient& gradient, int64_t row) {
  return {row_of(gradient.key, row, shape.key_width, shape.dtype),
          row_of(gradient.value, row, shape.value_width, shape.dtype),
          row_of(gradient.weight, row, 1, state_type(shape.dtype))};
}

// Zeros for the rows after the last packed set.
void clear_rest(const GramInputs& in, const GramGradient& gradient) {
  const GramShape& shape = in.shape;
  const int64_t end = in.offsets.at(in.batch, in.keys), rows = in.keys - end;
  const auto clear = [&](void* to, int64_t width, DType dtype) {
    if (to) std::memset(to, 0, rows * width * element_bytes(dtype));
  };
  for (int64_t h = 0; h < in.heads; ++h) {
    const GramGradient to = gradient_at(shape, gradient, h * in.keys + end);
    clear(to.key, shape.key_width, shape.dtype);
    clear(to.value, shape.value_width, shape.dtype);
    clear(to.weight, 1, state_type(shape.dtype));
  }
}

}  // namespace

void apply_rows(const RowsInputs& in, void* out) {
  const RowsKernel& kernel = *gram_kernels(in.dtype == DType::kFloat64).rows;
  const double work = double(in.batch) * in.heads * in.rows * in.depth * in.width;
  prefer_huge_pages(out, in.batch * in.heads * in.rows * in.width * element_bytes(in.dtype));
  const Pieces all(in.query, in.depth * element_bytes(in.dtype), in.batch, in.heads, in.rows, {},
                   align(kernel.packed_bytes(in.depth, in.width)),
                   align(kernel.apply_scratch_bytes(in.depth, in.width)),
                   useful_threads(work, in.threads, kLittleGram));
  const auto pack = [&](int64_t b, int64_t h, char* packed) {
    kernel.pack(matrix_of(in.matrix, b, h), nullptr, in.depth, in.width, packed);
  };
  all.for_each(pack, [&](const Turn& turn) {
    const int64_t row = (turn.b * in.heads + turn.h) * in.rows + turn.first;
    kernel.apply(in.dtype, rows_of(in.dtype, in.query, turn.b, turn.h, turn.first), turn.rows, in.depth, in.width,
                 turn.packed, row_of(out, row, in.width, in.dtype), turn.ahead(in.dtype, in.query, in.depth),
                 turn.scratch);
  });
}

void gram_backward(const GramInputs& in, const Operand& dgram, const Operand& dmoment, const GramGradient& gradient) {
  const GramShape& shape = in.shape;
  const int width = shape.key_width, value_width = shape.value_width;
  const RowsKernel& kernel = *gram_kernels(in.exact || shape.dtype == DType::kFloat64).rows;
  const int64_t element = element_bytes(shape.dtype), keys = in.offsets.in_all(in.batch, in.keys) * in.heads;
  const size_t gram_bytes = align(kernel.packed_bytes(width, width));
  const size_t transposed_bytes = align(kernel.packed_bytes(value_width, width));
  prefer_huge_pages(gradient.key, keys * width * element);
  prefer_huge_pages(gradient.value, keys * value_width * element);
  const size_t packed_bytes = gram_bytes + transposed_bytes + align(kernel.packed_bytes(width, value_width));
  const Pieces all(in.key, std::max(width, value_width) * element, in.batch, in.heads, in.keys, in.offsets,
                   packed_bytes, align(kernel.differentiate_scratch_bytes(shape)),
                   useful_threads(double(keys) * width * (width + 2 * value_width), in.threads, kLittleGram));
  const auto pack = [&](int64_t b, int64_t h, char* packed) {
    const Coefficients slope = matrix_of(dgram, b, h), mirrored = slope.transposed();
    const Coefficients moment_slope = matrix_of(dmoment, b, h);
    kernel.pack(slope, &mirrored, width, width, packed);
    kernel.pack(moment_slope.transposed(), nullptr, value_width, width, packed + gram_bytes);
    kernel.pack(moment_slope, nullptr, width, value_width, packed + gram_bytes + transposed_bytes);
  };
  all.for_each(pack, [&](const Turn& turn) {
    const GramGradient to = gradient_at(shape, gradient, (turn.b * in.heads + turn.h) * in.keys + turn.first);
    const char *const transposed = turn.packed + gram_bytes, *const moment = transposed + transposed_bytes;
    kernel.differentiate(shape, keys_of(in, turn.b, turn.h, turn.first, turn.rows), {turn.packed, transposed, moment},
                         to, {turn.ahead(shape.dtype, in.key, width), turn.ahead(shape.dtype, in.value, value_width)},
                         turn.scratch);
  });
  if (in.offsets.data) clear_rest(in, gradient);
}

}  // namespace cmab::cpu
