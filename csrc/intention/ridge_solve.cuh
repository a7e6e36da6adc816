// The fused kernel of (K'WK + alpha I)^-1 K'WV on a GPU: its arguments and the code of a block.
#pragma once

#include "common/stream.h"
#include "intention/gram_block.cuh"
#include "solve/solve_block.cuh"

namespace cmab::cuda {

struct RidgeCall {
  DType dtype;
  int64_t batch, heads, keys;
  int64_t together;  // matrices per launch
  int key_width, value_width;
  Operand key, value;
  const void* weights;  // (B, H, N) of the sums' type, or null
  int64_t weights_stride[3];
  const uint8_t* absent;  // (B, N), nonzero where a key is absent, or null
  int64_t absent_stride[2];
  const double* alpha;  // (B, H)
  int64_t alpha_stride[2];
  // Contiguous; Needs gives the sizes of `workspace` and `tickets`, and the tickets are zero.
  double* weight;  // (B, H, D, E)
  double* gram;    // (B, H, D, D)
  int32_t* info;   // (B, H)
  double* workspace;
  unsigned* tickets;
};

// The memory and counters that a call needs in addition to its inputs and outputs. A launch takes as many matrices as
// have partial sums that fit in `most` doubles, but at least one.
struct Needs {
  int64_t together, workspace, tickets;  // matrices, doubles, counters
};

CMAB_HOST_DEVICE Needs needs(int64_t matrices, int64_t keys, int key_width, int value_width, int64_t most) {
  const Cut cut = make_cut(keys, key_width, value_width);
  const int64_t each = cut.workspace(), in_grid = INT32_MAX / (cut.leaves * cut.panels);
  const int64_t fit = each == 0 || most / each > in_grid ? in_grid : most / each;
  const int64_t together = fit < 1 ? 1 : fit < matrices ? fit : matrices;
  return {together, each * together, matrices * cut.tickets()};
}

// The bytes of shared memory of a block: the solve reuses the memory of the sums.
template <class T>
CMAB_HOST_DEVICE int ridge_shared_bytes(int key_width, int value_width) {
  const Cut cut = make_cut(0, key_width, value_width);
  return most(GramBlock<T>::shared_bytes(cut), SolveBlock<double>::shared_bytes(key_width, value_width));
}

// Block `index` of a launch sums a panel of a leaf of a matrix. The last block of a matrix adds these sums and solves.
template <class T>
class RidgeBlock {
 public:
  CMAB_DEVICE RidgeBlock(const Block& block, const RidgeCall& call, const Cut& cut, int64_t first_matrix, int index)
      : block_(block), call_(call), cut_(cut), first_matrix_(first_matrix) {
    panel_ = index % cut.panels;
    leaf_ = index / cut.panels % cut.leaves;
    slot_ = index / cut.panels / cut.leaves;
  }

  CMAB_DEVICE void run() {
    const Keys<T> own = keys();
    GramBlock<T> gram(block_, cut_, own, panel_);
    gram.sum();
    if (!add_leaves(gram)) return;
    write_sums(gram);
    unsigned* all_panels = tickets() + cut_.panels * (cut_.groups() + 1);
    if (cut_.panels > 1 && !block_.last_to_arrive(all_panels, cut_.panels)) return;
    solve();
  }

 private:
  CMAB_DEVICE int64_t matrix() const { return first_matrix_ + slot_; }

  CMAB_DEVICE Keys<T> keys() const {
    const int64_t b = matrix() / call_.heads, h = matrix() % call_.heads, first = leaf_ * cut_.leaf_keys;
    const int64_t left = call_.keys - first;
    const auto* weights = static_cast<const Sum<T>*>(call_.weights);
    const int64_t* step = call_.weights_stride;
    return {call_.key.rows<T>(b, h, first, call_.key_width),
            call_.value.rows<T>(b, h, first, call_.value_width),
            weights ? weights + b * step[0] + h * step[1] + first * step[2] : nullptr,
            step[2],
            call_.absent ? call_.absent + b * call_.absent_stride[0] + first * call_.absent_stride[1] : nullptr,
            call_.absent_stride[1],
            int(left < cut_.leaf_keys ? left : cut_.leaf_keys)};
  }

  CMAB_DEVICE unsigned* tickets() const { return call_.tickets + matrix() * cut_.tickets(); }

  // The memory for the panel's sums of one leaf. The sums of a group replace those of its first leaf.
  CMAB_DEVICE double* partial(int leaf) const {
    return call_.workspace + ((int64_t(slot_) * cut_.panels + panel_) * cut_.leaves + leaf) * cut_.panel_sums();
  }

  // Adds this block's leaf to its group and the group to the total. Returns true in the block that then has the sums of
  // all leaves.
  CMAB_DEVICE bool add_leaves(GramBlock<T>& gram) const {
    if (cut_.leaves == 1) return true;
    unsigned* of_panel = tickets() + panel_ * (cut_.groups() + 1);
    const int group = leaf_ / kFan, first = group * kFan;
    if (!add(gram, leaf_, first, 1, least(kFan, cut_.leaves - first), of_panel + 1 + group)) return false;
    return cut_.groups() == 1 || add(gram, first, 0, kFan, cut_.groups(), of_panel);
  }

  // Stores the block's sums at `own`. The last of `count` blocks that finishes adds the sums at first, first + step,
  // ..., and returns true.
  CMAB_DEVICE bool add(GramBlock<T>& gram, int own, int first, int step, int count, unsigned* ticket) const {
    each_sum([&](int thread, int s) { partial(own)[s * cut_.owners() + thread] = gram.total(thread, s); });
    if (!block_.last_to_arrive(ticket, count)) return false;
    each_sum([&](int thread, int s) {
      double parts[kFan], sum = 0;
      CMAB_UNROLL
      for (int i = 0; i < kFan; ++i)  // all loads in flight at once
        parts[i] = i < count ? partial(first + i * step)[s * cut_.owners() + thread] : 0;
      CMAB_UNROLL
      for (int i = 0; i < kFan; ++i) sum += parts[i];
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

  // Writes K'WK, which is made exactly symmetric from its lower triangle, and writes K'WV to the memory where the
  // solution X will replace it.
  CMAB_DEVICE void write_sums(GramBlock<T>& gram) const {
    const int D = call_.key_width, E = call_.value_width;
    double* square = call_.gram + matrix() * D * D;
    double* moment = call_.weight + matrix() * D * E;
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
    double* weight = call_.weight + matrix() * D * E;
    const int64_t b = matrix() / call_.heads, h = matrix() % call_.heads;
    const double alpha = call_.alpha[b * call_.alpha_stride[0] + h * call_.alpha_stride[1]];
    const System<double> system{D,     E,      call_.gram + matrix() * D * D, D, 1, weight, E, 1,
                                alpha, weight, call_.info + matrix()};
    SolveBlock<double>(block_, system).solve();
  }

  const Block& block_;
  const RidgeCall& call_;
  const Cut& cut_;
  int64_t first_matrix_;     // first matrix of the launch
  int panel_, leaf_, slot_;  // slot_: index of the matrix in the launch
};

// Launches the solve asynchronously; allocates nothing, like all launches.
void ridge_solve(const RidgeCall& call, Stream on);

}  // namespace cmab::cuda
