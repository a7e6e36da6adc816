// Rows that are normed and projected to the heads of attention, and the gradient. Internal linkage, as in simd.h.
#pragma once

#include <cstring>

#include "layers/crew.h"
#include "linear/driver.h"

namespace cmab::cpu {
namespace {

// Heads (batch, heads, rows, width), contiguous, in the type of sums. They are read and written as rows (batch * rows,
// heads * width). Attention reads a head fastest if it is contiguous.
struct Heads {
  void* data;
  int heads, width;
  int64_t rows;

  // Loads rows, and writes zeros in the rows past the last, as LinearKernels::load does.
  void load(const LinearKernels& kernel, DType sums, int64_t row, int count, RowTile to) const {
    for_each_set(row, count, [&](int64_t at, int done, int some) {
      kernel.load_heads(sums, offset(data, at * width, sums), width, rows * width, heads, width, some,
                        {offset(to.data, done * to.stride, sums), to.stride});
    });
    const int64_t row_bytes = to.stride * element_bytes(sums), past = (kRowStep - count % kRowStep) % kRowStep;
    std::memset(static_cast<char*>(to.data) + count * row_bytes, 0, past * row_bytes);
  }

  void store(const LinearKernels& kernel, DType sums, RowTile from, int64_t row, int count) const {
    for_each_set(row, count, [&](int64_t at, int done, int some) {
      kernel.store_heads({offset(from.data, done * from.stride, sums), from.stride}, some, heads, width, sums,
                         offset(data, at * width, sums), width, rows * width);
    });
  }

 private:
  // Calls function(first of these rows in memory, rows done, rows) for the rows of each batch element.
  template <class Function>
  void for_each_set(int64_t row, int count, Function function) const {
    for (int done = 0; done < count;) {
      const int64_t batch = (row + done) / rows, at = (row + done) % rows;
      const int some = int(std::min<int64_t>(count - done, rows - at));
      function(batch * heads * rows + at, done, some);
      done += some;
    }
  }
};

// A linear layer of the rows: the `width` columns of its result, and the memory of the result.
struct Branch {
  const Weights* weights;
  int width;
  Heads result;
  WeightGradients gradient;
};

// Rows that are normed and projected to one or more branches. In the results of the branches, these are the rows from
// `first` on.
struct Source {
  DType dtype;
  Matrix rows;
  int64_t first, count;
  int width;
  const uint8_t* ignored;
  const NormWeights* norm;
  std::vector<Branch> branches;

  double multiplications() const {
    double columns = 0;
    for (const Branch& branch : branches) columns += branch.width;
    return double(count) * width * columns;
  }

  void load(const LinearKernels& kernel, int64_t row, int rows_to_load, RowTile to) const {
    kernel.load(dtype, rows_from(rows, row, dtype), rows_to_load, width, ignored ? ignored + row : nullptr, 1, to);
  }
};

// Some of the rows of a source, and their results.
inline Source part_of(Source source, const Rows& rows) {
  source.rows = rows_from(source.rows, rows.first, source.dtype);
  source.first += rows.first, source.count = rows.count;
  if (source.ignored) source.ignored += rows.first;
  return source;
}

// The packed matrices and biases of the branches, for the forward or the backward pass.
template <bool kBackward>
struct SourceParameters {
  NormParameters norm;
  std::vector<void*> packed, bias;

  SourceParameters(Taker& take, const Source& source) : norm(take, source.width) {
    for (const Branch& branch : source.branches) {
      packed.push_back(kBackward ? take.packed(branch.width, source.width) : take.packed(source.width, branch.width));
      bias.push_back(take.vector(branch.width));
    }
  }

  void load(const LinearKernels& kernel, const Source& source) {
    norm.load(kernel, source.dtype, *source.norm);
    for (size_t i = 0; i < packed.size(); ++i) {
      const Branch& branch = source.branches[i];
      const Matrix& weight = branch.weights->weight;
      if constexpr (kBackward) {
        kernel.pack(source.dtype, weight, branch.width, source.width, packed[i]);
      } else {
        kernel.pack(source.dtype, transposed(weight), source.width, branch.width, packed[i]);
        load_vector(kernel, source.dtype, branch.weights->bias, branch.width, bias[i]);
      }
    }
  }
};

inline int widest_branch(const Source& source) {
  int width = 0;
  for (const Branch& branch : source.branches) width = std::max(width, branch.width);
  return width;
}

struct SourceTiles {
  NormedRows x;
  RowTile branch, dx, dnormed;

  SourceTiles(Taker& take, const Source& source)
      : x(take, source.width),
        branch(take.tile(widest_branch(source))),
        dx(take.tile(source.width)),
        dnormed(take.tile(source.width)) {}
};

// Fills the branches' results from the rows, on the calling thread.
inline void project(const LinearKernels& kernel, const Source& source) {
  using Parameters = SourceParameters<false>;
  const DType sums = state_type(source.dtype);
  for_each_tile<Parameters, SourceTiles>(
      kernel, source, source.count, [&](int64_t row, int count, const Parameters& parameters, const SourceTiles& mine) {
        source.load(kernel, row, count, mine.x.rows);
        const RowTile normed = mine.x.normalise(kernel, parameters.norm, count);
        for (size_t i = 0; i < source.branches.size(); ++i) {
          const Branch& branch = source.branches[i];
          kernel.multiply(normed, count, source.width, parameters.packed[i], branch.width, parameters.bias[i], false,
                          mine.branch);
          branch.result.store(kernel, sums, mine.branch, source.first + row, count);
        }
      });
}

// Adds up the gradients of the rows and of all parameters. Its inputs are the gradients of the results of the branches,
// as heads, and the gradient of the residual of the rows. Both are optional: without data they count as 0.
class ProjectionBackward {
 public:
  ProjectionBackward(const LinearKernels& kernel, const Source& source, std::vector<Heads> dresults, Residual residual,
                     const Matrix& dresidual, void* drows, const WeightGradients& norm)
      : kernel_(kernel),
        source_(source),
        dresults_(std::move(dresults)),
        residual_(residual),
        dresidual_(dresidual),
        drows_(drows),
        sums_(kernel, source.dtype, source.count) {
    for (const Branch& branch : source.branches) {
      weights_.push_back(sums_.add(branch.gradient.weight, branch.width, source.width));
      biases_.push_back(sums_.add(branch.gradient.bias, 1, branch.width));
    }
    norm_weight_ = sums_.add(norm.weight, 1, source.width);
    norm_bias_ = sums_.add(norm.bias, 1, source.width);
  }

  void run(int threads) {
    Team<Parameters, SourceTiles, Source>(kernel_, source_, useful_threads(2 * source_.multiplications(), threads),
                                          sums_)
        .for_each_tile_of(sums_, [&](int piece, int64_t row, int count, const Parameters& parameters,
                                     const SourceTiles& tiles) { pass(piece, row, count, parameters, tiles); });
  }

 private:
  using Parameters = SourceParameters<true>;

  void pass(int piece, int64_t row, int count, const Parameters& parameters, const SourceTiles& tiles) const {
    const auto sum = [&](int number) { return sums_.of(piece, number); };
    const DType dtype = source_.dtype;
    const uint8_t absent = dresidual_.data == nullptr;
    source_.load(kernel_, row, count, tiles.x.rows);
    kernel_.load(dtype, rows_from(dresidual_, row, dtype), count, source_.width, absent ? &absent : nullptr, 0,
                 tiles.dx);
    const RowTile normed = tiles.x.normalise(kernel_, parameters.norm, count);
    if (source_.branches.empty()) clear(kernel_, count, source_.width, tiles.dnormed);
    for (size_t i = 0; i < source_.branches.size(); ++i) {
      const int width = source_.branches[i].width;
      dresults_[i].load(kernel_, state_type(dtype), row, count, tiles.branch);
      if (sums_.needed(weights_[i]))
        kernel_.add_products(tiles.branch, width, normed, source_.width, count, sum(weights_[i]));
      if (sums_.needed(biases_[i])) kernel_.add_rows(tiles.branch, count, width, sum(biases_[i]).data);
      kernel_.multiply(tiles.branch, count, width, parameters.packed[i], source_.width, nullptr, i > 0, tiles.dnormed);
    }
    tiles.x.backward(kernel_, parameters.norm, residual_, tiles.dnormed, count, tiles.dx, sum(norm_weight_),
                     sum(norm_bias_));
    if (drows_)
      kernel_.store(tiles.dx, count, source_.width, dtype, offset(drows_, row * source_.width, dtype), source_.width);
  }

  const LinearKernels& kernel_;
  const Source& source_;
  const std::vector<Heads> dresults_;
  const Residual residual_;
  const Matrix dresidual_;
  void* const drows_;
  ParameterSums sums_;
  std::vector<int> weights_, biases_;
  int norm_weight_, norm_bias_;
};

}  // namespace
}  // namespace cmab::cpu
