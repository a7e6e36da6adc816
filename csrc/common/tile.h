// A tile of at most kKeyTile keys (or values) of one head in the compute type. The tile is read in place if possible,
// and otherwise copied without the absent rows and padded with zero rows. Internal linkage, as in simd.h.
#pragma once

#include "common/arena.h"
#include "common/operands.h"
#include "common/simd.h"

namespace cmab::cpu {
namespace {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// A copied tile is zero-padded to a multiple of this many keys; kernels take steps that divide it.
constexpr int kKeyStep = 16;

// The keys of a tile that are present.
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

// Removes the keys whose bias is -inf; T is the type of the bias.
template <class T>
inline void leave_out_excluded(const Keys& keys, int64_t first, Present& present) {
  const T* bias = static_cast<const T*>(keys.bias) + first * keys.bias_stride;
  int kept = 0;
  for (int i = 0; i < present.count; ++i) {
    present.row[kept] = present.row[i];
    kept += bias[present.row[i] * keys.bias_stride] != T(-kInfinity);
  }
  present.count = kept;
  present.all = kept == kKeyTile;
}

// Writes the biases of the present keys, in base 2, to `copy`, and pads them with zeros like a
// tile.
template <class T>
inline const T* load_bias(const Keys& keys, int64_t first, const Present& present, T* copy) {
  const T* bias = static_cast<const T*>(keys.bias) + first * keys.bias_stride;
  for (int i = 0; i < present.count; ++i) copy[i] = T(bias[present.row[i] * keys.bias_stride] * kLog2E);
  for (int i = present.count; i < kKeyTile; ++i) copy[i] = 0;
  return copy;
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

// Converts a row to the compute type; its elements are `step` apart. Writes zeros from `width` to `padded`.
template <class From, class T>
CMAB_INLINE void copy_row(const From* from, int64_t step, int width, int padded, T* to) {
  if (step == 1)
    for (int d = 0; d < width; ++d) to[d] = widen(from[d]);
  else
    for (int d = 0; d < width; ++d) to[d] = widen(from[d * step]);
  for (int d = width; d < padded; ++d) to[d] = 0;
}

// Copies the `count` rows of `from` that have these indices, in parts of `kPart` bytes. Rows of interleaved heads are
// too far apart for the processor to prefetch, so this function prefetches rows before it copies them.
template <size_t kPart, class Index>
CMAB_INLINE void copy_parts(const char* from, ptrdiff_t stride, const Index* row, int count, size_t bytes, char* to) {
  constexpr int kAhead = 16, kLine = 64;
  for (int k = 0; k < count; ++k, to += bytes) {
    const char* at = from + row[k] * stride;
    for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(at + kAhead * stride + i);
    for (size_t i = 0; i < bytes; i += kPart) __builtin_memcpy(to + i, at + i, kPart);
  }
}

// Copies rows of any width; rows of whole cache lines are copied line by line.
template <class T, class Index>
inline void copy_rows(const T* from, int64_t stride, const Index* row, int count, int width, T* to) {
  const size_t bytes = width * sizeof(T);
  const auto copy = [&](auto part) {
    copy_parts<part>(reinterpret_cast<const char*>(from), stride * ptrdiff_t(sizeof(T)), row, count, bytes,
                     reinterpret_cast<char*>(to));
  };
  if (bytes % 64 == 0)
    copy(std::integral_constant<size_t, 64>());
  else if (bytes % 16 == 0)
    copy(std::integral_constant<size_t, 16>());
  else
    copy(std::integral_constant<size_t, sizeof(T)>());
}

// The present rows of `matrix` from row `first` on: in place if they are whole and at most `apart` elements apart, else
// in `copy`, which has room for kKeyTile rows of `padded` elements.
template <class T>
inline Tile<T> load_tile(DType dtype, const Matrix& matrix, int64_t first, const Present& present, int width,
                         int padded, int64_t apart, T* copy) {
  return with_elements<T>(dtype, matrix, [&](const auto* data) -> Tile<T> {
    const auto* from = data + first * matrix.row_stride;
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (present.all && matrix.col_stride == 1 && width == padded && matrix.row_stride <= apart)
        return {from, matrix.row_stride};
    bool copied = false;
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (matrix.col_stride == 1 && width == padded)
        copied = true, copy_rows(from, matrix.row_stride, present.row, present.count, width, copy);
    for (int k = 0; k < present.count && !copied; ++k)
      copy_row(from + present.row[k] * matrix.row_stride, matrix.col_stride, width, padded, copy + k * padded);
    for (int i = present.count * padded; i < round_up(present.count, kKeyStep) * padded; ++i) copy[i] = 0;
    return {copy, padded};
  });
}

}  // namespace
}  // namespace cmab::cpu
