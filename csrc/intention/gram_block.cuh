// Computes one panel of one leaf of K'W[K|V] on a GPU, by one block.
//
// A tile of keys is staged through registers to shared memory: the next tile is loaded while the warps multiply. A
// thread accumulates 8 x 4 sums of its warp's patch.
#pragma once

#include "common/elements.cuh"
#include "intention/cut.cuh"

namespace cmab::cuda {

constexpr int kThreadRows = 8;
constexpr int kThreadColumns = 4;
constexpr int kThreadSums = kThreadRows * kThreadColumns;
constexpr int kRightQuads = 4;  // the largest number of quads of a tile that a thread stages
constexpr int kLeftQuads = 2;

// The keys of one leaf, counted from its first.
template <class T>
struct Keys {
  Matrix<T> key, value;
  const Sum<T>* weights;  // null: all are 1
  int64_t weight_stride;
  const uint8_t* absent;  // null: all keys are present; not even a NaN of an absent key may reach a sum
  int64_t absent_stride;
  int count;

  CMAB_DEVICE bool present(int key) const { return key < count && (!absent || !absent[key * absent_stride]); }
  CMAB_DEVICE Sum<T> weight(int key) const { return weights ? weights[key * weight_stride] : Sum<T>(1); }
};

// The sums that a thread holds: (row + i, column + j) of the panel, over its split of the keys.
struct Place {
  int split, row, column;

  CMAB_DEVICE Place(const Cut& cut, int thread) {
    const int patch = thread % cut.owners() / kWarp, lane = thread % kWarp;
    split = thread / cut.owners();
    row = (patch >> cut.column_shift) * kPatch + lane / 8 * kThreadRows;
    column = (patch & ((1 << cut.column_shift) - 1)) * kPatch + lane % 8 * kThreadColumns;
  }
};

template <class T>
class GramBlock {
  using S = Sum<T>;

 public:
  // Bytes of shared memory: the totals, then the tile and its weights. The left factor has its own memory only if there
  // are several panels.
  static CMAB_HOST_DEVICE int shared_bytes(const Cut& cut) {
    const int tile = cut.tile_keys() * (cut.panel_columns() + (cut.panels > 1 ? cut.panel_rows() : 0) + 1);
    return cut.panel_sums() * int(sizeof(double)) + tile * int(sizeof(S));
  }

  CMAB_DEVICE GramBlock(const Block& block, const Cut& cut, const Keys<T>& keys, int panel)
      : block_(block), cut_(cut), keys_(keys), first_column_(panel * cut.panel_columns()) {
    // The columns of K that are the left factor are part of the first panel, unless that panel is too narrow. With
    // several panels, or with a narrow one, no patch is split.
    one_side_ = panel == 0 && cut.row_shift <= cut.column_shift;
    total_ = reinterpret_cast<double*>(block.shared);
    right_ = reinterpret_cast<S*>(total_ + cut.panel_sums());
    left_ = one_side_ ? right_ : right_ + cut.tile_keys() * cut.panel_columns();
    left_stride_ = one_side_ ? cut.panel_columns() : cut.panel_rows();
    weight_ = left_ + cut.tile_keys() * left_stride_;
    key_in_quads_ = keys.key.in_quads();
    value_in_quads_ = keys.value.in_quads();
  }

  // A total of the panel in shared memory: total(thread, s) is sum (s / 4, s % 4) of the owner `thread`.
  CMAB_DEVICE double& total(int thread, int s) { return total_[s * cut_.owners() + thread]; }

  CMAB_DEVICE void sum() {
    block_.each_thread([&](int thread) {
      if (thread < cut_.owners())
        for (int s = 0; s < kThreadSums; ++s) total(thread, s) = 0;
      stage(thread, 0);
    });
    for (int run = 0; run < keys_.count; run += kRunKeys) {
      sum_run(run);
      if (sizeof(S) < sizeof(double) && block_.any_thread([&](int thread) { return overflowed(thread); }))
        repeat_run(run);
      else
        add_run();
    }
  }

  CMAB_DEVICE bool live(const Place& place) const { return live_patch(place.row / kPatch, place.column / kPatch); }

 private:
  // Whether a patch has sums to compute. A patch past the edges has no sums, and a patch above the diagonal of K'WK has
  // none either, because the lower triangle is enough.
  CMAB_DEVICE bool live_patch(int patch_row, int patch_column) const {
    const int row = patch_row * kPatch, column = first_column_ + patch_column * kPatch;
    const bool above = column > row + kPatch - 1 && column + kPatch <= cut_.value_column;
    return row < keys_.key.width && column < cut_.columns && !above;
  }

  // Loads a thread's share of the tile that starts at key `first` into registers.
  CMAB_DEVICE void stage(int thread, int first) {
    const int right = cut_.column_shift + 3, left = cut_.row_shift + 3;  // a row has 2^right quads
    CMAB_UNROLL
    for (int q = 0; q < kRightQuads; ++q) {
      const int at = thread + q * kThreads, column = first_column_ + 4 * (at & ((1 << right) - 1));
      if (at < cut_.tile_keys() << right) staged_right_[thread][q] = quad(first + (at >> right), column);
    }
    if (keys_.weights && thread < cut_.tile_keys()) {
      const int key = first + thread;
      staged_weight_[thread] = keys_.present(key) ? keys_.weights[key * keys_.weight_stride] : S(0);
    }
    if (one_side_) return;
    CMAB_UNROLL
    for (int q = 0; q < kLeftQuads; ++q) {
      const int at = thread + q * kThreads, column = 4 * (at & ((1 << left) - 1));
      if (at < cut_.tile_keys() << left) staged_left_[thread][q] = quad(first + (at >> left), column);
    }
  }

  CMAB_DEVICE Quad<T> quad(int key, int column) const {
    if (!keys_.present(key)) return Quad<T>{};
    if (column < cut_.value_column) return keys_.key.quad(key, column, key_in_quads_);
    return keys_.value.quad(key, column - cut_.value_column, value_in_quads_);
  }

  // Stores a thread's staged share of the tile to shared memory.
  CMAB_DEVICE void unstage(int thread) {
    CMAB_UNROLL
    for (int q = 0; q < kRightQuads; ++q) {
      const int at = thread + q * kThreads;
      if (at < cut_.tile_keys() << (cut_.column_shift + 3)) put(right_ + 4 * at, staged_right_[thread][q]);
    }
    if (keys_.weights && thread < cut_.tile_keys()) weight_[thread] = staged_weight_[thread];
    if (one_side_) return;
    CMAB_UNROLL
    for (int q = 0; q < kLeftQuads; ++q) {
      const int at = thread + q * kThreads;
      if (at < cut_.tile_keys() << (cut_.row_shift + 3)) put(left_ + 4 * at, staged_left_[thread][q]);
    }
  }

  static CMAB_DEVICE void put(S* to, const Quad<T>& quad) {
    Quad<S> wide;
    CMAB_UNROLL
    for (int j = 0; j < 4; ++j) wide.x[j] = as_sum(quad.x[j]);
    *reinterpret_cast<Quad<S>*>(to) = wide;
  }

  // Computes the sums of each thread over a run whose first tile is staged. At the end, the tile after the run is
  // staged.
  CMAB_DEVICE void sum_run(int run) {
    const int end = least(run + kRunKeys, keys_.count);
    for (int tile = run; tile < end; tile += cut_.tile_keys()) {
      block_.each_thread([&](int thread) {
        CMAB_UNROLL
        for (int s = 0; s < kThreadSums; ++s) sums_[thread][s] = tile == run ? 0 : sums_[thread][s];
        unstage(thread);
      });
      block_.each_thread([&](int thread) {
        stage(thread, tile + cut_.tile_keys());
        const Place place(cut_, thread);
        if (!live(place)) return;
        if (keys_.weights)
          multiply<true>(place, sums_[thread]);
        else
          multiply<false>(place, sums_[thread]);
      });
    }
  }

  template <bool kWeighted>
  CMAB_DEVICE void multiply(const Place& place, S* sums) const {
    const int first = place.split * kSplitKeys;
    const S* left = left_ + first * left_stride_ + place.row;
    const S* right = right_ + first * cut_.panel_columns() + place.column;
    CMAB_UNROLL_BY_2
    for (int k = 0; k < kSplitKeys; ++k) {
      Quad<S> upper = get(left + k * left_stride_), lower = get(left + k * left_stride_ + 4);
      const Quad<S> b = get(right + k * cut_.panel_columns());
      if (kWeighted) {
        const S weight = weight_[first + k];
        CMAB_UNROLL
        for (int i = 0; i < 4; ++i) upper.x[i] *= weight, lower.x[i] *= weight;
      }
      CMAB_UNROLL
      for (int s = 0; s < kThreadSums; ++s) {
        const int i = s / 4, j = s % 4;
        sums[s] = std::fma(i < 4 ? upper.x[i] : lower.x[i - 4], b.x[j], sums[s]);
      }
    }
  }

  static CMAB_DEVICE const Quad<S>& get(const S* from) { return *reinterpret_cast<const Quad<S>*>(from); }

  CMAB_DEVICE bool overflowed(int thread) {
    const Place place(cut_, thread);
    bool finite = true;
    CMAB_UNROLL
    for (int s = 0; s < kThreadSums; ++s)
      finite &= place.row + s / 4 >= keys_.key.width || std::isfinite(sums_[thread][s]);
    return live(place) && !finite;
  }

  // Adds the threads' sums of a run to the totals, split by split.
  CMAB_DEVICE void add_run() {
    for (int split = 0; split < cut_.splits; ++split)
      block_.each_thread([&](int thread) {
        const Place place(cut_, thread);
        if (place.split != split || !live(place)) return;
        CMAB_UNROLL
        for (int s = 0; s < kThreadSums; ++s) total(thread % cut_.owners(), s) += double(sums_[thread][s]);
      });
  }

  // Recomputes a run that overflowed, in float64. This is rare, so it need not be fast.
  CMAB_DEVICE void repeat_run(int run) {
    block_.each_thread([&](int thread) {
      const Place place(cut_, thread);
      if (place.split != 0 || !live(place)) return;
      CMAB_NO_UNROLL
      for (int s = 0; s < kThreadSums; ++s) total(thread, s) += wide_sum(place, s, run);
    });
  }

  CMAB_DEVICE double wide_sum(const Place& place, int s, int run) const {
    const int row = place.row + s / kThreadColumns, column = first_column_ + place.column + s % kThreadColumns;
    const int of_value = column - cut_.value_column;
    double sum = 0;
    if (row >= keys_.key.width || (of_value < 0 ? column >= keys_.key.width : of_value >= keys_.value.width))
      return sum;
    const int end = least(run + kRunKeys, keys_.count);
    for (int key = run; key < end; ++key) {
      if (!keys_.present(key)) continue;
      const double other = of_value < 0 ? keys_.key.wide(key, column) : keys_.value.wide(key, of_value);
      sum = std::fma(double(keys_.weight(key)) * keys_.key.wide(key, row), other, sum);
    }
    return sum;
  }

  const Block& block_;
  const Cut& cut_;
  const Keys<T>& keys_;
  int first_column_;
  double* total_;
  S *left_, *right_, *weight_;
  int left_stride_;
  bool one_side_, key_in_quads_, value_in_quads_;
  PerThread<Quad<T>[kRightQuads]> staged_right_;
  PerThread<Quad<T>[kLeftQuads]> staged_left_;
  PerThread<S> staged_weight_;
  PerThread<S[kThreadSums]> sums_;
};

}  // namespace cmab::cuda
