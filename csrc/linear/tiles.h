// Rows of features in the compute type: their layout, conversions and sums. Internal linkage, as in simd.h.
#pragma once

#include "common/lanes.h"
#include "common/tile.h"
#include "linear/linear.h"

namespace cmab::cpu {
namespace {

template <class T>
CMAB_INLINE T* row_of(RowTile tile, int64_t row) {
  return static_cast<T*>(tile.data) + row * tile.stride;
}

// Calls `function` with the pointer as a pointer to elements of `dtype`; T is the compute type.
template <class T, class Function>
CMAB_INLINE void with_pointer(DType dtype, void* data, Function function) {
  if constexpr (sizeof(T) == 8)
    function(static_cast<double*>(data));
  else if (dtype == DType::kFloat32)
    function(static_cast<float*>(data));
  else if (dtype == DType::kBFloat16)
    function(static_cast<BFloat16*>(data));
  else
    function(static_cast<Float16*>(data));
}

template <class T>
struct Tiles {
  using V = Vector<T>;

  static constexpr int vectors(int width) { return (width + lanes<V>() - 1) / lanes<V>(); }
  static constexpr int padded(int width) { return vectors(width) * lanes<V>(); }

  // An odd number of vectors, so that the columns of a tile are spread over the sets of the L1 cache.
  static int64_t stride(int width) { return (vectors(width) | 1) * lanes<V>(); }

  // Register tiles read up to kRowStep - 1 columns past the last column, even in the last row.
  static size_t bytes(int rows, int width) {
    return (next_multiple(rows, kRowStep) * stride(width) + kRowStep) * sizeof(T);
  }

  // Sets the rows that register tiles read past the last row to zero. Uninitialised memory may hold subnormal numbers,
  // and a product of such numbers takes a hundred cycles.
  static void clear_past(RowTile tile, int count, int width) {
    for (int row = count; row < next_multiple(count, kRowStep); ++row)
      for (int d = 0; d < padded(width); d += lanes<V>()) cpu::store(row_of<T>(tile, row) + d, V{});
  }

  static void load(DType dtype, const Matrix& matrix, int count, int width, const uint8_t* ignored,
                   int64_t ignored_stride, RowTile to) {
    with_elements<T>(dtype, matrix, [&](const auto* from) {
      for (int row = 0; row < count; ++row) {
        T* target = row_of<T>(to, row);
        if (ignored && ignored[row * ignored_stride])
          for (int d = 0; d < padded(width); ++d) target[d] = 0;
        else
          copy_row(from + row * matrix.row_stride, matrix.col_stride, width, padded(width), target);
      }
    });
    if (to.stride) clear_past(to, count, width);
  }

  static void load_heads(DType dtype, const void* data, int64_t row_stride, int64_t head_stride, int heads, int width,
                         int count, RowTile to) {
    with_elements<T>(dtype, Matrix{data, row_stride, 1}, [&](const auto* from) {
      for (int row = 0; row < count; ++row) {
        T* target = row_of<T>(to, row);
        for (int head = 0; head < heads; ++head)
          copy_row(from + row * row_stride + head * head_stride, 1, width, width, target + head * width);
        for (int d = heads * width; d < padded(heads * width); ++d) target[d] = 0;
      }
    });
  }

  static void store_heads(RowTile from, int count, int heads, int width, DType dtype, void* to, int64_t row_stride,
                          int64_t head_stride) {
    with_pointer<T>(dtype, to, [&](auto* target) {
      for (int head = 0; head < heads; ++head)
        for (int row = 0; row < count; ++row)
          for (int d = 0; d < width; ++d)
            narrow(row_of<T>(from, row)[head * width + d], target + row * row_stride + head * head_stride + d);
    });
  }

  static void store(RowTile from, int count, int width, DType dtype, void* to, int64_t row_stride) {
    with_pointer<T>(dtype, to, [&](auto* target) {
      for (int row = 0; row < count; ++row)
        for (int d = 0; d < width; ++d) narrow(row_of<T>(from, row)[d], target + row * row_stride + d);
    });
  }

  static void add_rows(RowTile rows, int count, int width, void* sums) {
    for (int d = 0; d < padded(width); d += lanes<V>()) {
      V sum{};
      for (int row = 0; row < count; ++row) sum += load_at(rows, row, d);
      T* to = static_cast<T*>(sums) + d;
      cpu::store(to, cpu::load<V>(to) + sum);
    }
  }

  static void add_tile(RowTile rows, int count, int width, RowTile to) {
    for (int row = 0; row < count; ++row)
      for (int d = 0; d < padded(width); d += lanes<V>())
        cpu::store(row_of<T>(to, row) + d, load_at(to, row, d) + load_at(rows, row, d));
  }

  static void sum_parts(const void* parts, size_t step, int pieces, int64_t count, DType dtype, void* to) {
    with_pointer<T>(dtype, to, [&](auto* target) {
      constexpr int kTogether = 64;
      for (int64_t first = 0; first < count; first += kTogether) {
        const int some = int(least(kTogether, count - first));
        T sums[kTogether] = {};
        for (int piece = 0; piece < pieces; ++piece) {
          const T* part = reinterpret_cast<const T*>(static_cast<const char*>(parts) + piece * step) + first;
          for (int i = 0; i < some; ++i) sums[i] += part[i];
        }
        for (int i = 0; i < some; ++i) narrow(sums[i], target + first + i);
      }
    });
  }

  static CMAB_INLINE V load_at(RowTile tile, int row, int column) {
    return cpu::load<V>(row_of<T>(tile, row) + column);
  }
};

}  // namespace
}  // namespace cmab::cpu
