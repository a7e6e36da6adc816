// Products of rows with packed matrices, and of the columns of two tiles. A matrix is packed in panels of a few vectors
// of columns, so that a register tile reads it sequentially. Internal linkage, as in simd.h.
#pragma once

#include "common/panels.h"
#include "linear/tiles.h"

namespace cmab::cpu {
namespace {

template <class T>
struct Products {
  using V = Vector<T>;
  static constexpr int kLanes = lanes<V>();

  static size_t packed_bytes(int depth, int width) { return size_t(depth) * Tiles<T>::padded(width) * sizeof(T); }

  static void pack(DType dtype, const Matrix& matrix, int depth, int width, void* packed) {
    T* to = static_cast<T*>(packed);
    with_elements<T>(dtype, matrix, [&](const auto* from) {
      for_each_panel(Tiles<T>::vectors(width), [&](int first, auto columns) {
        const int stride = columns * kLanes, column = first * kLanes;
        pack_panel(from + column * matrix.col_stride, matrix, depth, width - column < stride ? width - column : stride,
                   stride, to);
        to += ptrdiff_t(depth) * stride;
      });
    });
  }

  static void multiply(RowTile rows, int count, int depth, const void* packed, int width, const void* bias, bool add,
                       RowTile to) {
    for_each_panel(Tiles<T>::vectors(width), [&](int first, auto columns) {
      constexpr int C = decltype(columns)::value;
      const int column = first * kLanes;
      const T* matrix = static_cast<const T*>(packed) + ptrdiff_t(column) * depth;
      const T* addend = bias ? static_cast<const T*>(bias) + column : nullptr;
      for_each_step<C>(count, [&](int row, auto step) {
        multiply_tile<decltype(step)::value, C>(row_of<T>(rows, row), rows.stride, depth, matrix, addend, add,
                                                row_of<T>(to, row) + column, to.stride);
      });
    });
  }

  static void add_products(RowTile left, int left_width, RowTile right, int right_width, int count, RowTile sums) {
    for_each_panel(Tiles<T>::vectors(right_width), [&](int first, auto columns) {
      constexpr int C = decltype(columns)::value;
      for_each_step<C>(left_width, [&](int row, auto step) {
        add_columns<decltype(step)::value, C>(row_of<T>(sums, row) + first * kLanes, sums.stride,
                                              row_of<T>(left, 0) + row, left.stride,
                                              row_of<T>(right, 0) + first * kLanes, right.stride, count);
      });
    });
  }

 private:
  // Cuts rows into steps of kRowStep. If there is a single column of vectors, a step has twice as many rows, which
  // hides the latency of their additions.
  template <int C, class Function>
  static CMAB_INLINE void for_each_step(int rows, Function function) {
    int row = 0;
    if constexpr (C == 1)
      for (; row + kRowStep < rows; row += 2 * kRowStep) function(row, Constant<2 * kRowStep>());
    for (; row < rows; row += kRowStep) function(row, Constant<kRowStep>());
  }

  // Packs `width` columns into rows of `stride`; one copy serves panels of any stride.
  template <class From>
  static __attribute__((noinline)) void pack_panel(const From* from, const Matrix& matrix, int depth, int width,
                                                   int stride, T* to) {
    if constexpr (std::is_same_v<From, T>)
      if (matrix.row_stride == 1) return pack_squares(from, matrix.col_stride, depth, width, stride, to);
    if (width < stride)
      for (ptrdiff_t i = 0; i < ptrdiff_t(depth) * stride; ++i) to[i] = 0;
    for (int d = 0; d < depth; ++d)
      for (int c = 0; c < width; ++c) to[d * stride + c] = widen(from[d * matrix.row_stride + c * matrix.col_stride]);
  }

  // Packs a transposed matrix, whose columns are contiguous, in square blocks of registers.
  static void pack_squares(const T* from, ptrdiff_t col_stride, int depth, int width, int stride, T* to) {
    for (int c = 0; c < stride; c += kLanes)
      for (int d = 0; d < depth; d += kLanes) {
        const int count = depth - d < kLanes ? depth - d : kLanes;
        V square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          square[i] = c + i < width ? load_first<V>(from + (c + i) * col_stride + d, count) : V{};
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) __builtin_prefetch(from + (c + kLanes + i) * col_stride + d);
        transpose(square);
        for (int i = 0; i < count; ++i) store(to + (d + i) * stride + c, square[i]);
      }
  }

  template <int R, int C>
  static __attribute__((noinline)) void multiply_tile(const T* rows, ptrdiff_t stride, int depth, const T* matrix,
                                                      const T* bias, bool add, T* to, ptrdiff_t to_stride) {
    V sums[R][C] = {};
    multiply_add<V, R, C>(sums, rows, stride, 1, matrix, C * kLanes, depth);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const V addend = bias ? load<V>(bias + c * kLanes) : V{};
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        T* at = to + r * to_stride + c * kLanes;
        const V sum = sums[r][c] + addend;
        store(at, add ? load<V>(at) + sum : sum);
      }
    }
  }

  template <int R, int C>
  static __attribute__((noinline)) void add_columns(T* sums, ptrdiff_t stride, const T* left, ptrdiff_t left_stride,
                                                    const T* right, ptrdiff_t right_stride, int count) {
    accumulate<V, R, C>(sums, stride, left, 1, left_stride, right, right_stride, count);
  }
};

}  // namespace
}  // namespace cmab::cpu
