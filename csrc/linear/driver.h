// Helpers shared by the drivers of linear layers: packed parameters, tiles in an arena, and sums over rows that have
// the same bits for any number of threads. Internal linkage, as in simd.h.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "common/arena.h"
#include "common/plan.h"
#include "linear/linear.h"

namespace cmab::cpu {
namespace {

inline void* offset(void* data, int64_t elements, DType dtype) {
  return data ? static_cast<char*>(data) + elements * element_bytes(dtype) : nullptr;
}
inline const void* offset(const void* data, int64_t elements, DType dtype) {
  return data ? static_cast<const char*>(data) + elements * element_bytes(dtype) : nullptr;
}
inline Matrix rows_from(const Matrix& matrix, int64_t row, DType dtype) {
  return {offset(matrix.data, row * matrix.row_stride, dtype), matrix.row_stride, matrix.col_stride};
}
inline Matrix transposed(const Matrix& matrix) { return {matrix.data, matrix.col_stride, matrix.row_stride}; }

// An allocator of tiles, packed matrices and padded vectors for one set of kernels.
class Taker {
 public:
  Taker(const LinearKernels& kernel, void* memory) : kernel_(kernel), arena_(memory) {}

  RowTile tile(int width, int rows = kRowTile) {
    return {arena_.take<char>(kernel_.tile_bytes(rows, width)), kernel_.stride(width)};
  }
  void* vector(int width) { return tile(width, 1).data; }
  void* packed(int depth, int width) { return arena_.take<char>(kernel_.packed_bytes(depth, width)); }
  void* stats() { return arena_.take<char>(kernel_.stats_bytes()); }
  size_t used() const { return arena_.used(); }

 private:
  const LinearKernels& kernel_;
  Arena arena_;
};

// A struct of buffers has a constructor that takes its members from a Taker. bytes_of returns its size; placed
// constructs one in `memory`.
template <class Buffers, class... Arguments>
size_t bytes_of(const LinearKernels& kernel, const Arguments&... arguments) {
  Taker take(kernel, nullptr);
  Buffers(take, arguments...);
  return align(take.used());
}
template <class Buffers, class... Arguments>
Buffers placed(void* memory, const LinearKernels& kernel, const Arguments&... arguments) {
  Taker take(kernel, memory);
  return Buffers(take, arguments...);
}

// Loads a vector of parameters in the compute type, padded with zeros; without a vector, all elements are zero.
inline void load_vector(const LinearKernels& kernel, DType dtype, const void* from, int width, void* to) {
  const uint8_t absent = from == nullptr;
  kernel.load(dtype, {from, 0, 1}, 1, width, &absent, 0, {to, 0});
}

inline void clear(const LinearKernels& kernel, int count, int width, RowTile rows) {
  const uint8_t absent = 1;
  kernel.load(DType::kFloat32, {nullptr, 0, 1}, count, width, &absent, 0, rows);
}

// The LayerNorm of rows before they are multiplied, or none.
struct NormParameters {
  void *weight, *bias;
  int width;

  NormParameters(Taker& take, int width) : weight(take.vector(width)), bias(take.vector(width)), width(width) {}
  void load(const LinearKernels& kernel, DType dtype, const NormWeights& from) {
    load_vector(kernel, dtype, from.weight, width, weight);
    load_vector(kernel, dtype, from.bias, width, bias);
    norm = {weight, bias, from.eps};
    used = from.weight != nullptr;
  }

  Norm norm{};
  bool used = false;
};

// A tile of rows, and the normed rows.
struct NormedRows {
  RowTile rows, normed;
  void* stats;

  NormedRows(Taker& take, int width) : rows(take.tile(width)), normed(take.tile(width)), stats(take.stats()) {}

  RowTile normalise(const LinearKernels& kernel, const NormParameters& parameters, int count) const {
    if (!parameters.used) return rows;
    kernel.normalise(rows, count, parameters.width, parameters.norm, stats, normed);
    return normed;
  }
  // Computes the gradient of the rows from `dnormed`, the gradient of the result, and overwrites dnormed. `drows` holds
  // the gradient of the residual; this function adds to it, to dweight and to dbias.
  void backward(const LinearKernels& kernel, const NormParameters& parameters, Residual residual, RowTile dnormed,
                int count, RowTile drows, RowTile dweight, RowTile dbias) const {
    if (!parameters.used) return kernel.add_tile(dnormed, count, parameters.width, drows);
    if (residual == Residual::kNormed) {
      kernel.add_tile(drows, count, parameters.width, dnormed);
      clear(kernel, count, parameters.width, drows);
    }
    kernel.normalise_backward(rows, dnormed, count, parameters.width, parameters.norm, stats, drows, dweight.data,
                              dbias.data);
  }
};

// The gradients of parameters, which are sums over rows. Rows are divided into pieces in a way that depends only on the
// number of rows. Each piece has its own sums; they are added in ascending order. A long piece is divided into runs, so
// that a sum of many equal terms, as in the gradient of a bias, keeps its digits.
class ParameterSums {
 public:
  ParameterSums(const LinearKernels& kernel, DType dtype, int64_t rows)
      : kernel_(kernel), dtype_(dtype), rows_(rows), pieces_(pieces_of(rows)) {}

  // Registers a sum of shape (rows, width) that will be written to `out`; null means that it is not needed. Returns its
  // number.
  int add(void* out, int rows, int width) {
    parts_.push_back({out, rows, width, piece_bytes_});
    piece_bytes_ += align(kernel_.tile_bytes(rows, width));
    return int(parts_.size()) - 1;
  }

  int pieces() const { return pieces_; }
  // Clears the sums of a piece, and calls function(first row, rows) for its tiles.
  template <class Function>
  void for_each_tile(int piece, Function function) {
    const int64_t first = piece_start(rows_, pieces_, piece, kRowTile);
    const int64_t end = piece_start(rows_, pieces_, piece + 1, kRowTile);
    clear(piece);
    if (has_runs()) clear(pieces_ + piece);
    for (int64_t row = first; row < end; row += kRowTile) {
      if (has_runs() && row > first && (row - first) % kRunRows == 0) {
        add_to(piece, pieces_ + piece);
        clear(piece);
      }
      function(row, int(std::min<int64_t>(kRowTile, end - row)));
    }
    if (has_runs()) add_to(pieces_ + piece, piece);
  }
  size_t bytes() const { return piece_bytes_ * pieces_ * (has_runs() ? 2 : 1); }
  void place(void* memory) { memory_ = static_cast<char*>(memory); }
  bool needed(int number) const { return parts_[number].out != nullptr; }
  RowTile of(int piece, int number) const {
    const Part& part = parts_[number];
    return {memory_ + piece * piece_bytes_ + part.offset, kernel_.stride(part.width)};
  }

  // units() returns the number of rows of all needed sums; write(unit) writes one of these rows.
  int64_t units() const {
    int64_t rows = 0;
    for (const Part& part : parts_) rows += part.out ? part.rows : 0;
    return rows;
  }
  void write(int64_t unit) const {
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      if (!part.out) continue;
      if (unit >= part.rows) {
        unit -= part.rows;
        continue;
      }
      const RowTile first = of(0, int(i));
      const size_t step = piece_bytes_, row = unit * first.stride * element_bytes(state_type(dtype_));
      kernel_.sum_parts(static_cast<const char*>(first.data) + row, step, pieces_, part.width, dtype_,
                        offset(part.out, unit * part.width, dtype_));
      return;
    }
  }

 private:
  static constexpr int64_t kRunRows = 64 * kRowTile;

  // Whether pieces have several runs. The sums of the earlier runs are those of piece `pieces_ + piece`.
  bool has_runs() const { return rows_ > kRunRows * pieces_; }
  void clear(int piece) { std::fill_n(memory_ + piece * piece_bytes_, piece_bytes_, 0); }
  void add_to(int from, int to) const {
    for (size_t i = 0; i < parts_.size(); ++i)
      if (parts_[i].out) kernel_.add_tile(of(from, int(i)), parts_[i].rows, parts_[i].width, of(to, int(i)));
  }

  // A power of two, so that all threads get the same number of pieces: one piece for every 512 rows, at least two from
  // 128 rows on, and at most 16.
  static int pieces_of(int64_t rows) {
    int pieces = rows < 128 ? 1 : 2;
    while (pieces < 16 && rows >= 1024 * pieces) pieces *= 2;
    return pieces;
  }

  struct Part {
    void* out;
    int rows, width;
    size_t offset;
  };

  const LinearKernels& kernel_;
  const DType dtype_;
  const int64_t rows_;
  const int pieces_;
  std::vector<Part> parts_;
  size_t piece_bytes_ = 0;
  char* memory_ = nullptr;
};

// Calls pass(first row, rows, parameters, tiles) for all tiles of `rows` rows, on the calling thread. `Parameters`,
// packed by load(kernel, problem), and `Tiles` are both made for the problem.
template <class Parameters, class Tiles, class Problem, class Pass>
void for_each_tile(const LinearKernels& kernel, const Problem& problem, int64_t rows, Pass pass) {
  const size_t shared_bytes = bytes_of<Parameters>(kernel, problem);
  Workspace workspace;
  workspace.reserve(shared_bytes + bytes_of<Tiles>(kernel, problem));
  auto parameters = placed<Parameters>(workspace.at(0), kernel, problem);
  parameters.load(kernel, problem);
  const auto tiles = placed<Tiles>(workspace.at(shared_bytes), kernel, problem);
  for (int64_t row = 0; row < rows; row += kRowTile)
    pass(row, int(std::min<int64_t>(kRowTile, rows - row)), parameters, tiles);
}

// A team of threads for the tiles of the pieces of `sums`. Each thread has its own tiles and its own parameters, which
// it packs itself. The sums use the rest of the memory.
template <class Parameters, class Tiles, class Problem>
class Team {
 public:
  Team(const LinearKernels& kernel, const Problem& problem, int threads, ParameterSums& sums)
      : kernel_(kernel),
        problem_(problem),
        threads_(std::min(threads, sums.pieces())),
        parameter_bytes_(bytes_of<Parameters>(kernel, problem)),
        thread_bytes_(parameter_bytes_ + bytes_of<Tiles>(kernel, problem)) {
    const size_t bytes = threads_ * thread_bytes_;
    workspace_.reserve(bytes + sums.bytes());
    sums.place(workspace_.at(bytes));
  }

  // Calls pass(piece, first row, rows, parameters, tiles) for all tiles of the pieces of `sums`, and writes the sums.
  template <class Pass>
  void for_each_tile_of(ParameterSums& sums, Pass pass) {
#pragma omp parallel num_threads(threads_)
    {
      const FlushToZero flush;
      char* const memory = workspace_.at(omp_get_thread_num() * thread_bytes_);
      auto parameters = placed<Parameters>(memory, kernel_, problem_);
      parameters.load(kernel_, problem_);
      const auto tiles = placed<Tiles>(memory + parameter_bytes_, kernel_, problem_);
#pragma omp for schedule(static)
      for (int piece = 0; piece < sums.pieces(); ++piece) {
        sums.for_each_tile(piece, [&](int64_t row, int count) { pass(piece, row, count, parameters, tiles); });
      }
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < sums.units(); ++unit) sums.write(unit);
    }
  }

 private:
  const LinearKernels& kernel_;
  const Problem& problem_;
  const int threads_;
  const size_t parameter_bytes_, thread_bytes_;
  Workspace workspace_;
};

}  // namespace
}  // namespace cmab::cpu
