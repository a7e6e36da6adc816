// The division of a matrix of results into register tiles. Internal linkage, as in simd.h.
#pragma once

#include "common/simd.h"

namespace cmab::cpu {
namespace {

// The largest number of vectors of a row in a register tile.
constexpr int kMaxColumns = CMAB_VECTOR_BYTES == 64 ? 4 : 2;

template <int n>
using Constant = std::integral_constant<int, n>;

// Divides `vectors` into panels of up to kMost vectors. The last two panels are balanced, because the speed of a panel
// of one vector is limited by loads.
template <int kMost = kMaxColumns, class Function>
CMAB_INLINE void for_each_panel(int vectors, Function function) {
  for (int first = 0; first < vectors;) {
    const int left = vectors - first;
    const int columns = left <= kMost ? left : left < 2 * kMost ? (left + 1) / 2 : kMost;
    if (columns == 1) function(first, Constant<1>());
    if constexpr (kMost >= 2)
      if (columns == 2) function(first, Constant<2>());
    if constexpr (kMost == 4) {
      if (columns == 3) function(first, Constant<3>());
      if (columns == 4) function(first, Constant<4>());
    }
    first += columns;
  }
}

// Divides the rows from `first` to `end` into tiles of R rows, then of R / 2, ..., of 1. Tiles of six rows are followed
// by tiles of four. If tiles of six would leave two rows, the last eight rows become two tiles
// of four.
template <int R, class Function>
CMAB_INLINE void for_each_tile(int first, int end, Function function) {
  const int left = R == 6 && (end - first) % 6 == 2 ? 8 : 0;
  for (; first + R <= end - left; first += R) function(first, Constant<R>());
  if constexpr (R > 1) for_each_tile<R == 6 ? 4 : R / 2>(first, end, function);
}

}  // namespace
}  // namespace cmab::cpu
