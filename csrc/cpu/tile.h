// A tile of at most kKeyTile keys (or values) of one head in the compute type: read where it lies if it can be, else
// copied with its absent rows left out and zeros after the last. Internal linkage, as in simd.h.
#pragma once

#include "../common/dtype.h"
#include "attention.h"
#include "simd.h"

namespace cmab::cpu {
namespace {

// Which keys of a tile are present.
struct Present {
  int count;
  bool all;               // every key of a full tile: rows need not be gathered
  uint8_t row[kKeyTile];  // of the present keys, in order
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

// Rows in the compute type T, the elements of a row next to each other.
template <class T>
struct Tile {
  const T* rows;
  ptrdiff_t stride;
};

template <class From, class T>
CMAB_INLINE void gather(const From* from, const Matrix& matrix, const Present& present, int width, T* to, int stride) {
  for (int k = 0; k < present.count; ++k) {
    const From* row = from + present.row[k] * matrix.row_stride;
    if (matrix.col_stride == 1)
      for (int d = 0; d < width; ++d) to[k * stride + d] = widen(row[d]);
    else
      for (int d = 0; d < width; ++d) to[k * stride + d] = widen(row[d * matrix.col_stride]);
    for (int d = width; d < stride; ++d) to[k * stride + d] = 0;
  }
  for (ptrdiff_t i = ptrdiff_t(present.count) * stride; i < ptrdiff_t(kKeyTile) * stride; ++i) to[i] = 0;
}

// The rows of `matrix` from row `first` on. `copy` has room for kKeyTile rows of `padded` elements, a multiple of 4.
template <class T>
inline Tile<T> load_tile(DType dtype, const Matrix& matrix, int64_t first, const Present& present, int width,
                         int padded, T* copy) {
  const int64_t offset = first * matrix.row_stride;
  if constexpr (sizeof(T) == 8) {
    const double* from = static_cast<const double*>(matrix.data) + offset;
    if (present.all && matrix.col_stride == 1 && width == padded) return {from, matrix.row_stride};
    gather(from, matrix, present, width, copy, padded);
  } else if (dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(matrix.data) + offset;
    if (present.all && matrix.col_stride == 1 && width == padded) return {from, matrix.row_stride};
    gather(from, matrix, present, width, copy, padded);
  } else if (dtype == DType::kBFloat16) {
    gather(static_cast<const BFloat16*>(matrix.data) + offset, matrix, present, width, copy, padded);
  } else {
    gather(static_cast<const Float16*>(matrix.data) + offset, matrix, present, width, copy, padded);
  }
  return {copy, padded};
}

// One element of a matrix of any type.
template <class T>
CMAB_INLINE T element(DType dtype, const Matrix& m, int64_t row, int64_t col) {
  const int64_t at = row * m.row_stride + col * m.col_stride;
  if constexpr (sizeof(T) == 8) return static_cast<const double*>(m.data)[at];
  if (dtype == DType::kFloat32) return static_cast<const float*>(m.data)[at];
  if (dtype == DType::kBFloat16) return widen(static_cast<const BFloat16*>(m.data)[at]);
  return widen(static_cast<const Float16*>(m.data)[at]);
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Cuts buffers, each aligned for every vector, from a block of memory; from null, it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(size_t elements) {
    char* taken = memory_ ? memory_ + used_ : nullptr;
    used_ += (elements * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(taken);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace cmab::cpu
