// The driver of K'WK and K'WV. The keys of a head are cut into pieces. Each piece is summed separately, run by run, and
// the pieces are added in ascending order. The cuts depend only on the keys of a set and the widths.
#include <omp.h>

#include "intention/plan.h"

namespace cmab::cpu {
namespace {

// The number of keys of a run. The keys of a run, their values and the prefetched next run stay in the L2 cache
// together.
int64_t run_keys(const GramShape& shape, bool in_double) {
  constexpr int64_t kBytes = 256 << 10;
  const int64_t row = (int64_t(shape.key_width) + shape.value_width) * (in_double ? 8 : 4);
  return std::clamp<int64_t>(kBytes / row / 64 * 64, 128, kMaxRunKeys);
}

// The number of pieces of the keys. Each piece but the first needs memory for its sums until they are added.
int64_t key_pieces(int64_t keys, int64_t sum_bytes) {
  constexpr int64_t kBytes = 4 << 20;
  return std::clamp<int64_t>(std::min(keys / 4096, std::max<int64_t>(kBytes / sum_bytes, 4)), 1, 32);
}

// Neighbouring heads of one batch element.
struct HeadGroup {
  int64_t b, h, heads;
};

class Gram {
 public:
  Gram(const GramInputs& in, double* gram, double* moment)
      : in_(in),
        in_double_(in.exact || in.shape.dtype == DType::kFloat64),
        kernel_(*gram_kernels(in_double_).sums),
        gram_(gram),
        moment_(moment),
        gram_size_(gram ? int64_t(in.shape.key_width) * in.shape.key_width : 0),
        moment_size_(moment ? int64_t(in.shape.key_width) * in.shape.value_width : 0),
        run_(run_keys(in.shape, in_double_)),
        longest_(in.offsets.longest(in.batch, in.keys)),
        pieces_(pieces_of(longest_)),
        most_(int(std::min(run_, longest_))),
        threads_(useful_threads(double(in.offsets.in_all(in.batch, in.keys)) * in.heads * sum_size(), in.threads,
                                kLittleGram)),
        together_(most_together()),
        groups_(in.batch * ceil_div(in.heads, together_)) {
    scratch_bytes_ = align(kernel_.scratch_bytes(in.shape, most_));
  }

  void run() {
    // A wave holds the pieces of a few heads. This is enough work for every thread, and limits the workspace.
    const int64_t wave = pieces_ == 1 ? groups_ : std::min(groups_, ceil_div(16 * threads_, pieces_));
    partial_ = threads_ * scratch_bytes_;
    prefer_huge_pages(gram_, in_.batch * in_.heads * gram_size_ * int64_t(sizeof(double)));
    prefer_huge_pages(moment_, in_.batch * in_.heads * moment_size_ * int64_t(sizeof(double)));
    workspace_.reserve(partial_ + wave * together_ * (pieces_ - 1) * sum_size() * sizeof(double));
#pragma omp parallel num_threads(threads_)
    for (int64_t first = 0; first < groups_; first += wave) {
      const int64_t count = std::min(wave, groups_ - first);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < count * pieces_; ++task) sum(first, task / pieces_, task % pieces_);
      if (pieces_ == 1) continue;
#pragma omp for schedule(dynamic)
      for (int64_t g = 0; g < count; ++g) add_pieces(first, g);
    }
  }

 private:
  int64_t sum_size() const { return gram_size_ + moment_size_; }
  int64_t pieces_of(int64_t keys) const { return key_pieces(keys, sum_size() * int64_t(sizeof(double))); }

  int64_t most_together() const {
    if (!interleaved(in_.key) && !interleaved(in_.value)) return 1;
    const int64_t row_bytes = std::max(in_.shape.key_width, in_.shape.value_width) * element_bytes(in_.shape.dtype);
    return heads_together(row_bytes, in_.heads, in_.batch * in_.heads * pieces_, threads_);
  }

  HeadGroup group(int64_t index) const {
    const int64_t per_batch = ceil_div(in_.heads, together_), h = index % per_batch * together_;
    return {index / per_batch, h, std::min(together_, in_.heads - h)};
  }

  double* gram_of(int64_t head) const { return gram_ ? gram_ + head * gram_size_ : nullptr; }
  double* moment_of(int64_t head) const { return moment_ ? moment_ + head * moment_size_ : nullptr; }

  // The memory of a piece's sums (piece >= 1) for head `slot` of this wave.
  double* partial(int64_t slot, int64_t piece) const {
    return reinterpret_cast<double*>(workspace_.at(partial_)) + (slot * (pieces_ - 1) + piece - 1) * sum_size();
  }

  void sum(int64_t first_group, int64_t g, int64_t piece) const {
    const HeadGroup heads = group(first_group + g);
    const RowSet set = in_.offsets.set(heads.b, in_.keys);
    const int64_t pieces = pieces_of(set.count);
    if (piece >= pieces) return;
    char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes_);
    const int64_t begin = piece_start(set.count, pieces, piece, run_);
    const int64_t end = piece_start(set.count, pieces, piece + 1, run_);
    const auto run = [&](int64_t i, int64_t key) {
      return keys_of(in_, set.batch, heads.h + i, set.first + key, std::min(run_, end - key));
    };
    int64_t key = begin, index = 0;
    GramKeys keys = run(0, key);
    do {
      for (int64_t i = 0; i < heads.heads; ++i, ++index) {
        const int64_t head = heads.b * in_.heads + heads.h + i;
        double* gram = gram_of(head);
        double* moment = moment_of(head);
        if (piece > 0) {
          double* sums = partial(g * together_ + i, piece);
          gram = gram_ ? sums : nullptr;
          moment = moment_ ? sums + gram_size_ : nullptr;
        }
        const bool last_head = i + 1 == heads.heads, more = !last_head || key + run_ < end;
        const GramKeys next = more ? run(last_head ? 0 : i + 1, last_head ? key + run_ : key) : keys;
        kernel_.add_run(in_.shape, {keys, more ? &next : nullptr, index, most_}, key == begin, gram, moment, scratch);
        keys = next;
        if (pieces == 1 && key + run_ >= end) mirror(gram);
      }
      key += run_;
    } while (key < end);
  }

  void add_pieces(int64_t first_group, int64_t g) const {
    const HeadGroup heads = group(first_group + g);
    const int64_t pieces = pieces_of(in_.offsets.set(heads.b, in_.keys).count);
    if (pieces == 1) return;
    for (int64_t i = 0; i < heads.heads; ++i) {
      const int64_t head = heads.b * in_.heads + heads.h + i;
      for (int64_t piece = 1; piece < pieces; ++piece) {
        const double* sums = partial(g * together_ + i, piece);
        add_upper(gram_of(head), sums);
        for (int64_t j = 0; j < moment_size_; ++j) moment_of(head)[j] += sums[gram_size_ + j];
      }
      mirror(gram_of(head));
    }
  }

  void add_upper(double* gram, const double* sums) const {
    if (!gram) return;
    const int64_t width = in_.shape.key_width;
    for (int64_t r = 0; r < width; ++r)
      for (int64_t c = r; c < width; ++c) gram[r * width + c] += sums[r * width + c];
  }

  // Copies the upper triangle to the lower one, in blocks that stay in the L1 cache.
  void mirror(double* gram) const {
    if (!gram) return;
    constexpr int64_t kBlock = 8;
    const int64_t width = in_.shape.key_width;
    for (int64_t row = 0; row < width; row += kBlock)
      for (int64_t column = 0; column <= row; column += kBlock)
        for (int64_t r = row; r < std::min(row + kBlock, width); ++r)
          for (int64_t c = column; c < std::min(column + kBlock, r); ++c) gram[r * width + c] = gram[c * width + r];
  }

  const GramInputs& in_;
  const bool in_double_;
  const GramKernel& kernel_;
  double *const gram_, *const moment_;
  const int64_t gram_size_, moment_size_;
  const int64_t run_, longest_, pieces_;  // pieces of the largest set; the workspace has room for as many of each set
  const int most_;                        // keys of a run
  const int threads_;
  const int64_t together_, groups_;
  size_t scratch_bytes_, partial_;
  Workspace workspace_;
};

// Adds (B, H, D, columns) to `to`, which is contiguous.
void add_before(const GramInputs& in, const Operand& before, int64_t columns, double* to) {
  const int64_t heads = in.batch * in.heads, width = in.shape.key_width, step = before.stride[3];
  const int team = useful_threads(double(heads) * width * columns, in.threads, kLittleGram);
#pragma omp parallel for num_threads(team) if (team > 1)
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t row = 0; row < width; ++row) {
      const double* from = before.at<const double>(head / in.heads, head % in.heads, row);
      double* sums = to + (head * width + row) * columns;
      if (step == 1)
        for (int64_t c = 0; c < columns; ++c) sums[c] += from[c];
      else
        for (int64_t c = 0; c < columns; ++c) sums[c] += from[c * step];
    }
}

void count_keys(const GramInputs& in, const Operand& before, int64_t* count) {
  for (int64_t b = 0; b < in.batch; ++b) {
    const RowSet set = in.offsets.set(b, in.keys);
    int64_t present = set.count;
    if (in.ignored)
      for (int64_t key = set.first; key < set.first + set.count; ++key)
        present -= in.ignored[set.batch * in.ignored_stride[0] + key * in.ignored_stride[1]] != 0;
    for (int64_t h = 0; h < in.heads; ++h, ++count)
      *count = present + (before.data ? *before.at<const int64_t>(b, h, 0) : 0);
  }
}

}  // namespace

void gram(const GramInputs& in, double* gram, double* moment) {
  if (in.shape.value_width == 0) moment = nullptr;
  if (in.batch && in.heads && (gram || moment)) Gram(in, gram, moment).run();
}

void ridge_update(const GramInputs& in, const RidgeSums& before, double* of_keys, double* moment, int64_t* count) {
  gram(in, of_keys, moment);
  if (before.gram.data) add_before(in, before.gram, in.shape.key_width, of_keys);
  if (before.moment.data) add_before(in, before.moment, in.shape.value_width, moment);
  count_keys(in, before.count, count);
}

}  // namespace cmab::cpu
