// The code that the forward and the backward driver share: the packed weights of all blocks, and a chunk of rows that
// is loaded, normed and projected in a thread's own memory. A chunk is small enough to stay in the L2 cache while all
// blocks and heads attend to it.
#pragma once

#include "attention/plan.h"
#include "linear/driver.h"
#include "projected/call.h"

namespace cmab::cpu {
namespace {

constexpr int kTilesOfChunk = 4;
constexpr int kChunkRows = kTilesOfChunk * kRowTile;
static_assert(kChunkRows % kKeyTile == 0, "chunks start at multiples of both tiles");

// The rows of a chunk: unchanged, normed, and projected to the keys and values of one block.
struct Chunk {
  RowTile rows, normed, projected;
  void* stats[kTilesOfChunk];

  Chunk(Taker& take, const ProjectedInputs& in)
      : rows(take.tile(in.columns, kChunkRows)),
        normed(in.normed ? take.tile(in.columns, kChunkRows) : rows),
        projected(take.tile(in.projected_columns(), kChunkRows)) {
    for (void*& each : stats) each = take.stats();
  }
};

// The weights of all blocks, packed for products, once for all threads.
struct PackedWeights {
  std::vector<void*> weight, bias;  // of each block
  void *ones, *zeros;               // the weight and bias of the norm

  PackedWeights(Taker& take, const ProjectedInputs& in)
      : ones(take.vector(in.columns)), zeros(take.vector(in.columns)) {
    for (int64_t k = 0; k < in.blocks; ++k) {
      weight.push_back(take.packed(in.columns, in.projected_columns()));
      bias.push_back(take.vector(in.projected_columns()));
    }
  }
};

class Projection {
 public:
  explicit Projection(const ProjectedInputs& in)
      : in_(in), sums_(in.attention.shape.dtype), kernel_(linear_kernels(in.dtype)) {
    weights_memory_.reserve(bytes_of<PackedWeights>(kernel_, in));
    weights_.emplace_back(placed<PackedWeights>(weights_memory_.at(0), kernel_, in));
    const int projected = in.projected_columns();
    for (int64_t k = 0; k < in.blocks; ++k) {
      kernel_.pack(sums_, transposed(weight_rows(k, 0)), in.columns, projected, weights().weight[k]);
      load_vector(kernel_, sums_, offset(in.bias, k * projected, sums_), projected, weights().bias[k]);
    }
    const double one = 1;
    const float one_too = 1;
    const void* from = sums_ == DType::kFloat64 ? static_cast<const void*>(&one) : &one_too;
    kernel_.load(sums_, {from, 0, 0}, 1, in.columns, nullptr, 0, {weights().ones, 0});
    load_vector(kernel_, sums_, nullptr, in.columns, weights().zeros);
    norm_ = {weights().ones, weights().zeros, in.eps};
  }

  const LinearKernels& kernel() const { return kernel_; }
  const Norm& norm() const { return norm_; }
  DType sums() const { return sums_; }

  // The weights (rows, C) of block k from projected column `row` on.
  Matrix weight_rows(int64_t k, int64_t row) const {
    return {offset(in_.weight, (k * in_.projected_columns() + row) * in_.columns, sums_), in_.columns, 1};
  }
  RowTile from_row(RowTile tile, int64_t row) const {
    return {offset(tile.data, row * tile.stride, sums_), tile.stride};
  }

  // Calls function(tile, first row, rows) for the tiles of a chunk.
  template <class Function>
  static void for_each_tile(int count, Function function) {
    for (int row = 0; row < count; row += kRowTile) function(row / kRowTile, row, std::min(kRowTile, count - row));
  }

  // Loads the `count` rows of a set from `first` on, and norms them.
  void load(const Chunk& chunk, const KeySet& set, int64_t first, int count) const {
    const uint8_t* ignored = ignored_from(set, first);
    for_each_tile(count, [&](int tile, int row, int rows) {
      const RowTile to = from_row(chunk.rows, row);
      kernel_.load(in_.dtype, input_rows(set, first + row), rows, in_.columns,
                   ignored ? ignored + row * in_.attention.ignored_stride[1] : nullptr, in_.attention.ignored_stride[1],
                   to);
      if (in_.normed) kernel_.normalise(to, rows, in_.columns, norm_, chunk.stats[tile], from_row(chunk.normed, row));
    });
  }

  // Projects the loaded rows to the keys and values of block k.
  void project(const Chunk& chunk, int64_t k, int count) const {
    for_each_tile(count, [&](int, int row, int rows) {
      kernel_.multiply(from_row(chunk.normed, row), rows, in_.columns, weights().weight[k], in_.projected_columns(),
                       weights().bias[k], false, from_row(chunk.projected, row));
    });
  }

  // The projected keys and values of head h.
  Keys keys(const Chunk& chunk, const KeySet& set, int64_t h, int64_t first, int count) const {
    const Shape& shape = in_.attention.shape;
    const auto columns = [&](int64_t column) -> Matrix {
      return {offset(chunk.projected.data, column, sums_), chunk.projected.stride, 1};
    };
    return {columns(h * shape.key_width), columns(in_.key_columns() + h * shape.value_width), ignored_from(set, first),
            in_.attention.ignored_stride[1], count};
  }

 private:
  const PackedWeights& weights() const { return weights_.front(); }

  Matrix input_rows(const KeySet& set, int64_t first) const {
    const int64_t at = set.batch * in_.inputs.stride[0] + (set.first + first) * in_.inputs.stride[1];
    return {offset(static_cast<const void*>(in_.inputs.data), at, in_.dtype), in_.inputs.stride[1],
            in_.inputs.stride[2]};
  }
  const uint8_t* ignored_from(const KeySet& set, int64_t first) const {
    const Inputs& all = in_.attention;
    return all.ignored ? all.ignored + set.batch * all.ignored_stride[0] + (set.first + first) * all.ignored_stride[1]
                       : nullptr;
  }

  const ProjectedInputs& in_;
  const DType sums_;
  const LinearKernels& kernel_;
  Workspace weights_memory_;
  std::vector<PackedWeights> weights_;
  Norm norm_;
};

// The number of multiplications of a call, for the choice of threads. Merging and writing a row takes as long as about
// a thousand multiplications.
inline double multiplications(const ProjectedInputs& in) {
  const Inputs& all = in.attention;
  const double widths = all.shape.key_width + all.shape.value_width, heads = double(in.blocks) * all.heads;
  const double queries = double(all.queries) * all.batch;
  return heads * (all.keys * widths * (queries + in.columns) + queries * 1000);
}

// A set of keys of a wave, and its place in the workspace.
struct Set {
  int64_t b;
  KeySet keys;
  int64_t pieces;
  size_t packed, states;  // byte offsets
};

// One piece of the keys of a set.
struct Task {
  size_t set;
  int64_t piece;
};

// One block of queries of a head of a block of the stack.
struct Unit {
  size_t set;
  int64_t k, h, block;
};

// The sets of a wave, their tasks and their blocks of queries, and the addresses of each block's queries and partial
// states.
class Wave {
 public:
  Wave(const ProjectedInputs& in, int block_rows, size_t packed_bytes, size_t state_bytes)
      : in_(in),
        block_rows_(block_rows),
        blocks_(ceil_div(in.attention.queries, block_rows)),
        packed_bytes_(align(packed_bytes)),
        state_bytes_(align(state_bytes)) {}

  // Fills a wave with the sets from `b` on, with as many as fit. Returns the first set that did not fit. The memory of
  // the wave starts at `start`. The choice depends only on extents.
  template <class Pieces>
  int64_t fill(int64_t b, size_t start, Pieces pieces_of) {
    sets.clear(), tasks.clear(), units.clear();
    bytes = start;
    do {
      const KeySet keys = key_set(in_.attention, b);
      const int64_t pieces = pieces_of(keys.count);
      sets.push_back({b, keys, pieces, bytes, bytes + units_of_set() * packed_bytes_});
      bytes = sets.back().states + pieces * units_of_set() * state_bytes_;
      const size_t set = sets.size() - 1;
      for (int64_t piece = 0; piece < pieces; ++piece) tasks.push_back({set, piece});
      for (int64_t k = 0; k < in_.blocks; ++k)
        for (int64_t h = 0; h < in_.attention.heads; ++h)
          for (int64_t block = 0; block < blocks_; ++block) units.push_back({set, k, h, block});
      ++b;
    } while (b < in_.attention.batch && bytes - start < kWaveBytes && sets.size() < kWaveHeads);
    return b;
  }

  int64_t blocks() const { return blocks_; }
  int rows_of_block(int64_t block) const {
    return int(std::min<int64_t>(block_rows_, in_.attention.queries - block * block_rows_));
  }
  int64_t first_row(int64_t block) const { return block * block_rows_; }
  // The batch element of query, results and their gradients.
  int64_t batch_row(const Unit& unit) const { return unit.k * in_.attention.batch + sets[unit.set].b; }
  size_t packed(const Unit& unit) const { return sets[unit.set].packed + index(unit) * packed_bytes_; }
  size_t state(const Unit& unit, int64_t piece) const {
    return sets[unit.set].states + (piece * units_of_set() + index(unit)) * state_bytes_;
  }

  // Calls function(first row, rows) for the chunks of a task.
  template <class Function>
  void for_each_chunk(const Task& task, Function function) const {
    const Set& set = sets[task.set];
    const int64_t end = piece_start(set.keys.count, set.pieces, task.piece + 1, kChunkRows);
    for (int64_t row = piece_start(set.keys.count, set.pieces, task.piece, kChunkRows); row < end; row += kChunkRows)
      function(row, int(std::min<int64_t>(kChunkRows, end - row)));
  }

  std::vector<Set> sets;
  std::vector<Task> tasks;
  std::vector<Unit> units;
  size_t bytes = 0;

 private:
  int64_t units_of_set() const { return in_.blocks * in_.attention.heads * blocks_; }
  int64_t index(const Unit& unit) const { return (unit.k * in_.attention.heads + unit.h) * blocks_ + unit.block; }

  const ProjectedInputs& in_;
  const int block_rows_;
  const int64_t blocks_;
  const size_t packed_bytes_, state_bytes_;
};

}  // namespace
}  // namespace cmab::cpu
