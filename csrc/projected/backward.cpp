// The backward driver. In a thread's own memory, it projects each chunk of rows again and computes the gradients of the
// attention with respect to its keys and values. It propagates these through the products and the norm, to the rows and
// to sums for the weights.
#include <omp.h>

#include "common/dtype.h"
#include "projected/projection.h"

namespace cmab::cpu {
namespace {

constexpr int64_t kMaxPieces = 16;
constexpr int64_t kMaxSums = 16;  // sums of the gradients of weights, each over a run of tasks

// The number of pieces of the keys, each with its own partial dQ; memory limits it.
int64_t key_pieces(int64_t keys, int64_t queries) {
  const int64_t most = queries == 0 ? kMaxPieces : std::clamp<int64_t>(2048 / queries, 4, kMaxPieces);
  return keys == 0 ? 0 : std::clamp<int64_t>(keys / (2 * kChunkRows), 1, most);
}

// The columns of the projection that belong to the keys, or to the values, of all heads.
struct Part {
  int width, columns, first;  // the columns of one head, and of all heads; the first column
};

// The weights (columns, C) of the keys and of the values of each block, packed for products with gradients.
struct TransposedWeights {
  std::vector<void*> of[2];
  TransposedWeights(Taker& take, const ProjectedInputs& in) {
    for (int64_t k = 0; k < in.blocks; ++k) {
      of[0].push_back(take.packed(in.key_columns(), in.columns));
      of[1].push_back(take.packed(in.value_columns(), in.columns));
    }
  }
};

// A thread's buffers: gradients of a chunk of rows, and of a tile of keys or values.
struct Slopes {
  Chunk chunk;
  RowTile dnormed, drows, dpart[2];
  void *dweight, *dbias;  // of the norm; not used, because its weight is 1
  void* dheads[2];        // (H, rows, width): keys and values of all heads

  Slopes(Taker& take, const ProjectedInputs& in)
      : chunk(take, in), dnormed(take.tile(in.columns, kChunkRows)), drows(take.tile(in.columns)) {
    const int columns[] = {in.key_columns(), in.value_columns()};
    for (int i = 0; i < 2; ++i) dpart[i] = take.tile(columns[i]);
    for (int i = 0; i < 2; ++i) dheads[i] = take.tile(columns[i], kChunkRows).data;
    dweight = take.vector(in.columns), dbias = take.vector(in.columns);
  }
};

// The sums of the gradients of one block's weights over a run of tasks.
struct Sums {
  RowTile weight[2];
  void* bias[2];
  Sums(Taker& take, const ProjectedInputs& in) {
    const int columns[] = {in.key_columns(), in.value_columns()};
    for (int i = 0; i < 2; ++i) weight[i] = take.tile(in.columns, columns[i]), bias[i] = take.vector(columns[i]);
  }
};

// A backward call; T is the type of sums.
template <class T>
class Backward {
 public:
  Backward(const ProjectedInputs& in, const Operand& dout, const Operand& dlse, const void* out, const double* lse,
           const ProjectedGradients& gradients)
      : in_(in),
        shape_(in.attention.shape),
        kernel_(backward_kernel(shape_.dtype)),
        projection_(in),
        linear_(projection_.kernel()),
        dout_(dout),
        dlse_(dlse),
        out_(static_cast<const T*>(out)),
        lse_(lse),
        gradients_(gradients),
        needs_weights_(gradients.weight || gradients.bias),
        threads_(useful_threads(multiplications(in), in.attention.threads)),
        parts_{{shape_.key_width, in.key_columns(), 0}, {shape_.value_width, in.value_columns(), in.key_columns()}} {
    needs_.query = gradients.query != nullptr;
    needs_.key = needs_.value = gradients.inputs || needs_weights_;
    transposed_memory_.reserve(bytes_of<TransposedWeights>(linear_, in));
    transposed_.push_back(placed<TransposedWeights>(transposed_memory_.at(0), linear_, in));
    for (int64_t k = 0; k < in.blocks; ++k)
      for (int i = 0; i < 2; ++i)
        linear_.pack(projection_.sums(), projection_.weight_rows(k, parts_[i].first), parts_[i].columns, in.columns,
                     transposed_[0].of[i][k]);
    slopes_bytes_ = bytes_of<Slopes>(linear_, in);
    attention_bytes_ =
        align(std::max(kernel_.scratch_bytes(shape_), 2 * sizeof(double) * kernel_.block * shape_.key_width));
    blocks_bytes_ = align(ceil_div(in.attention.queries, kernel_.block) * sizeof(QueryBlock));
    sums_bytes_ = bytes_of<Sums>(linear_, in);
  }

  void run() {
    const Inputs& all = in_.attention;
    const int rows = int(std::min<int64_t>(kernel_.block, all.queries));
    Wave wave(in_, kernel_.block, kernel_.packed_bytes(shape_, rows),
              needs_.query ? kernel_.state_bytes(shape_, rows) : 0);
    const auto pieces = [&](int64_t keys) { return key_pieces(keys, all.queries); };
    int64_t tasks = 0;
    for (int64_t b = 0; b < all.batch; ++b) tasks += pieces(key_set(all, b).count);
    runs_ = std::min(tasks, kMaxSums);
    sums_memory_.reserve(needs_weights_ ? runs_ * in_.blocks * sums_bytes_ : 0);
    if (needs_weights_ && runs_) std::fill_n(sums_memory_.at(0), runs_ * in_.blocks * sums_bytes_, 0);
    for (int64_t b = 0; b < all.batch;) {
      b = wave.fill(b, threads_ * scratch_bytes(), pieces);
      workspace_.reserve(wave.bytes);
      run_wave(wave);
    }
    if (needs_weights_) write_weights();
  }

 private:
  size_t scratch_bytes() const { return slopes_bytes_ + attention_bytes_ + blocks_bytes_; }

  void run_wave(const Wave& wave) const {
    const int64_t runs = std::min<int64_t>(runs_, wave.tasks.size());
#pragma omp parallel num_threads(threads_)
    {
      const FlushToZero flush;
      char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes());
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < wave.units.size(); ++i) pack(wave, wave.units[i]);
#pragma omp for schedule(dynamic)
      for (int64_t run = 0; run < runs; ++run) {
        const int64_t end = piece_start(wave.tasks.size(), runs, run + 1, 1);
        for (int64_t i = piece_start(wave.tasks.size(), runs, run, 1); i < end; ++i)
          differentiate(wave, wave.tasks[i], run, scratch);
      }
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < (needs_.query ? wave.units.size() : 0); ++i)
        add_query_parts(wave, wave.units[i], scratch + slopes_bytes_);
    }
  }

  void pack(const Wave& wave, const Unit& unit) const {
    const int rows = wave.rows_of_block(unit.block), width = shape_.value_width;
    const int64_t first = wave.first_row(unit.block), b = wave.batch_row(unit);
    const int64_t at = (b * in_.attention.heads + unit.h) * in_.attention.queries + first;
    double delta[kMaxBlock];
    for (int row = 0; row < rows; ++row) {
      const T* dout = dout_.at<T>(b, unit.h, first + row);
      const T* out = out_ + (at + row) * width;
      delta[row] = dot(dout, dout_.stride[3], out, width) - *dlse_.at<double>(b, unit.h, first + row);
    }
    const QueryRows from{rows_of(in_.attention, in_.attention.query, b, unit.h, first),
                         dout_.at<T>(b, unit.h, first),
                         dout_.stride[2],
                         dout_.stride[3],
                         lse_ + at,
                         delta};
    kernel_.pack(shape_, rows, from, workspace_.at(wave.packed(unit)));
    for (int64_t piece = 0; needs_.query && piece < wave.sets[unit.set].pieces; ++piece)
      kernel_.clear(shape_, rows, workspace_.at(wave.state(unit, piece)));
  }

  void differentiate(const Wave& wave, const Task& task, int64_t run, char* scratch) const {
    const Slopes slopes = placed<Slopes>(scratch, linear_, in_);
    const KeySet& set = wave.sets[task.set].keys;
    wave.for_each_chunk(task, [&](int64_t first, int count) {
      projection_.load(slopes.chunk, set, first, count);
      for (int64_t k = 0; k < in_.blocks; ++k) {
        projection_.project(slopes.chunk, k, count);
        for (int64_t h = 0; h < in_.attention.heads; ++h)
          attend(wave, task, k, h, projection_.keys(slopes.chunk, set, h, first, count), slopes,
                 scratch + slopes_bytes_);
        if (needs_.key) unproject(slopes, k, run, count);
      }
      if (gradients_.inputs) write_inputs(slopes, set, first, count);
    });
  }

  // Computes the gradient of the attention of head h of block k: adds to the states of its queries, and writes dK and
  // dV.
  void attend(const Wave& wave, const Task& task, int64_t k, int64_t h, const Keys& keys, const Slopes& slopes,
              char* scratch) const {
    auto* blocks = reinterpret_cast<QueryBlock*>(scratch + attention_bytes_);
    for (int64_t block = 0; block < wave.blocks(); ++block) {
      const Unit unit{task.set, k, h, block};
      blocks[block] = {wave.rows_of_block(block), workspace_.at(wave.packed(unit)),
                       needs_.query ? workspace_.at(wave.state(unit, task.piece)) : nullptr};
    }
    const auto of_head = [&](int i) { return offset(slopes.dheads[i], h * keys.count * parts_[i].width, sums()); };
    const KeyGradient gradient =
        needs_.key ? KeyGradient{of_head(0), of_head(1), sums()} : KeyGradient{nullptr, nullptr, sums()};
    kernel_.attend(shape_, needs_, blocks, int(wave.blocks()), keys, gradient, scratch);
  }

  // Propagates dK and dV of block k to the normed rows, and to the sums for the weights.
  void unproject(const Slopes& slopes, int64_t k, int64_t run, int count) const {
    const auto to = needs_weights_ ? sums_of(run, k) : std::vector<Sums>();
    Projection::for_each_tile(count, [&](int, int row, int rows) {
      const RowTile dnormed = projection_.from_row(slopes.dnormed, row);
      const RowTile normed = projection_.from_row(slopes.chunk.normed, row);
      for (int i = 0; i < 2; ++i) {
        const Part& part = parts_[i];
        linear_.load_heads(sums(), offset(slopes.dheads[i], row * part.width, sums()), part.width, count * part.width,
                           int(in_.attention.heads), part.width, rows, slopes.dpart[i]);
        if (gradients_.inputs)
          linear_.multiply(slopes.dpart[i], rows, part.columns, transposed_[0].of[i][k], in_.columns, nullptr,
                           k > 0 || i > 0, dnormed);
        if (gradients_.weight)
          linear_.add_products(slopes.dpart[i], part.columns, normed, in_.columns, rows, to[0].weight[i]);
        if (gradients_.bias) linear_.add_rows(slopes.dpart[i], rows, part.columns, to[0].bias[i]);
      }
    });
  }

  void write_inputs(const Slopes& slopes, const KeySet& set, int64_t first, int count) const {
    Projection::for_each_tile(count, [&](int tile, int row, int rows) {
      RowTile drows = projection_.from_row(slopes.dnormed, row);
      if (in_.normed) {
        std::fill_n(static_cast<T*>(slopes.drows.data), rows * slopes.drows.stride, T(0));
        linear_.normalise_backward(projection_.from_row(slopes.chunk.rows, row), drows, rows, in_.columns,
                                   projection_.norm(), slopes.chunk.stats[tile], slopes.drows, slopes.dweight,
                                   slopes.dbias);
        drows = slopes.drows;
      }
      const int64_t at = (set.batch * in_.attention.keys + set.first + first + row) * in_.columns;
      linear_.store(drows, rows, in_.columns, in_.dtype, offset(gradients_.inputs, at, in_.dtype), in_.columns);
    });
  }

  // Writes dQ of one block of queries: the sum over the pieces, in ascending order.
  void add_query_parts(const Wave& wave, const Unit& unit, char* scratch) const {
    const int rows = wave.rows_of_block(unit.block), width = shape_.key_width;
    double *part = reinterpret_cast<double*>(scratch), *total = part + rows * width;
    std::fill_n(total, rows * width, 0.0);
    for (int64_t piece = 0; piece < wave.sets[unit.set].pieces; ++piece) {
      kernel_.read(shape_, rows, workspace_.at(wave.state(unit, piece)), part);
      for (int i = 0; i < rows * width; ++i) total[i] += part[i];
    }
    const int64_t row = (wave.batch_row(unit) * in_.attention.heads + unit.h) * in_.attention.queries;
    T* to = static_cast<T*>(gradients_.query) + (row + wave.first_row(unit.block)) * width;
    for (int i = 0; i < rows * width; ++i) to[i] = T(shape_.scale * total[i]);
  }

  std::vector<Sums> sums_of(int64_t run, int64_t k) const {
    return {placed<Sums>(sums_memory_.at((run * in_.blocks + k) * sums_bytes_), linear_, in_)};
  }

  // Writes the gradients of weights and biases: the sums over the runs of tasks, in ascending order.
  void write_weights() const {
    const int64_t projected = in_.projected_columns();
    for (int64_t k = 0; k < in_.blocks; ++k)
      for (int i = 0; i < 2; ++i) {
        const int64_t first = k * projected + parts_[i].first;
        const Sums sums = runs_ ? sums_of(0, k)[0] : sums_of_nothing();
        for (int row = 0; gradients_.weight && row < parts_[i].columns; ++row)
          write(projection_.from_row(sums.weight[i], row).data, in_.columns, gradients_.weight,
                (first + row) * in_.columns);
        if (gradients_.bias) write(sums.bias[i], parts_[i].columns, gradients_.bias, first);
      }
  }
  void write(const void* first_sum, int count, void* to, int64_t at) const {
    linear_.sum_parts(first_sum, in_.blocks * sums_bytes_, int(runs_), count, sums(), offset(to, at, sums()));
  }
  Sums sums_of_nothing() const { return placed<Sums>(nullptr, linear_, in_); }

  DType sums() const { return projection_.sums(); }

  static constexpr int kMaxBlock = 256;

  const ProjectedInputs& in_;
  const Shape& shape_;
  const BackwardKernel& kernel_;
  const Projection projection_;
  const LinearKernels& linear_;
  const Operand &dout_, &dlse_;
  const T* out_;
  const double* lse_;
  const ProjectedGradients& gradients_;
  Needs needs_;
  const bool needs_weights_;
  const int threads_;
  const Part parts_[2];
  int64_t runs_ = 0;
  size_t slopes_bytes_, attention_bytes_, blocks_bytes_, sums_bytes_;
  Workspace transposed_memory_, sums_memory_, workspace_;
  std::vector<TransposedWeights> transposed_;
};

}  // namespace

void projected_attention_backward(const ProjectedInputs& in, const Operand& dout, const Operand& dlse, const void* out,
                                  const double* lse, const ProjectedGradients& gradients) {
  if (in.dtype == DType::kFloat64)
    Backward<double>(in, dout, dlse, out, lse, gradients).run();
  else
    Backward<float>(in, dout, dlse, out, lse, gradients).run();
}

}  // namespace cmab::cpu
