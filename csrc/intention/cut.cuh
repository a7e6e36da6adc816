// How the sums K'W[K|V] of one matrix are partitioned on a GPU: a function of the widths and the number of keys only,
// never of the batch or the GPU, so that neither changes the bits of the result.
//
// Columns. K and V are side by side: column c < D belongs to K, and column c >= value_column belongs to V. A panel of
// columns is a grid of patches of 32 x 32 sums, one for each warp. If there are fewer patches than warps, several warps
// share a patch, and each takes its split of the keys.
//
// Keys. A run of 512 keys is summed in float32 (float64 for float64 inputs). The sums of runs are added in float64 to a
// leaf. A block computes one panel of one leaf. Sixteen leaves are added to a group, and groups are added to the total,
// in ascending order.
#pragma once

#include "common/block.cuh"

namespace cmab::cuda {

constexpr int kMaxWidth = 128;  // D
constexpr int kPatch = 32;      // rows and columns of a warp's sums
constexpr int kSplitKeys = 16;  // keys of a tile that a split takes
constexpr int kRunKeys = 512;
constexpr int kFan = 16;  // leaves of a group, and the largest number of groups

struct Cut {
  int row_shift, column_shift;  // the grid of a panel: 2^row_shift x 2^column_shift patches
  int splits;                   // warps to a patch
  int value_column;             // D, rounded up to a multiple of 8
  int columns;                  // value_column + E
  int panels;
  int leaves;
  int64_t leaf_keys;

  CMAB_HOST_DEVICE int panel_columns() const { return kPatch << column_shift; }
  CMAB_HOST_DEVICE int panel_rows() const { return kPatch << row_shift; }
  CMAB_HOST_DEVICE int owners() const { return kThreads / splits; }  // threads that together hold the panel's totals
  CMAB_HOST_DEVICE int panel_sums() const { return panel_rows() * panel_columns(); }
  CMAB_HOST_DEVICE int tile_keys() const { return kSplitKeys * splits; }
  CMAB_HOST_DEVICE int groups() const { return int(ceil_div(leaves, kFan)); }
  // The number of arrival counters of a matrix: for each panel its groups and their total, and one for the panels.
  CMAB_HOST_DEVICE int tickets() const { return leaves == 1 && panels == 1 ? 0 : panels * (groups() + 1) + 1; }
  CMAB_HOST_DEVICE int64_t workspace() const { return leaves == 1 ? 0 : int64_t(panels) * leaves * panel_sums(); }
};

CMAB_HOST_DEVICE int shift_for(int patches, int largest) {
  int shift = 0;
  while ((1 << shift) < patches && shift < largest) ++shift;
  return shift;
}

CMAB_HOST_DEVICE Cut make_cut(int64_t keys, int key_width, int value_width) {
  Cut cut;
  cut.value_column = (key_width + 7) / 8 * 8;
  cut.columns = cut.value_column + value_width;
  cut.row_shift = shift_for(int(ceil_div(key_width, kPatch)), 2);
  cut.column_shift = shift_for(int(ceil_div(cut.columns, kPatch)), 3 - cut.row_shift);
  cut.splits = 8 >> (cut.row_shift + cut.column_shift);
  cut.panels = int(ceil_div(cut.columns, cut.panel_columns()));
  // There are enough leaves to fill a GPU with one matrix, and few enough that adding them is cheap.
  const int most_leaves = most(kFan, least(kFan * kFan, 2 * kFan * kFan / cut.panels));
  const int64_t runs = ceil_div(keys, kRunKeys);
  cut.leaf_keys = kRunKeys * most(2, ceil_div(runs, most_leaves));
  cut.leaves = most(1, ceil_div(keys, cut.leaf_keys));
  return cut;
}

}  // namespace cmab::cuda
