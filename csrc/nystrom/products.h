// Small matrices in padded rows, for the m x m part of Nyström attention: reading, transposing, multiplying. Internal
// linkage, as in simd.h.
#pragma once

#include "common/lanes.h"

namespace cmab::cpu {
namespace {

// Rows of a register tile: 8 of one vector, or kPairRows of two vectors, as many as the registers can hold.
constexpr int kTileRows = 8;
constexpr int kPairRows = CMAB_VECTOR_BYTES == 64 ? 8 : 4;

// Rows are padded to full tiles. Padding rows are computed, but they are never part of a result.
constexpr int64_t padded_rows(int64_t n) { return next_multiple(n, kTileRows); }

// Columns are padded to full vectors, and also to full tiles, because they are the rows of the transpose.
template <class T>
constexpr int64_t padded_columns(int64_t n) {
  return next_multiple(n, kVectorLanes<T> > kTileRows ? kVectorLanes<T> : kTileRows);
}

template <class T>
constexpr int64_t padded_size(int64_t rows, int64_t columns) {
  return padded_rows(rows) * padded_columns<T>(columns);
}

// The left factor of a product. It is read element by element with any strides, so it may be a transpose.
template <class T>
struct Left {
  const T* data;
  int64_t row, step;
};

template <int R, int C, class T, class Finish>
CMAB_INLINE void multiply_tile(const Left<T>& left, const T* right, int64_t right_row, int64_t steps, int64_t row,
                               int64_t column, const Finish& finish) {
  using V = Vector<T>;
  V sum[R][C] = {};
  multiply_add<V, R, C>(sum, left.data + row * left.row, left.row, left.step, right + column, right_row, steps);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) finish(row + r, column + c * lanes<V>(), sum[r][c]);
}

// Calls finish(row, column, sum) with every vector of the product. `rows` and `columns` are padded, `steps` is not.
template <class T, class Finish>
void multiply(const Left<T>& left, const T* right, int64_t right_row, int64_t rows, int64_t steps, int64_t columns,
              const Finish& finish) {
  constexpr int kLanes = kVectorLanes<T>;
  int64_t column = 0;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
    for (int64_t row = 0; row < rows; row += kPairRows)
      multiply_tile<kPairRows, 2>(left, right, right_row, steps, row, column, finish);
  if (column < columns)
    for (int64_t row = 0; row < rows; row += kTileRows)
      multiply_tile<kTileRows, 1>(left, right, right_row, steps, row, column, finish);
}

// Reads a row of elements `step` apart; zeros from `count` to `width`.
template <class T>
CMAB_INLINE void read_row(const T* from, int64_t step, int64_t count, int64_t width, T* to) {
  using V = Vector<T>;
  int64_t j = 0;
  if (step == 1)
    for (; j < count; j += lanes<V>()) store(to + j, load_first<V>(from + j, least(lanes<V>(), count - j)));
  else
    for (; j < count; ++j) to[j] = from[j * step];
  for (; j < width; ++j) to[j] = 0;
}

template <class T>
CMAB_INLINE void write_row(const T* from, int64_t count, T* to) {
  using V = Vector<T>;
  for (int64_t j = 0; j < count; j += lanes<V>()) store_first(to + j, load<V>(from + j), least(lanes<V>(), count - j));
}

// Reads a matrix into padded rows, zeros in the padding. `which` lists the rows to read; null means the first rows.
template <class T>
void read_matrix(const T* from, int64_t from_row, int64_t step, const int64_t* which, int64_t rows, int64_t columns,
                 T* to) {
  const int64_t width = padded_columns<T>(columns);
  for (int64_t i = 0; i < padded_rows(rows); ++i)
    read_row(from + (which && i < rows ? which[i] : i) * from_row, step, i < rows ? columns : 0, width, to + i * width);
}

// Transposes a padded matrix, one square of registers at a time.
template <class T>
void transpose_matrix(const T* from, int64_t rows, int64_t columns, T* to) {
  using V = Vector<T>;
  constexpr int kLanes = kVectorLanes<T>;
  const int64_t width = padded_columns<T>(columns), to_rows = padded_rows(columns), to_width = padded_columns<T>(rows);
  for (int64_t i = 0; i < to_width; i += kLanes)
    for (int64_t j = 0; j < to_rows; j += kLanes) {
      V square[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) square[r] = i + r < rows ? load<V>(from + (i + r) * width + j) : V{};
      transpose(square);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r)
        if (j + r < to_rows) store(to + (j + r) * to_width + i, square[r]);
    }
}

}  // namespace
}  // namespace cmab::cpu
