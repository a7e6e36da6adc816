// A tile of at most kKeyTile keys (or values) of one head in the compute type: read in place if possible, else copied
// without the absent rows and padded with zero rows. Internal linkage, as in simd.h.
#pragma once

#include "common/arena.h"
#include "common/operands.h"
#include "common/simd.h"

namespace cmab::cpu {
namespace {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// A copied tile is zero-padded to a multiple of this many keys; kernels take steps that divide it.
constexpr int kKeyStep = 16;

// Which keys of a tile are present.
struct Present {
  int count;
  bool all;               // a full tile without absent keys: rows need not be gathered
  uint8_t row[kKeyTile];  // indices of the present keys in the tile, ascending
};

inline Present present_keys(const Keys& keys, int64_t first) {
  Present present;
  const int64_t left = keys.count - first;
  const int rows = left < kKeyTile ? int(left) : int(kKeyTile);
  present.count = 0;
  for (int k = 0; k < rows; ++k) {
    present.row[present.count] = uint8_t(k);
    present.count += !keys.ignored || !keys.ignored[(first + k) * keys.ignored_stride];
  }
  present.all = present.count == kKeyTile;
  return present;
}

// Rows in the compute type T; the elements of a row are contiguous.
template <class T>
struct Tile {
  const T* rows;
  ptrdiff_t stride;
};

// Calls `function` with the address of the matrix's first element, as a pointer to its element type. T is the compute
// type.
template <class T, class Function>
CMAB_INLINE auto with_elements(DType dtype, const Matrix& matrix, Function function) {
  if constexpr (sizeof(T) == 8) {
    return function(static_cast<const double*>(matrix.data));
  } else {
    if (dtype == DType::kFloat32) return function(static_cast<const float*>(matrix.data));
    if (dtype == DType::kBFloat16) return function(static_cast<const BFloat16*>(matrix.data));
    return function(static_cast<const Float16*>(matrix.data));
  }
}

// Converts a row of elements `step` apart to the compute type; zeros from `width` to `padded`.
template <class From, class T>
CMAB_INLINE void copy_row(const From* from, int64_t step, int width, int padded, T* to) {
  if (step == 1)
    for (int d = 0; d < width; ++d) to[d] = widen(from[d]);
  else
    for (int d = 0; d < width; ++d) to[d] = widen(from[d * step]);
  for (int d = width; d < padded; ++d) to[d] = 0;
}

// The present rows of `matrix` from row `first` on. `copy` has room for kKeyTile rows of `padded` elements.
template <class T>
inline Tile<T> load_tile(DType dtype, const Matrix& matrix, int64_t first, const Present& present, int width,
                         int padded, T* copy) {
  return with_elements<T>(dtype, matrix, [&](const auto* data) -> Tile<T> {
    const auto* from = data + first * matrix.row_stride;
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (present.all && matrix.col_stride == 1 && width == padded) return {from, matrix.row_stride};
    for (int k = 0; k < present.count; ++k)
      copy_row(from + present.row[k] * matrix.row_stride, matrix.col_stride, width, padded, copy + k * padded);
    for (int i = present.count * padded; i < round_up(present.count, kKeyStep) * padded; ++i) copy[i] = 0;
    return {copy, padded};
  });
}

}  // namespace
}  // namespace cmab::cpu
