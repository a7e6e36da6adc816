// Solves one system at a time, with the matrix rows, or the right-hand sides, in the lanes.
//
// The matrix is kept in a square array. Line j holds column j of the lower triangle from the diagonal on, so a range of
// rows i is contiguous. After the factorisation, the rest of line i is filled with row i of L, so that the substitution
// with L' reads contiguous elements too.
#pragma once

#include "common/lanes.h"
#include "common/tile.h"
#include "solve/solve.h"

namespace cmab::cpu {
namespace {

template <class T>
class RowsSolve {
  using V = Vector<T>;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr bool kManyRegisters = CMAB_VECTOR_BYTES == 64;
  static constexpr int kColumns = 4;                          // columns of a factorisation tile
  static constexpr int kRowVectors = kManyRegisters ? 4 : 2;  // the largest number of vectors of its rows
  static constexpr int kSolveRows = kManyRegisters ? 8 : 4;   // rows of a substitution tile
  static constexpr int kStripVectors = 2;                     // the largest number of vectors of its right-hand sides
  static constexpr int64_t kStrip = kStripVectors * kLanes;
  static constexpr int64_t kPanel = 64;  // the number of columns that are eliminated from the rest at a time

 public:
  RowsSolve(const Systems& systems, int64_t matrix, void* memory)
      : systems_(systems),
        number_(matrix),
        order_(systems.order),
        columns_(next_multiple(order_, kSolveRows)),
        lines_(next_multiple(order_, kLanes > kSolveRows ? kLanes : kSolveRows)),
        vectors_(lines_ / kLanes) {
    Arena arena(memory);
    line_ = (vectors_ | 1) * kLanes;  // with an odd number of vectors, lines are spread over the cache's sets
    matrix_ = arena.take<T>(lines_ * line_);
    reciprocal_ = arena.take<T>(lines_);
    residual_ = arena.take<T>(lines_);
    probe_ = arena.take<T>(lines_);
    strip_ = arena.take<T>(columns_ * (systems.columns > kLanes ? kStrip : kLanes));
    bytes_ = arena.used();
  }

  size_t bytes() const { return bytes_; }

  void run() {
    read_matrix();
    const T norm = scale_and_norm();
    const bool positive_definite = factor();
    T condition = 0;
    if (positive_definite) {
      mirror<true>();
      condition = norm * inverse_norm();
      solve();
    } else {
      T* weight = systems_.weight_at<T>(number_);
      for (int64_t i = 0; i < order_ * systems_.columns; ++i) weight[i] = kNaN<T>;
    }
    systems_.info[number_] = verdict(positive_definite, condition);
  }

 private:
  T* line(int64_t j) const { return matrix_ + j * line_; }

  // Reads the lower triangle into both triangles, adds alpha, and pads with the identity.
  void read_matrix() {
    const T* from = systems_.gram.at<T>(number_);
    const int64_t row = systems_.gram.stride[1], column = systems_.gram.stride[2];
    if (row == 1)
      for (int64_t j = 0; j < order_; ++j) copy(from + j * column + j, 1, order_ - j, line(j) + j);
    else
      for (int64_t i = 0; i < order_; ++i) copy(from + i * row, column, i + 1, line(i));
    const T alpha = allowed(static_cast<const T*>(systems_.alpha)[number_ * systems_.alpha_stride]);
    for (int64_t i = 0; i < order_; ++i) line(i)[i] += alpha;
    for (int64_t i = 0; i < lines_; ++i) {
      for (int64_t j = i < order_ ? order_ : 0; j < lines_; ++j) line(i)[j] = 0;
      if (i >= order_) line(i)[i] = 1;
    }
    row == 1 ? mirror<true>() : mirror<false>();
  }

  static void copy(const T* from, int64_t step, int64_t count, T* to) {
    if (step == 1)
      for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    else
      for (int64_t i = 0; i < count; ++i) to[i] = from[i * step];
  }

  // Fills one triangle of the array from the other. With kAfter, the known elements are those after the diagonal of
  // each line.
  template <bool kAfter>
  void mirror() const {
    for (int64_t a = 0; a < lines_; a += kLanes)
      for (int64_t b = 0; b <= a; b += kLanes) {
        T *low = line(a) + b, *high = line(b) + a;
        T *from = kAfter ? high : low, *to = kAfter ? low : high;
        V square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = load<V>(from + i * line_);
        transpose(square);
        if (a == b) {
          const V number = lane_numbers<V>();
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            const V known = load<V>(from + i * line_);
            square[i] = (kAfter ? number >= T(i) : number <= T(i)) ? known : square[i];
          }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + i * line_, square[i]);
      }
  }

  // Covers the vectors [first, last) with tiles: calls function(number of vectors, as a constant; offset in elements).
  template <class Function>
  CMAB_INLINE static void with_tiles(int64_t first, int64_t last, Function function) {
    for (; last - first >= kRowVectors; first += kRowVectors)
      function(std::integral_constant<int, kRowVectors>(), first * kLanes);
    if (kRowVectors > 3 && last - first == 3) function(std::integral_constant<int, 3>(), first * kLanes);
    if (kRowVectors > 2 && last - first == 2) function(std::integral_constant<int, 2>(), first * kLanes);
    if (last - first == 1) function(std::integral_constant<int, 1>(), first * kLanes);
  }

  // Sets root_ to the square root of the largest diagonal element; returns the 1-norm divided by root_^2, which keeps
  // the norm and the estimate in range.
  T scale_and_norm() {
    T largest = 0, norm = 0;
    for (int64_t i = 0; i < order_; ++i) largest = line(i)[i] > largest ? line(i)[i] : largest;
    root_ = std::sqrt(largest);
    const T unit = T(1) / root_;
    with_tiles(0, vectors_, [&](auto vectors, int64_t at) {
      constexpr int kVectors = decltype(vectors)::value;
      V sum[kVectors] = {};
      for (int64_t k = 0; k < order_; ++k)
#pragma GCC unroll 4
        for (int r = 0; r < kVectors; ++r) sum[r] += magnitude(load<V>(line(k) + at + r * kLanes)) * unit;
      for (int r = 0; r < kVectors; ++r)
        for (int i = 0; i < kLanes; ++i) norm = sum[r][i] > norm ? sum[r][i] : norm;
    });
    return norm * unit;
  }

  // Factors the matrix in place (Cholesky), panel by panel: a panel's columns are factored, then eliminated from all
  // columns after them. Returns false for a bad pivot.
  bool factor() {
    bool positive = true;
    for (int64_t panel = 0; panel < columns_ && positive; panel += kPanel) {
      const int64_t end = least(panel + kPanel, columns_);
      for (int64_t column = panel; column < columns_ && positive; column += kColumns) {
        const int64_t top = column / kLanes;
        with_tiles(top, vectors_, [&](auto vectors, int64_t row) {
          V tile[kColumns][decltype(vectors)::value];
          load_tile(tile, line(column) + row);
          eliminate(tile, row, column, panel, least(column, end));
          if (column < end) {
            if (row == top * kLanes) {
              store_tile(line(column) + row, tile);
              positive = factor_corner(column);
            }
            finish(tile, column);
          }
          store_tile(line(column) + row, tile);
        });
      }
    }
    for (int64_t j = columns_; j < lines_; ++j) reciprocal_[j] = 1;
    return positive;
  }

  template <int kVectors>
  CMAB_INLINE void load_tile(V (&tile)[kColumns][kVectors], const T* from) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < kVectors; ++r) tile[c][r] = load<V>(from + c * line_ + r * kLanes);
  }

  template <int kVectors>
  CMAB_INLINE void store_tile(T* to, const V (&tile)[kColumns][kVectors]) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < kVectors; ++r) store(to + c * line_ + r * kLanes, tile[c][r]);
  }

  // tile -= l_ik l_jk for k in [first, last), the rows i from `row` on and the columns j from `column` on.
  template <int kVectors>
  CMAB_INLINE void eliminate(V (&tile)[kColumns][kVectors], int64_t row, int64_t column, int64_t first,
                             int64_t last) const {
    for (int64_t k = first; k < last; ++k) {
      const T* l = line(k);
      V left[kVectors];
#pragma GCC unroll 4
      for (int r = 0; r < kVectors; ++r) left[r] = load<V>(l + row + r * kLanes);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < kVectors; ++r) tile[c][r] -= l[column + c] * left[r];
    }
  }

  // Factors in place the diagonal square of a tile's kColumns columns, and stores the reciprocals of its pivots.
  // Returns false for a bad pivot.
  bool factor_corner(int64_t column) const {
    T a[kColumns][kColumns];
    for (int j = 0; j < kColumns; ++j)
      for (int i = j; i < kColumns; ++i) a[i][j] = line(column + j)[column + i];
    bool positive = true;
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      const T pivot = a[j][j], reciprocal = T(1) / std::sqrt(pivot);
      positive &= pivot > 0 && pivot < T(kInfinity);
      reciprocal_[column + j] = reciprocal;
#pragma GCC unroll 4
      for (int i = j + 1; i < kColumns; ++i) {
        line(column + j)[column + i] = a[i][j] *= reciprocal;
#pragma GCC unroll 4
        for (int k = j + 1; k <= i; ++k) a[i][k] -= a[i][j] * a[k][j];
      }
    }
    return positive;
  }

  // Finishes a tile once its diagonal square is factored.
  template <int kVectors>
  CMAB_INLINE void finish(V (&tile)[kColumns][kVectors], int64_t column) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < kVectors; ++r) {
        tile[c][r] *= reciprocal_[column + c];
#pragma GCC unroll 4
        for (int other = c + 1; other < kColumns; ++other)
          tile[other][r] -= tile[c][r] * line(column + c)[column + other];
      }
  }

  void solve() {
    if (systems_.columns == 1) return solve_vector();
    for (int64_t column = 0; column < systems_.columns; column += kStrip) {
      const int64_t columns = least(kStrip, systems_.columns - column);
      if (columns > kLanes)
        solve_strip<kStripVectors>(column, columns);
      else
        solve_strip<1>(column, columns);
    }
  }

  // Solves a strip of right-hand sides, which are in the lanes: a tile is some rows of the strip.
  template <int kVectors>
  void solve_strip(int64_t column, int64_t columns) {
    constexpr int64_t kWidth = kVectors * kLanes;
    read_strip<kWidth>(column, columns);
    for (int64_t row = 0; row < columns_; row += kSolveRows) {
      V tile[kSolveRows][kVectors];
      load_rows(tile, strip_ + row * kWidth);
      for (int64_t k = 0; k < row; ++k) subtract(tile, line(k) + row, strip_ + k * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kSolveRows; ++r) divide<kVectors>(tile, r, r + 1, kSolveRows, row);
      store_rows(strip_ + row * kWidth, tile);
    }
    for (int64_t i = order_ * kWidth; i < columns_ * kWidth; ++i) strip_[i] = 0;  // an infinity has left NaNs there
    for (int64_t row = columns_ - kSolveRows; row >= 0; row -= kSolveRows) {
      V tile[kSolveRows][kVectors];
      load_rows(tile, strip_ + row * kWidth);
      for (int64_t k = columns_ - 1; k >= row + kSolveRows; --k) subtract(tile, line(k) + row, strip_ + k * kWidth);
#pragma GCC unroll 8
      for (int r = kSolveRows - 1; r >= 0; --r) divide<kVectors>(tile, r, 0, r, row);
      store_rows(strip_ + row * kWidth, tile);
    }
    write_strip<kWidth>(column, columns);
  }

  template <int kVectors>
  CMAB_INLINE static void load_rows(V (&tile)[kSolveRows][kVectors], const T* from) {
#pragma GCC unroll 8
    for (int r = 0; r < kSolveRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) tile[r][c] = load<V>(from + (r * kVectors + c) * kLanes);
  }

  template <int kVectors>
  CMAB_INLINE static void store_rows(T* to, const V (&tile)[kSolveRows][kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < kSolveRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) store(to + (r * kVectors + c) * kLanes, tile[r][c]);
  }

  // Subtracts factor[r] times the solved row `known` from each row r of a tile.
  template <int kVectors>
  CMAB_INLINE static void subtract(V (&tile)[kSolveRows][kVectors], const T* factor, const T* known) {
    V row[kVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; ++c) row[c] = load<V>(known + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kSolveRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) tile[r][c] -= factor[r] * row[c];
  }

  // Divides row r of a tile by its pivot, and eliminates it from the tile's rows [first, last).
  template <int kVectors>
  CMAB_INLINE void divide(V (&tile)[kSolveRows][kVectors], int r, int first, int last, int64_t row) const {
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; ++c) tile[r][c] *= reciprocal_[row + r];
#pragma GCC unroll 8
    for (int other = first; other < last; ++other)
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) tile[other][c] -= line(row + r)[row + other] * tile[r][c];
  }

  template <int64_t kWidth>
  void read_strip(int64_t column, int64_t columns) {
    const int64_t row = systems_.rhs.stride[1], step = systems_.rhs.stride[2];
    const T* from = systems_.rhs.at<T>(number_) + column * step;
    for (int64_t i = 0; i < columns_; ++i) {
      const int64_t count = i < order_ ? columns : 0;
      copy(from + i * row, step, count, strip_ + i * kWidth);
      for (int64_t c = count; c < kWidth; ++c) strip_[i * kWidth + c] = 0;
    }
  }

  template <int64_t kWidth>
  void write_strip(int64_t column, int64_t columns) const {
    T* to = systems_.weight_at<T>(number_) + column;
    for (int64_t i = 0; i < order_; ++i) copy(strip_ + i * kWidth, 1, columns, to + i * systems_.columns);
  }

  // Solves a single right-hand side, whose rows are in the lanes.
  void solve_vector() {
    copy(systems_.rhs.at<T>(number_), systems_.rhs.stride[1], order_, residual_);
    for (int64_t i = order_; i < lines_; ++i) residual_[i] = 0;
    forward();
    backward();
    copy(residual_, 1, order_, systems_.weight_at<T>(number_));
  }

  // A lower bound of root_^2 times the inf-norm of the inverse, from two probes of signs: one chosen to make L^-1 d
  // grow, then the signs of its solution (Cline, Moler, Stewart and Wilkinson 1979; Hager 1984).
  T inverse_norm() {
    for (int64_t i = 0; i < lines_; ++i) residual_[i] = 0;
    forward<true>();
    const T first = finish_probe();
    for (int64_t i = 0; i < order_; ++i) residual_[i] = std::copysign(root_, residual_[i]);
    forward();
    const T second = finish_probe();
    return second > first ? second : first;
  }

  // Completes the solve of a probe. Returns its largest magnitude, or infinity for a NaN.
  T finish_probe() {
    for (int64_t i = 0; i < order_; ++i) probe_[i] *= root_;
    backward();
    V largest{};
    for (int64_t i = 0; i < lines_; i += kLanes) largest = maximum(size_or_infinity(load<V>(residual_ + i)), largest);
    T size = 0;
    for (int i = 0; i < kLanes; ++i) size = largest[i] > size ? largest[i] : size;
    return size;
  }

  // probe = L^-1 residual. With kGrow, probe = L^-1 d. The elements of d have size root_, and their signs are chosen to
  // make every element of the probe as large as possible.
  template <bool kGrow = false>
  void forward() {
    for (int64_t block = 0; block < lines_; block += kLanes) {
      substitute_block<kGrow, true>(block, residual_, probe_);
      with_tiles(block / kLanes + 1, vectors_, [&](auto vectors, int64_t row) {
        V left[decltype(vectors)::value];
        load_vectors(left, residual_ + row);
        for (int64_t k = block; k < block + kLanes; ++k) subtract_line(left, line(k) + row, probe_[k]);
        store_vectors(residual_ + row, left);
      });
    }
    for (int64_t i = order_; i < lines_; ++i) probe_[i] = 0;  // an infinity has left NaNs there
  }

  // residual = L'^-1 probe.
  void backward() {
    for (int64_t block = lines_ - kLanes; block >= 0; block -= kLanes) {
      substitute_block<false, false>(block, probe_, residual_);
      with_tiles(0, block / kLanes, [&](auto vectors, int64_t row) {
        V left[decltype(vectors)::value];
        load_vectors(left, probe_ + row);
        for (int64_t k = block + kLanes - 1; k >= block; --k) subtract_line(left, line(k) + row, residual_[k]);
        store_vectors(probe_ + row, left);
      });
    }
  }

  template <int kVectors>
  CMAB_INLINE static void load_vectors(V (&x)[kVectors], const T* from) {
#pragma GCC unroll 4
    for (int r = 0; r < kVectors; ++r) x[r] = load<V>(from + r * kLanes);
  }

  template <int kVectors>
  CMAB_INLINE static void store_vectors(T* to, const V (&x)[kVectors]) {
#pragma GCC unroll 4
    for (int r = 0; r < kVectors; ++r) store(to + r * kLanes, x[r]);
  }

  template <int kVectors>
  CMAB_INLINE static void subtract_line(V (&left)[kVectors], const T* factors, T known) {
#pragma GCC unroll 4
    for (int r = 0; r < kVectors; ++r) left[r] -= known * load<V>(factors + r * kLanes);
  }

  // Solves the rows of one vector in turn: lane i is final once the lanes before it have been eliminated from it.
  template <bool kGrow, bool kForward>
  CMAB_INLINE void substitute_block(int64_t block, const T* from, T* to) const {
    const V number = lane_numbers<V>(), reciprocal = load<V>(reciprocal_ + block);
    V left = load<V>(from + block), done{};
#pragma GCC unroll 16
    for (int step = 0; step < kLanes; ++step) {
      const int i = kForward ? step : kLanes - 1 - step;
      const V all = (kGrow ? left + with_sign_of(left, broadcast<V>(root_)) : left) * reciprocal;
      const V own = broadcast<V>(all[i]);
      done = number == T(i) ? own : done;
      left -= own * load<V>(line(block + i) + block);
    }
    store(to + block, done);
  }

  const Systems& systems_;
  const int64_t number_, order_;
  const int64_t columns_;  // factored columns: the order, padded to full tiles
  const int64_t lines_;    // lines of the array: padded to full vectors
  const int64_t vectors_;  // vectors of a line
  int64_t line_;           // the stride of lines
  T *matrix_, *reciprocal_, *residual_, *probe_, *strip_;
  T root_;
  size_t bytes_;
};

}  // namespace
}  // namespace cmab::cpu
