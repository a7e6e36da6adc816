// The fused kernel of (K'WK + alpha I)^-1 K'WV, as its launcher and its blocks know it.
#pragma once

#include "gram_block.h"
#include "solve_block.h"

namespace cmab::cuda {

enum class DType : int { kFloat64 = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

// (B, H, N, width) in the caller's memory; strides in elements.
struct Operand {
  const void* data;
  int64_t stride[4];

  template <class T>
  CMAB_DEVICE Matrix<T> head(int64_t b, int64_t h, int width) const {
    return {static_cast<const T*>(data) + b * stride[0] + h * stride[1], stride[2], stride[3], width};
  }
};

struct RidgeCall {
  DType dtype;
  int64_t batch, heads, keys;
  int key_width, value_width;
  Operand key, value;
  const void* weights;  // (B, H, N) of the sums' type, or null
  int64_t weights_stride[3];
  const uint8_t* absent;  // (B, N), nonzero where a key is absent, or null
  int64_t absent_stride[2];
  // Contiguous. `workspace` has room for `together` matrices, `tickets` are zeros.
  const double* alpha;  // (B, H)
  double* weight;       // (B, H, D, E)
  double* gram;         // (B, H, D, D)
  int32_t* info;        // (B, H)
  double* workspace;
  unsigned* tickets;
};

// What a call needs beside its inputs and outputs. Matrices are gone through `together` at a time, a launch each, where
// the workspace would get too large otherwise; one launch has then more blocks than a GPU can hold.
struct Needs {
  int64_t together, workspace, tickets;  // matrices, doubles, counters
};

constexpr int64_t kMostWorkspace = int64_t(1) << 25;  // doubles, unless one matrix needs more: 256 MiB

CMAB_HOST_DEVICE Needs needs(int64_t matrices, int64_t keys, int key_width, int value_width) {
  const Cut cut = make_cut(keys, key_width, value_width);
  const int64_t each = cut.workspace();
  const int64_t fit = each == 0 ? matrices : kMostWorkspace / each > 1 ? kMostWorkspace / each : 1;
  const int64_t together = fit < matrices ? fit : matrices;
  return {together, together * each, matrices * cut.tickets()};
}

// Of a block; that of the sums is free again for the solve.
template <class T>
CMAB_HOST_DEVICE int ridge_shared_bytes(int key_width, int value_width) {
  const Cut cut = make_cut(0, key_width, value_width);
  return most(GramBlock<T>::shared_bytes(cut), SolveBlock<double>::shared_bytes(key_width, value_width));
}

// Of any kernel here.
inline int most_shared_bytes() {
  int bytes = 0;
  for (int width = 1; width <= kMaxWidth; ++width)
    for (int value_width = 0; value_width <= 2 * kMaxWidth; value_width += kPatch)
      bytes = most(bytes, ridge_shared_bytes<double>(width, value_width));
  return bytes;
}

// Block `index` of a launch: a panel of a leaf of a matrix. The last block of a matrix adds up, and solves.
template <class T>
class RidgeBlock {
 public:
  CMAB_DEVICE RidgeBlock(const Block& block, const RidgeCall& call, const Cut& cut, int64_t first_matrix, int64_t index)
      : block_(block), call_(call), cut_(cut) {
    panel_ = int(index % cut.panels);
    leaf_ = int(index / cut.panels % cut.leaves);
    slot_ = index / cut.panels / cut.leaves;
    matrix_ = first_matrix + slot_;
  }

  CMAB_DEVICE void run() {
    const Keys<T> own = keys();
    GramBlock<T> gram(block_, cut_, own, panel_);
    const int64_t first = leaf_ * cut_.leaf_keys, end = first + cut_.leaf_keys;
    gram.sum(first, end < call_.keys ? end : call_.keys);
    if (!add_leaves(gram)) return;
    write_sums(gram);
    unsigned* all_panels = tickets() + cut_.panels * (cut_.groups() + 1);
    if (cut_.panels > 1 && !block_.last_to_arrive(all_panels, cut_.panels)) return;
    solve();
  }

 private:
  CMAB_DEVICE Keys<T> keys() const {
    const int64_t b = matrix_ / call_.heads, h = matrix_ % call_.heads;
    const auto* weights = static_cast<const Sum<T>*>(call_.weights);
    return {call_.key.head<T>(b, h, call_.key_width),
            call_.value.head<T>(b, h, call_.value_width),
            weights ? weights + b * call_.weights_stride[0] + h * call_.weights_stride[1] : nullptr,
            call_.weights_stride[2],
            call_.absent ? call_.absent + b * call_.absent_stride[0] : nullptr,
            call_.absent_stride[1]};
  }

  CMAB_DEVICE unsigned* tickets() const { return call_.tickets + matrix_ * cut_.tickets(); }

  // The panel's sums of one leaf, or, in the place of its first leaf, of one group.
  CMAB_DEVICE double* partial(int leaf) const {
    return call_.workspace + ((slot_ * cut_.panels + panel_) * cut_.leaves + leaf) * cut_.panel_sums();
  }

  // Whether this block has the sums of all leaves now.
  CMAB_DEVICE bool add_leaves(GramBlock<T>& gram) const {
    if (cut_.leaves == 1) return true;
    unsigned* of_panel = tickets() + panel_ * (cut_.groups() + 1);
    const int group = leaf_ / kFan, first = group * kFan;
    if (!add(gram, leaf_, first, 1, least(kFan, cut_.leaves - first), of_panel + 1 + group)) return false;
    return cut_.groups() == 1 || add(gram, first, 0, kFan, cut_.groups(), of_panel);
  }

  // Leaves the block's sums at `own`; the last of `count` blocks to do so adds up those at first, first + step, ...
  CMAB_DEVICE bool add(GramBlock<T>& gram, int own, int first, int step, int count, unsigned* ticket) const {
    each_sum([&](int thread, int s) { partial(own)[s * cut_.owners() + thread] = gram.total(thread, s); });
    if (!block_.last_to_arrive(ticket, count)) return false;
    each_sum([&](int thread, int s) {
      double sum = 0;
      CMAB_NO_UNROLL
      for (int i = 0; i < count; ++i) sum += load_written(partial(first + i * step) + s * cut_.owners() + thread);
      gram.total(thread, s) = sum;
    });
    return true;
  }

  template <class Work>
  CMAB_DEVICE void each_sum(Work work) const {
    block_.each_thread([&](int thread) {
      if (thread >= cut_.owners()) return;
      CMAB_NO_UNROLL
      for (int s = 0; s < kThreadSums; ++s) work(thread, s);
    });
  }

  // To where they are wanted: K'WK from its lower triangle, exactly symmetric, and K'WV where X = A^-1 K'WV will be.
  CMAB_DEVICE void write_sums(GramBlock<T>& gram) const {
    const int D = call_.key_width, E = call_.value_width;
    double* square = call_.gram + matrix_ * D * D;
    double* moment = call_.weight + matrix_ * D * E;
    each_sum([&](int thread, int s) {
      const Place place(cut_, thread);
      const int i = place.row + s / kThreadColumns;
      const int j = panel_ * cut_.panel_columns() + place.column + s % kThreadColumns;
      if (i >= D) return;
      if (j <= i) square[i * D + j] = square[j * D + i] = gram.total(thread, s);
      if (j >= cut_.value_column && j < cut_.columns)
        moment[int64_t(i) * E + j - cut_.value_column] = gram.total(thread, s);
    });
  }

  CMAB_DEVICE void solve() const {
    const int D = call_.key_width, E = call_.value_width;
    double* weight = call_.weight + matrix_ * D * E;
    const System<double> system{
        D, E, call_.gram + matrix_ * D * D, D, 1, weight, E, 1, call_.alpha[matrix_], weight, call_.info + matrix_};
    SolveBlock<double>(block_, system).solve();
  }

  const Block& block_;
  const RidgeCall& call_;
  const Cut& cut_;
  int panel_, leaf_;
  int64_t slot_, matrix_;
};

}  // namespace cmab::cuda
