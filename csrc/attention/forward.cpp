// The forward driver: packs the queries, attends to each piece of the keys, merges the pieces.
#include <omp.h>

#include "attention/merge.h"
#include "attention/plan.h"
#include "common/instruction_sets.h"

namespace cmab::cpu {
namespace {

constexpr int64_t kGroupRows = 1024;  // the largest number of queries of a group

// The number of pieces of the keys. Each piece keeps its own partial states until they are merged, so for many queries
// there are fewer pieces.
int64_t key_pieces(int64_t keys, int64_t queries) {
  return keys == 0 ? 0 : std::clamp<int64_t>(std::min(keys / 2048, 2048 / queries), 1, 16);
}

// A group: some query rows of one head, against all keys of its set.
struct Group {
  int64_t b, h, first_row, rows;
  KeySet set;
  int64_t pieces;
  size_t packed, states;  // byte offsets of the blocks in the workspace
};

// A unit of work of one thread: blocks of queries of some neighbouring heads against one piece of the keys.
struct Task {
  size_t group, heads;
  int64_t piece, first_block, blocks;
};

class Forward {
 public:
  Forward(const Inputs& in, const Operand& state_out, const Operand& state_lse, void* out, double* lse, bool* reliable)
      : in_(in),
        kernel_(forward_kernel(in.shape.dtype)),
        merger_(kernel_, in.shape, in.heads, in.queries, state_out, state_lse, out, lse, reliable),
        threads_(useful_threads(in)) {
    const int rows = int(std::min<int64_t>(kernel_.block, in.queries));
    packed_bytes_ = align(kernel_.packed_bytes(in.shape, rows));
    state_bytes_ = align(kernel_.state_bytes(in.shape, rows));
    scratch_bytes_ = align(std::max(kernel_.scratch_bytes(in.shape), merger_.scratch_bytes()));
    bytes_ = threads_ * scratch_bytes_;
  }

  // Does part `share` of `shares` of the blocks of all heads. Blocks that follow each other form a group. Heads vary
  // faster than blocks, so that heads that share cache lines are neighbours.
  void run(int64_t share, int64_t shares) {
    const int64_t blocks = ceil_div(in_.queries, kernel_.block), of_group = kGroupRows / kernel_.block;
    const int64_t units = in_.batch * blocks * in_.heads, end = units * (share + 1) / shares;
    for (int64_t unit = units * share / shares; unit < end;) {
      const int64_t h = unit % in_.heads, block = unit / in_.heads % blocks, b = unit / in_.heads / blocks;
      const int64_t most = std::min(blocks - block, of_group - block % of_group);
      const int64_t whole = h ? 0 : std::min((end - unit) / in_.heads, most);  // blocks of all heads
      const int64_t heads = whole ? in_.heads : std::min(in_.heads - h, end - unit), count = whole ? whole : 1;
      for (int64_t i = 0; i < heads; ++i) add_group(b, h + i, block * kernel_.block, count * kernel_.block);
      unit += heads * count;
    }
    run_wave();
  }

 private:
  void add_group(int64_t b, int64_t h, int64_t first_row, int64_t rows) {
    if (bytes_ >= kWaveBytes || groups_.size() >= kWaveHeads) run_wave();
    const KeySet set = key_set(in_, b);
    Group group{b, h, first_row, std::min(rows, in_.queries - first_row), set, 0, bytes_, 0};
    group.pieces = key_pieces(set.count, in_.queries);
    group.states = group.packed + blocks_of(group) * packed_bytes_;
    groups_.push_back(group);
    bytes_ = group.states + group.pieces * blocks_of(group) * state_bytes_;
  }

  void deal_tasks() {
    tasks_.clear();
    int64_t units = 0;
    for (const Group& group : groups_) units += group.pieces * blocks_of(group);
    const int64_t blocks = std::max<int64_t>(units / (4 * threads_), 1);
    for (size_t g = 0; g < groups_.size();) {
      const Group& group = groups_[g];
      size_t heads = 1;
      const size_t most = heads_together(in_, group.pieces);
      while (heads < most && g + heads < groups_.size() && groups_[g + heads].b == group.b &&
             groups_[g + heads].first_row == group.first_row)
        ++heads;
      for (int64_t piece = 0; piece < group.pieces; ++piece)
        for (int64_t block = 0; block < blocks_of(group); block += blocks)
          tasks_.push_back({g, heads, piece, block, std::min(blocks, blocks_of(group) - block)});
      g += heads;
    }
    all_blocks_.clear();
    for (size_t g = 0; g < groups_.size(); ++g)
      for (int64_t block = 0; block < blocks_of(groups_[g]); ++block) all_blocks_.push_back({g, 1, 0, block, 1});
  }

  void run_wave() {
    workspace_.reserve(bytes_);
    deal_tasks();
    if (std::all_of(groups_.begin(), groups_.end(), [](const Group& group) { return group.pieces == 1; }))
      run_apart();
    else
      run_merged();
    groups_.clear();
    bytes_ = threads_ * scratch_bytes_;
  }

  void run_merged() {
#pragma omp parallel num_threads(threads_)
    {
      const FlushToZero flush;
      char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes_);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < all_blocks_.size(); ++i) pack(groups_[all_blocks_[i].group], all_blocks_[i].first_block);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < tasks_.size(); ++i) attend(tasks_[i], scratch);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < all_blocks_.size(); ++i)
        finish(groups_[all_blocks_[i].group], all_blocks_[i].first_block, scratch);
    }
  }

  // With one piece of the keys, nothing is merged across tasks, so no thread waits for another before the end.
  void run_apart() {
#pragma omp parallel for schedule(dynamic) num_threads(threads_)
    for (size_t i = 0; i < tasks_.size(); ++i) {
      const FlushToZero flush;
      char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes_);
      const Task& task = tasks_[i];
      const auto each_block = [&](auto function) {
        for (size_t g = task.group; g < task.group + task.heads; ++g)
          for (int64_t block = task.first_block; block < task.first_block + task.blocks; ++block)
            function(groups_[g], block);
      };
      each_block([&](const Group& group, int64_t block) { pack(group, block); });
      attend(task, scratch);
      each_block([&](const Group& group, int64_t block) { finish(group, block, scratch); });
    }
  }

  int64_t blocks_of(const Group& group) const { return ceil_div(group.rows, kernel_.block); }
  int rows_of_block(const Group& group, int64_t block) const {
    return int(std::min<int64_t>(kernel_.block, group.rows - block * kernel_.block));
  }
  char* packed(const Group& group, int64_t block) const { return workspace_.at(group.packed + block * packed_bytes_); }
  char* state(const Group& group, int64_t piece, int64_t block) const {
    return workspace_.at(group.states + (piece * blocks_of(group) + block) * state_bytes_);
  }

  void pack(const Group& group, int64_t block) const {
    const Matrix query = rows_of(in_, in_.query, group.b, group.h, group.first_row + block * kernel_.block);
    kernel_.pack(in_.shape, rows_of_block(group, block), query, packed(group, block));
  }

  void attend(const Task& task, char* scratch) const {
    const Group& first = groups_[task.group];
    const int64_t begin = piece_start(first.set.count, first.pieces, task.piece, kKeyTile);
    const int64_t end = piece_start(first.set.count, first.pieces, task.piece + 1, kKeyTile);
    const int64_t chunk = task.heads == 1 ? end - begin : chunk_keys(in_, task.heads);
    std::vector<QueryBlock> blocks(task.blocks);
    for (int64_t key = begin; key < end; key += chunk)
      for (size_t g = task.group; g < task.group + task.heads; ++g) {
        for (int64_t i = 0; i < task.blocks; ++i) {
          const int64_t block = task.first_block + i;
          blocks[i] = {rows_of_block(first, block), packed(groups_[g], block), state(groups_[g], task.piece, block)};
          if (key == begin) kernel_.clear(in_.shape, blocks[i].rows, blocks[i].state);
        }
        kernel_.attend(in_.shape, blocks.data(), int(task.blocks),
                       keys_of(in_, first.set, groups_[g].h, key, std::min(chunk, end - key)), scratch);
      }
  }

  void finish(const Group& group, int64_t block, char* scratch) const {
    merger_.finish(
        group.b, group.h, group.first_row + block * kernel_.block, rows_of_block(group, block), group.pieces,
        [&](int64_t piece) { return state(group, piece, block); }, scratch);
  }

  const Inputs& in_;
  const ForwardKernel& kernel_;
  const Merger merger_;
  const int threads_;
  size_t packed_bytes_, state_bytes_, scratch_bytes_;
  Workspace workspace_;
  std::vector<Group> groups_;  // of the current wave
  size_t bytes_;               // of the part of the workspace that the current wave uses
  std::vector<Task> tasks_, all_blocks_;
};

template <class T>
void merge_rows(int64_t rows, int width, const StateRows& first, const StateRows& second, void* out, double* lse) {
  const T *a = static_cast<const T*>(first.out), *b = static_cast<const T*>(second.out);
  T* to = static_cast<T*>(out);
  const FlushToZero flush;
  for (int64_t row = 0; row < rows; ++row, a += width, b += width, to += width) {
    const double one = first.lse[row], two = second.lse[row];
    if (one == -INFINITY || two == -INFINITY) {  // an empty row adds nothing, whatever it contains
      const double left = one == -INFINITY ? two : one;
      const T* from = one == -INFINITY ? b : a;
      lse[row] = is_refused(left) ? NAN : left;
      for (int e = 0; e < width; ++e) to[e] = left == -INFINITY ? T(0) : is_refused(left) ? T(NAN) : from[e];
      continue;
    }
    const double top = std::max(one, two);
    const auto weight = [&](double part) { return part == top && !is_refused(part) ? 1 : std::exp(part - top); };
    const double left = weight(one), right = weight(two);
    const double sum = left + right;
    lse[row] = top + std::log(sum);
    const double share = left / sum, other = right / sum;
    for (int e = 0; e < width; ++e) to[e] = T(share * a[e] + other * b[e]);
  }
}

}  // namespace

void attention_forward(const Inputs& in, const Operand& state_out, const Operand& state_lse, void* out, double* lse,
                       bool* reliable) {
  if (in.batch && in.heads && in.queries) Forward(in, state_out, state_lse, out, lse, reliable).run(0, 1);
}

void attention_forward_share(const Inputs& in, int64_t share, int64_t shares, void* out, double* lse) {
  Inputs alone = in;
  alone.threads = 1;
  if (in.batch && in.heads && in.queries) Forward(alone, {}, {}, out, lse, nullptr).run(share, shares);
}

void merge_states(DType dtype, int64_t rows, int width, const StateRows& first, const StateRows& second, void* out,
                  double* lse) {
  if (dtype == DType::kFloat64)
    merge_rows<double>(rows, width, first, second, out, lse);
  else
    merge_rows<float>(rows, width, first, second, out, lse);
}

}  // namespace cmab::cpu
