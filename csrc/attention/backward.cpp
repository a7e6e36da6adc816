// The backward driver: packs the queries with their lse, delta and dout, makes one pass over the keys, and then adds
// the parts of dQ (and of dK and dV, if the queries were also cut into pieces).
#include <omp.h>

#include "attention/plan.h"
#include "common/dtype.h"
#include "common/instruction_sets.h"

namespace cmab::cpu {
namespace {

template <class T>
T as_bfloat16(T x) {
  BFloat16 rounded;
  narrow(float(x), &rounded);
  return widen(rounded);
}

constexpr int64_t kPieceRows = 256;  // a piece with fewer rows would not be worthwhile
constexpr int64_t kMaxPieces = 16;

// The number of pieces of the keys, each with its own partial dQ. Memory limits the number, but 4 pieces are allowed
// for any number of queries.
int64_t key_pieces(int64_t keys, int64_t queries) {
  const int64_t most = queries == 0 ? kMaxPieces : std::clamp<int64_t>(2048 / queries, 4, kMaxPieces);
  return keys == 0 ? 0 : std::clamp<int64_t>(keys / kPieceRows, 1, most);
}

// The number of pieces of the queries, each with its own partial dK and dV. There is more than one piece only if there
// are too few keys to cut.
int64_t query_pieces(int64_t keys, int64_t queries) {
  return key_pieces(keys, queries) > 1 ? 1 : std::clamp<int64_t>(queries / kPieceRows, 1, kMaxPieces);
}

// A head of a wave (a group of heads that are processed together), and its pieces.
struct Head {
  int64_t b, h;
  KeySet set;
  int64_t key_pieces, query_pieces;
  size_t packed, states, parts;  // byte offsets in the workspace
};

// Neighbouring heads from `head` on: one piece of their keys and one piece of their queries.
struct Task {
  size_t head, heads;
  int64_t key_piece, query_piece;
};

// A block of queries of a head, or (if index = first key) a tile of its keys.
struct Unit {
  size_t head;
  int64_t index;
};

// A backward call; T is the type of sums.
template <class T>
class Backward {
 public:
  Backward(const Inputs& in, const Operand& dout, const Operand& dlse, const void* out, const double* lse,
           const Gradients& gradients)
      : in_(in),
        kernel_(backward_kernel(in.shape.dtype)),
        dout_(dout),
        dlse_(dlse),
        out_(static_cast<const T*>(out)),
        lse_(lse),
        gradients_(gradients),
        needs_{gradients.query != nullptr, gradients.key != nullptr, gradients.value != nullptr,
               gradients.key_bias != nullptr},
        threads_(useful_threads(in)),
        blocks_(ceil_div(in.queries, kernel_.block)) {
    const int rows = int(std::min<int64_t>(kernel_.block, in.queries));
    packed_bytes_ = align(kernel_.packed_bytes(in.shape, rows));
    state_bytes_ = needs_.query ? align(kernel_.state_bytes(in.shape, rows)) : 0;
    scratch_bytes_ = align(std::max(kernel_.scratch_bytes(in.shape), Sum::bytes(in.shape, kernel_.block)));
    scratch_bytes_ += align(blocks_ * sizeof(QueryBlock));
  }

  void run() {
    const int64_t count = in_.batch * in_.heads;
    for (int64_t next = 0; next < count;) {
      heads_.clear();
      size_t bytes = threads_ * scratch_bytes_;
      do {
        bytes = add_head(next / in_.heads, next % in_.heads, bytes);
        ++next;
      } while (next < count && bytes < kWaveBytes && heads_.size() < kWaveHeads);
      workspace_.reserve(bytes);
      deal_tasks();
      run_wave();
    }
  }

 private:
  // A thread's buffers while it adds the parts of dQ of one block.
  struct Sum {
    double *part, *total;  // [rows][D]
    Sum(const Shape& shape, int rows, char* memory)
        : part(reinterpret_cast<double*>(memory)), total(part + rows * shape.key_width) {}
    static size_t bytes(const Shape& shape, int rows) { return 2 * sizeof(double) * rows * shape.key_width; }
  };

  size_t add_head(int64_t b, int64_t h, size_t bytes) {
    const KeySet set = key_set(in_, b);
    Head head{b, h, set, key_pieces(set.count, in_.queries), query_pieces(set.count, in_.queries), bytes, 0, 0};
    head.states = head.packed + blocks_ * packed_bytes_;
    head.parts = head.states + head.key_pieces * blocks_ * state_bytes_;
    heads_.push_back(head);
    return head.parts + (head.query_pieces > 1 ? head.query_pieces * part_bytes(head) : 0);
  }

  void deal_tasks() {
    tasks_.clear();
    blocks_to_do_.clear();
    tiles_to_do_.clear();
    for (size_t i = 0; i < heads_.size();) {
      const Head& head = heads_[i];
      const size_t most = heads_together(in_, head.key_pieces * head.query_pieces);
      size_t together = 1;
      while (together < most && i + together < heads_.size() && heads_[i + together].b == head.b) ++together;
      for (int64_t k = 0; k < head.key_pieces; ++k)
        for (int64_t q = 0; q < head.query_pieces; ++q) tasks_.push_back({i, together, k, q});
      i += together;
    }
    for (size_t i = 0; i < heads_.size(); ++i) {
      for (int64_t block = 0; block < blocks_; ++block) blocks_to_do_.push_back({i, block});
      if (heads_[i].query_pieces > 1)
        for (int64_t key = 0; key < heads_[i].set.count; key += kKeyTile) tiles_to_do_.push_back({i, key});
    }
  }

  void run_wave() {
    if (std::all_of(heads_.begin(), heads_.end(), [](const Head& h) { return h.key_pieces * h.query_pieces == 1; }))
      return run_apart();
#pragma omp parallel num_threads(threads_)
    {
      const FlushToZero flush;
      char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes_);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < blocks_to_do_.size(); ++i) pack(heads_[blocks_to_do_[i].head], blocks_to_do_[i].index);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < tasks_.size(); ++i) attend(tasks_[i], scratch);
#pragma omp for schedule(dynamic) nowait
      for (size_t i = 0; i < tiles_to_do_.size(); ++i)
        add_key_parts(heads_[tiles_to_do_[i].head], tiles_to_do_[i].index);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < (needs_.query ? blocks_to_do_.size() : 0); ++i)
        add_query_parts(heads_[blocks_to_do_[i].head], blocks_to_do_[i].index, scratch);
    }
  }

  // If keys and queries are one piece each, no sum across tasks is needed, so no thread waits for another before the
  // end.
  void run_apart() {
#pragma omp parallel for schedule(dynamic) num_threads(threads_)
    for (size_t i = 0; i < tasks_.size(); ++i) {
      const FlushToZero flush;
      char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes_);
      const auto each_block = [&](auto function) {
        for (size_t head = tasks_[i].head; head < tasks_[i].head + tasks_[i].heads; ++head)
          for (int64_t block = 0; block < blocks_; ++block) function(heads_[head], block);
      };
      each_block([&](const Head& head, int64_t block) { pack(head, block); });
      attend(tasks_[i], scratch);
      if (needs_.query) each_block([&](const Head& head, int64_t block) { add_query_parts(head, block, scratch); });
    }
  }

  int rows_of_block(int64_t block) const {
    return int(std::min<int64_t>(kernel_.block, in_.queries - block * kernel_.block));
  }
  char* packed(const Head& head, int64_t block) const { return workspace_.at(head.packed + block * packed_bytes_); }
  char* state(const Head& head, int64_t piece, int64_t block) const {
    return workspace_.at(head.states + (piece * blocks_ + block) * state_bytes_);
  }
  int64_t row_index(const Head& head, int64_t row) const { return (head.b * in_.heads + head.h) * in_.queries + row; }
  int64_t key_row(const Head& head, int64_t key) const {
    return (head.set.batch * in_.heads + head.h) * in_.keys + head.set.first + key;
  }

  size_t part_bytes(const Head& head) const {
    return align(head.set.count * (in_.shape.key_width + in_.shape.value_width + needs_.bias) * sizeof(T));
  }
  T* key_part(const Head& head, int64_t piece) const {
    return reinterpret_cast<T*>(workspace_.at(head.parts + piece * part_bytes(head)));
  }
  T* value_part(const Head& head, int64_t piece) const {
    return key_part(head, piece) + head.set.count * in_.shape.key_width;
  }
  T* bias_part(const Head& head, int64_t piece) const {
    return value_part(head, piece) + head.set.count * in_.shape.value_width;
  }

  void pack(const Head& head, int64_t block) const {
    const int rows = rows_of_block(block), width = in_.shape.value_width;
    const int64_t first = block * kernel_.block;
    double delta[kMaxBlock];
    T rounded[kMaxWidth];
    for (int row = 0; row < rows; ++row) {
      const T* dout = dout_.at<T>(head.b, head.h, first + row);
      const T* out = out_ + row_index(head, first + row) * width;
      int64_t step = dout_.stride[3];
      if (kernel_.rounds_dout) {
        for (int e = 0; e < width; ++e) rounded[e] = as_bfloat16(dout[e * step]);
        dout = rounded;
        step = 1;
      }
      delta[row] = dot(dout, step, out, width) - *dlse_.at<double>(head.b, head.h, first + row);
    }
    const QueryRows rows_in{rows_of(in_, in_.query, head.b, head.h, first),
                            dout_.at<T>(head.b, head.h, first),
                            dout_.stride[2],
                            dout_.stride[3],
                            lse_ + row_index(head, first),
                            delta};
    kernel_.pack(in_.shape, rows, rows_in, packed(head, block));
  }

  void attend(const Task& task, char* scratch) const {
    const Head& first = heads_[task.head];
    const int64_t begin = piece_start(first.set.count, first.key_pieces, task.key_piece, kKeyTile);
    const int64_t end = piece_start(first.set.count, first.key_pieces, task.key_piece + 1, kKeyTile);
    const int64_t first_block = piece_start(blocks_, first.query_pieces, task.query_piece, 1);
    const int64_t last_block = piece_start(blocks_, first.query_pieces, task.query_piece + 1, 1);
    auto* blocks = reinterpret_cast<QueryBlock*>(scratch + scratch_bytes_ - align(blocks_ * sizeof(QueryBlock)));
    const int64_t chunk = task.heads == 1 ? end - begin : chunk_keys(in_, task.heads);
    for (int64_t key = begin; key < end; key += chunk)
      for (size_t i = task.head; i < task.head + task.heads; ++i) {
        for (int64_t block = first_block; block < last_block; ++block) {
          const int rows = rows_of_block(block);
          blocks[block - first_block] = {rows, packed(heads_[i], block), state(heads_[i], task.key_piece, block)};
          if (key == begin && needs_.query) kernel_.clear(in_.shape, rows, blocks[block - first_block].state);
        }
        kernel_.attend(in_.shape, needs_, blocks, int(last_block - first_block),
                       keys_of(in_, first.set, heads_[i].h, key, std::min(chunk, end - key)),
                       key_gradient(heads_[i], task.query_piece, key), scratch);
      }
  }

  KeyGradient key_gradient(const Head& head, int64_t query_piece, int64_t key) const {
    const int64_t d = in_.shape.key_width, e = in_.shape.value_width;
    if (head.query_pieces > 1)
      return {needs_.key ? key_part(head, query_piece) + key * d : nullptr,
              needs_.value ? value_part(head, query_piece) + key * e : nullptr, kSums,
              needs_.bias ? bias_part(head, query_piece) + key : nullptr};
    const auto at = [&](void* gradient, int64_t width) -> void* {
      return gradient ? static_cast<char*>(gradient) + key_row(head, key) * width * element_bytes(in_.shape.dtype)
                      : nullptr;
    };
    T* const dbias = needs_.bias ? static_cast<T*>(gradients_.key_bias) + key_row(head, key) : nullptr;
    return {at(gradients_.key, d), at(gradients_.value, e), in_.shape.dtype, dbias};
  }

  // Writes dK, dV and the gradient of the bias of one tile of keys: the sum over the query pieces, in ascending order.
  void add_key_parts(const Head& head, int64_t key) const {
    const int64_t rows = std::min(kKeyTile, head.set.count - key);
    const auto add = [&](void* gradient, int64_t width, const T* parts, DType type) {
      const int64_t step = int64_t(part_bytes(head) / sizeof(T));
      for (int64_t i = key * width; gradient && i < (key + rows) * width; ++i) {
        T total = 0;
        for (int64_t piece = 0; piece < head.query_pieces; ++piece) total += parts[piece * step + i];
        narrow_to(type, total, gradient, key_row(head, 0) * width + i);
      }
    };
    add(gradients_.key, in_.shape.key_width, key_part(head, 0), in_.shape.dtype);
    add(gradients_.value, in_.shape.value_width, value_part(head, 0), in_.shape.dtype);
    add(gradients_.key_bias, 1, bias_part(head, 0), kSums);
  }

  // Writes dQ of one block: the sum over the key pieces, in ascending order.
  void add_query_parts(const Head& head, int64_t block, char* scratch) const {
    const int rows = rows_of_block(block), width = in_.shape.key_width;
    const Sum sum(in_.shape, kernel_.block, scratch);
    if (!head.key_pieces) std::fill_n(sum.total, rows * width, 0.0);
    for (int64_t piece = 0; piece < head.key_pieces; ++piece) {
      kernel_.read(in_.shape, rows, state(head, piece, block), piece ? sum.part : sum.total);
      if (piece)
        for (int i = 0; i < rows * width; ++i) sum.total[i] += sum.part[i];
    }
    const int64_t at = row_index(head, block * kernel_.block) * width;
    for (int i = 0; i < rows * width; ++i)
      narrow_to(in_.shape.dtype, T(in_.shape.scale * sum.total[i]), gradients_.query, at + i);
  }

  static constexpr int kMaxBlock = 256;
  static constexpr DType kSums = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

  const Inputs& in_;
  const BackwardKernel& kernel_;
  const Operand &dout_, &dlse_;
  const T* out_;
  const double* lse_;
  const Gradients& gradients_;
  const Needs needs_;
  const int threads_;
  const int64_t blocks_;
  size_t packed_bytes_, state_bytes_, scratch_bytes_;
  Workspace workspace_;
  std::vector<Head> heads_;
  std::vector<Task> tasks_;
  std::vector<Unit> blocks_to_do_, tiles_to_do_;
};

}  // namespace

void attention_backward(const Inputs& in, const Operand& dout, const Operand& dlse, const void* out, const double* lse,
                        const Gradients& gradients) {
  if (!in.batch || !in.heads) return;
  if (in.shape.dtype == DType::kFloat64)
    Backward<double>(in, dout, dlse, out, lse, gradients).run();
  else
    Backward<float>(in, dout, dlse, out, lse, gradients).run();
}

}  // namespace cmab::cpu
