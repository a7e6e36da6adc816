// Solves many small systems at the same time, one per lane: a vector holds element (i, j) of each matrix. There are no
// cross-lane operations, so a bad matrix does not affect its neighbours.
#pragma once

#include "common/lanes.h"
#include "common/tile.h"
#include "solve/solve.h"

namespace cmab::cpu {
namespace {

template <class T>
class LanesSolve {
  using V = Vector<T>;
  static constexpr int kLanes = kVectorLanes<T>;
  // Rows and columns of a register tile.
  static constexpr int kRows = 4, kColumns = CMAB_VECTOR_BYTES == 64 ? 4 : 2;
  // The stride of rhs_. It is odd, like that of the matrix, so that rows are spread over the sets of the cache.
  static constexpr int64_t kRhsRow = kLanes + 1;
  using Lines = const T* [kLanes];

 public:
  LanesSolve(const Systems& systems, int64_t first, int count, void* memory)
      : systems_(systems), first_(first), count_(count), order_(systems.order), padded_(next_multiple(order_, kRows)) {
    Arena arena(memory);
    row_ = padded_ + 1;
    matrix_ = arena.take<V>(padded_ * row_);
    reciprocal_ = arena.take<V>(padded_);
    probe_ = arena.take<V>(padded_);
    rhs_ = arena.take<V>(systems.columns ? padded_ * kRhsRow : 0);
    bytes_ = arena.used();
  }

  size_t bytes() const { return bytes_; }

  void run() {
    read_matrix();
    const V norm = scale_and_norm();
    factor();
    const V condition = norm * inverse_norm();
    for (int64_t column = 0; column < systems_.columns; column += kLanes) {
      const int64_t columns = least(kLanes, systems_.columns - column);
      read_rhs(column, columns);
      for (int64_t c = 0; c < columns; c += kColumns) solve(rhs_ + c, columns - c);
      write_weight(column, columns);
    }
    for (int lane = 0; lane < count_; ++lane)
      systems_.info[first_ + lane] = verdict(failed_[lane] == 0, T(condition[lane]));
  }

 private:
  V& at(int64_t i, int64_t j) { return matrix_[i * row_ + j]; }

  // The matrix in a lane. Lanes past the last matrix read the last matrix again, and are not written.
  int64_t matrix_of(int lane) const { return first_ + least(lane, count_ - 1); }

  // Gathers elements [first, last) of a line of each matrix into vectors. The elements are `step` apart in the caller's
  // memory, and `to_step` apart here.
  static void read_line(const Lines& lines, int64_t offset, int64_t step, int64_t first, int64_t last, V* to,
                        int64_t to_step) {
    for (; step == 1 && first < last; first += kLanes) {
      const int64_t count = least(kLanes, last - first);
      V square[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) square[lane] = load_first<V>(lines[lane] + offset + first, count);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        if (i < count) to[(first + i) * to_step] = square[i];
    }
    for (; first < last; ++first) {
      T* elements = reinterpret_cast<T*>(to + first * to_step);
      for (int lane = 0; lane < kLanes; ++lane) elements[lane] = lines[lane][offset + first * step];
    }
  }

  void point_at(const Matrices& matrices, Lines& lines) const {
    for (int lane = 0; lane < kLanes; ++lane) lines[lane] = matrices.at<T>(matrix_of(lane));
  }

  // Reads the lower triangle along its contiguous dimension, adds alpha, and pads with the identity.
  void read_matrix() {
    Lines lines;
    point_at(systems_.gram, lines);
    const int64_t row = systems_.gram.stride[1], column = systems_.gram.stride[2];
    if (column == 1 || row != 1)
      for (int64_t i = 0; i < order_; ++i) read_line(lines, i * row, column, 0, i + 1, &at(i, 0), 1);
    else
      for (int64_t j = 0; j < order_; ++j) read_line(lines, j * column, row, j, order_, &at(0, j), row_);
    V alpha;
    for (int lane = 0; lane < kLanes; ++lane)
      alpha[lane] = allowed(static_cast<const T*>(systems_.alpha)[matrix_of(lane) * systems_.alpha_stride]);
    for (int64_t i = 0; i < order_; ++i) at(i, i) += alpha;
    for (int64_t i = order_; i < padded_; ++i) {
      for (int64_t j = 0; j < i; ++j) at(i, j) = V{};
      at(i, i) = broadcast<V>(T(1));
    }
  }

  // Sets root_ to the square root of the largest diagonal element; returns the 1-norm divided by root_^2, which keeps
  // the norm and the estimate in range.
  V scale_and_norm() {
    V largest{};
    for (int64_t i = 0; i < order_; ++i) largest = maximum(at(i, i), largest);
    root_ = square_root(largest);
    const V unit = T(1) / root_;
    V* sum = probe_;
    for (int64_t i = 0; i < order_; ++i) {
      V own{};
      for (int64_t j = 0; j < i; ++j) {
        const V size = magnitude(at(i, j));
        own += size * unit;
        sum[j] += size * unit;
      }
      sum[i] = own + magnitude(at(i, i)) * unit;
    }
    V norm{};
    for (int64_t i = 0; i < order_; ++i) norm = maximum(sum[i], norm);
    return norm * unit;
  }

  // Factors the matrix in place into L (Cholesky); reciprocal_ holds 1 / l_jj.
  void factor() {
    failed_ = V{};
    for (int64_t column = 0; column < padded_; column += kColumns) {
      const int64_t top = column / kRows * kRows;
      for (int64_t row = top; row < padded_; row += kRows) {
        V tile[kRows][kColumns];
        load_tile(tile, &at(row, column), row_);
        for (int64_t k = 0; k < column; ++k) eliminate(tile, &at(row, k), &at(column, k));
        if (row > top)
          finish(tile, column);
        else if (column == top)
          factor_top<0>(tile, reciprocal_ + column);
        else
          factor_top<kRows - kColumns>(tile, reciprocal_ + column);
        store_tile(&at(row, column), row_, tile);
      }
    }
  }

  // tile -= l_ik l_jk for one k and the rows i and columns j of a tile.
  CMAB_INLINE void eliminate(V (&tile)[kRows][kColumns], const V* l_row, const V* l_column) const {
    V factor[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) factor[c] = l_column[c * row_];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) tile[r][c] -= l_row[r * row_] * factor[c];
  }

  // Factors a tile on the diagonal, whose first diagonal element is in row kFirst, and stores the reciprocals of its
  // pivots.
  template <int kFirst>
  CMAB_INLINE void factor_top(V (&tile)[kRows][kColumns], V* reciprocal) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const V pivot = tile[kFirst + c][c];
      failed_ = ((pivot > T(0)) & (pivot < T(kInfinity))) ? failed_ : broadcast<V>(T(1));
      reciprocal[c] = T(1) / square_root(pivot);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) tile[r][c] *= reciprocal[c];
#pragma GCC unroll 4
      for (int other = c + 1; other < kColumns; ++other)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) tile[r][other] -= tile[r][c] * tile[kFirst + other][c];
    }
  }

  // Finishes a tile below the diagonal.
  CMAB_INLINE void finish(V (&tile)[kRows][kColumns], int64_t column) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        tile[r][c] *= reciprocal_[column + c];
#pragma GCC unroll 4
        for (int other = c + 1; other < kColumns; ++other)
          tile[r][other] -= tile[r][c] * at(column + other, column + c);
      }
  }

  // y = L^-1 y for kWidth columns, where the rows of y are `y_row` apart. With kGrow, y = L^-1 d. The elements of d
  // have size root_, and their signs are chosen to make every |y_i| as large as possible.
  template <int kWidth, bool kGrow = false>
  void forward(V* y, int64_t y_row) {
    for (int64_t row = 0; row < padded_; row += kRows) {
      V tile[kRows][kWidth];
      load_tile(tile, y + row * y_row, y_row);
      for (int64_t k = 0; k < row; ++k) subtract(tile, &at(row, k), row_, y + k * y_row);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kWidth; ++c) {
          if (kGrow) tile[r][c] += with_sign_of(tile[r][c], root_);
          tile[r][c] *= reciprocal_[row + r];
#pragma GCC unroll 4
          for (int other = r + 1; other < kRows; ++other) tile[other][c] -= at(row + other, row + r) * tile[r][c];
        }
      store_tile(y + row * y_row, y_row, tile);
    }
    // An infinity in the matrix has left NaNs in the padding.
    for (int64_t row = order_; row < padded_; ++row)
      for (int c = 0; c < kWidth; ++c) y[row * y_row + c] = V{};
  }

  // y = L'^-1 y for kWidth columns.
  template <int kWidth>
  void backward(V* y, int64_t y_row) {
    for (int64_t row = padded_ - kRows; row >= 0; row -= kRows) {
      V tile[kRows][kWidth];
      load_tile(tile, y + row * y_row, y_row);
      for (int64_t k = padded_ - 1; k >= row + kRows; --k) subtract(tile, &at(k, row), 1, y + k * y_row);
#pragma GCC unroll 4
      for (int r = kRows - 1; r >= 0; --r)
#pragma GCC unroll 4
        for (int c = 0; c < kWidth; ++c) {
          tile[r][c] *= reciprocal_[row + r];
#pragma GCC unroll 4
          for (int other = 0; other < r; ++other) tile[other][c] -= at(row + r, row + other) * tile[r][c];
        }
      store_tile(y + row * y_row, y_row, tile);
    }
  }

  template <int kWidth>
  CMAB_INLINE static void load_tile(V (&tile)[kRows][kWidth], const V* from, int64_t from_row) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kWidth; ++c) tile[r][c] = from[r * from_row + c];
  }

  template <int kWidth>
  CMAB_INLINE static void store_tile(V* to, int64_t to_row, const V (&tile)[kRows][kWidth]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kWidth; ++c) to[r * to_row + c] = tile[r][c];
  }

  // Subtracts factor[r * step] times the solved row `y` from each row r of a tile.
  template <int kWidth>
  CMAB_INLINE static void subtract(V (&tile)[kRows][kWidth], const V* factor, int64_t step, const V* y) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kWidth; ++c) tile[r][c] -= factor[r * step] * y[c];
  }

  template <int kWidth>
  void solve_width(V* y) {
    forward<kWidth>(y, kRhsRow);
    backward<kWidth>(y, kRhsRow);
  }

  void solve(V* y, int64_t columns) {
    if (columns >= kColumns) return solve_width<kColumns>(y);
    if (columns == 1) return solve_width<1>(y);
    if (columns == 2) return solve_width<2>(y);
    solve_width<3>(y);
  }

  // A lower bound of root_^2 times the inf-norm of the inverse, from two probes of signs: one chosen to make L^-1 d
  // grow, then the signs of its solution (Cline, Moler, Stewart and Wilkinson 1979; Hager 1984).
  V inverse_norm() {
    for (int64_t i = 0; i < padded_; ++i) probe_[i] = V{};
    forward<1, true>(probe_, 1);
    const V first = finish_probe();
    for (int64_t i = 0; i < order_; ++i) probe_[i] = with_sign_of(probe_[i], root_);
    forward<1>(probe_, 1);
    return maximum(finish_probe(), first);
  }

  // Completes the solve of a probe. Returns its largest magnitude, or infinity for a NaN.
  V finish_probe() {
    for (int64_t i = 0; i < order_; ++i) probe_[i] *= root_;
    backward<1>(probe_, 1);
    V largest{};
    for (int64_t i = 0; i < order_; ++i) largest = maximum(size_or_infinity(probe_[i]), largest);
    return largest;
  }

  // Reads `columns` right-hand sides along their contiguous dimension; a single column is one line.
  void read_rhs(int64_t column, int64_t columns) {
    Lines lines;
    point_at(systems_.rhs, lines);
    const int64_t row_step = systems_.rhs.stride[1], column_step = systems_.rhs.stride[2];
    const int64_t offset = column * column_step;
    if (columns > 1 && (column_step == 1 || row_step != 1))
      for (int64_t i = 0; i < order_; ++i)
        read_line(lines, offset + i * row_step, column_step, 0, columns, rhs_ + i * kRhsRow, 1);
    else
      for (int64_t c = 0; c < columns; ++c)
        read_line(lines, offset + c * column_step, row_step, 0, order_, rhs_ + c, kRhsRow);
    for (int64_t i = order_; i < padded_; ++i)
      for (int64_t c = 0; c < columns; ++c) rhs_[i * kRhsRow + c] = V{};
  }

  void write_weight(int64_t column, int64_t columns) const {
    if (systems_.columns == 1) return write_line(rhs_, kRhsRow, order_, 0);
    for (int64_t i = 0; i < order_; ++i) write_line(rhs_ + i * kRhsRow, 1, columns, i * systems_.columns + column);
  }

  // Scatters `count` elements of each matrix to contiguous memory, or NaN for a matrix that is not positive definite.
  void write_line(const V* from, int64_t step, int64_t count, int64_t offset) const {
    for (int64_t first = 0; first < count; first += kLanes) {
      const int64_t part = least(kLanes, count - first);
      V square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        square[i] = failed_ == T(0) ? from[least(first + i, count - 1) * step] : broadcast<V>(kNaN<T>);
      transpose(square);
      T* to = systems_.weight_at<T>(first_) + offset + first;
      for (int lane = 0; lane < count_; ++lane) store_first(to + lane * order_ * systems_.columns, square[lane], part);
    }
  }

  const Systems& systems_;
  const int64_t first_;
  const int count_;
  const int64_t order_, padded_;
  int64_t row_;  // the stride of rows of the matrix
  V *matrix_, *reciprocal_, *probe_, *rhs_;
  V root_, failed_;
  size_t bytes_;
};

}  // namespace
}  // namespace cmab::cpu
