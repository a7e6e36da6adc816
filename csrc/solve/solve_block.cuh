// Solves (A + alpha I) X = B for one matrix on a GPU, by one block: Cholesky, and two triangular solves for each panel
// of B's columns.
//
// All operands are in shared memory: A's lower triangle, which L replaces (with 1 / l_kk in place of l_kk), and columns
// of B, stored as rows. L is computed eight columns at a time: one thread factors the 8 x 8 diagonal block, one thread
// per row below it (or per row of B) solves with it, and all threads subtract the product of the two from the rest.
// So each element is updated by single FMAs, with k ascending (descending in the backward solve).
#pragma once

#include "common/block.cuh"
#include "solve/info.h"

namespace cmab::cuda {

constexpr int kStep = 8;

template <class T>
struct Epsilon;
template <>
struct Epsilon<float> {
  static constexpr float value = 0x1p-23f;
};
template <>
struct Epsilon<double> {
  static constexpr double value = 0x1p-52;
};

// One system in the caller's memory; strides in elements. `rhs` may be `weight`, which is contiguous.
template <class T>
struct System {
  int order, columns;
  const T* gram;
  int64_t gram_row, gram_column;
  const T* rhs;
  int64_t rhs_row, rhs_column;
  T alpha;
  T* weight;
  int32_t* info;
};

struct SolveShape {
  int padded;  // the order, padded to whole steps with a unit matrix
  int pitch;   // odd, so that neither rows nor columns cause bank conflicts
  int panel;   // the number of columns of B at a time

  CMAB_HOST_DEVICE SolveShape(int order, int columns)
      : padded((order + kStep - 1) / kStep * kStep),
        pitch(padded + 1),
        panel(least(most(columns, 1), order <= 64 ? 64 : 32)) {}
  // Elements of shared memory: the matrix, the panel, and one row for the probe.
  CMAB_HOST_DEVICE int elements() const { return (padded + panel + 1) * pitch; }
};

template <class T>
class SolveBlock {
 public:
  static CMAB_HOST_DEVICE int shared_bytes(int order, int columns) {
    return SolveShape(order, columns).elements() * int(sizeof(T)) + int(sizeof(int));
  }

  CMAB_DEVICE SolveBlock(const Block& block, const System<T>& system)
      : block_(block), system_(system), shape_(system.order, system.columns) {
    matrix_ = reinterpret_cast<T*>(block.shared);
    rows_ = matrix_ + shape_.padded * shape_.pitch;
    failed_ = reinterpret_cast<int*>(matrix_ + shape_.elements());
  }

  CMAB_DEVICE void solve() {
    load_matrix();
    const T norm = matrix_norm();
    if (!factor()) return give_up();
    bool worthless = false;
    // The first two panels are used to probe the condition, so a second panel is processed even if it is empty.
    const int panels = most(2, ceil_div(system_.columns, shape_.panel));
    for (int panel = 0; panel < panels; ++panel) {
      const int first = panel * shape_.panel, count = most(0, least(shape_.panel, system_.columns - first));
      const bool probing = panel < 2;
      const Range rows{probing ? 0 : 1, 1 + count};
      load_panel(first, count, panel);
      forward(rows, panel == 0);
      backward(rows);
      store_panel(first, count);
      if (probing) worthless |= is_worthless(norm);
    }
    finish(worthless ? kIllConditioned : kSound);
  }

 private:
  CMAB_DEVICE T& matrix(int i, int j) const { return matrix_[i * shape_.pitch + j]; }
  CMAB_DEVICE T* row(int r) const { return rows_ + r * shape_.pitch; }

  // Calls work(i, j) for the elements of a rows x columns matrix; neighbouring threads take neighbouring j.
  template <class Work>
  CMAB_DEVICE void each_element(int rows, int columns, Work work) const {
    block_.each_thread([&](int thread) {
      for (int i = thread / 16; i < rows; i += block_.threads / 16)
        for (int j = thread % 16; j < columns; j += 16) work(i, j);
    });
  }

  CMAB_DEVICE void load_matrix() const {
    each_element(shape_.padded, shape_.padded, [&](int i, int j) {
      if (j > i) return;
      const bool inside = i < system_.order;
      const T element = inside ? system_.gram[i * system_.gram_row + j * system_.gram_column] : T(0);
      matrix(i, j) = i != j ? element : inside ? element + allowed(system_.alpha) : T(1);
    });
  }

  // The 1-norm: the largest column sum of |A| of the symmetric matrix.
  CMAB_DEVICE T matrix_norm() const {
    block_.each_thread([&](int thread) {
      for (int j = thread; j < system_.order; j += block_.threads) {
        T sum = 0;
        for (int i = 0; i < system_.order; ++i) sum += std::fabs(i < j ? matrix(j, i) : matrix(i, j));
        rows_[j] = sum;
      }
    });
    int left = system_.order;
    while (left > 1) {
      const int half = (left + 1) / 2;
      block_.each_thread([&](int thread) {
        for (int j = thread; j + half < left; j += block_.threads) rows_[j] = std::fmax(rows_[j], rows_[j + half]);
      });
      left = half;
    }
    const T norm = rows_[0];
    block_.each_thread([](int) {});  // before rows_ is written again
    return norm;
  }

  // Replaces the matrix by L; returns false if a pivot is not a positive finite number.
  CMAB_DEVICE bool factor() const {
    for (int k = 0; k < shape_.padded; k += kStep) {
      block_.each_thread([&](int thread) {
        if (thread == 0) *failed_ = !factor_diagonal(k);
      });
      if (*failed_) return false;
      const int below = k + kStep;
      block_.each_thread([&](int thread) {
        for (int i = below + thread; i < shape_.padded; i += block_.threads)
          solve_forward(matrix_ + i * shape_.pitch, k);
      });
      block_.each_thread([&](int thread) {
        const Range left{below, shape_.padded};
        subtract_product(thread, matrix_, left, left, eight_columns(k));
      });
    }
    return true;
  }

  // Factors the 8 x 8 diagonal block at k; returns false if a pivot is not a positive finite number.
  CMAB_DEVICE bool factor_diagonal(int k) const {
    T a[kStep][kStep];
    CMAB_UNROLL
    for (int i = 0; i < kStep; ++i) {
      CMAB_UNROLL
      for (int j = 0; j <= i; ++j) a[i][j] = matrix(k + i, k + j);
    }
    bool sound = true;
    CMAB_UNROLL
    for (int j = 0; j < kStep; ++j) {
      sound &= a[j][j] > 0 && std::isfinite(a[j][j]);
      a[j][j] = T(1) / std::sqrt(a[j][j]);
      CMAB_UNROLL
      for (int i = j + 1; i < kStep; ++i) {
        a[i][j] *= a[j][j];
        CMAB_UNROLL
        for (int m = j + 1; m <= i; ++m) a[i][m] = std::fma(-a[i][j], a[m][j], a[i][m]);
      }
    }
    CMAB_UNROLL
    for (int i = 0; i < kStep; ++i) {
      CMAB_UNROLL
      for (int j = 0; j <= i; ++j) matrix(k + i, k + j) = a[i][j];
    }
    return sound;
  }

  // Replaces elements k .. k + 7 of y by those of x in x L' = y. With `grow`, first adds 1 or -1 to each element, with
  // the element's sign, to make x large.
  CMAB_DEVICE void solve_forward(T* y, int k, bool grow = false) const {
    T x[kStep];
    CMAB_UNROLL
    for (int j = 0; j < kStep; ++j) x[j] = y[k + j];
    CMAB_UNROLL
    for (int j = 0; j < kStep; ++j) {
      if (grow) x[j] += std::copysign(T(1), x[j]);
      x[j] *= matrix(k + j, k + j);
      CMAB_UNROLL
      for (int i = j + 1; i < kStep; ++i) x[i] = std::fma(-x[j], matrix(k + i, k + j), x[i]);
    }
    CMAB_UNROLL
    for (int j = 0; j < kStep; ++j) y[k + j] = x[j];
  }

  // Replaces elements k .. k + 7 of y by those of x in x L = y.
  CMAB_DEVICE void solve_backward(T* y, int k) const {
    T x[kStep];
    CMAB_UNROLL
    for (int j = 0; j < kStep; ++j) x[j] = y[k + j];
    CMAB_UNROLL
    for (int j = kStep - 1; j >= 0; --j) {
      x[j] *= matrix(k + j, k + j);
      CMAB_UNROLL
      for (int i = 0; i < j; ++i) x[i] = std::fma(-x[j], matrix(k + j, k + i), x[i]);
    }
    CMAB_UNROLL
    for (int j = 0; j < kStep; ++j) y[k + j] = x[j];
  }

  // Eight columns of L, or eight of its rows from the last row upwards, as factors. The factor of column j and step m
  // is factor[j * along + m * across]; it multiplies element first + m * step of a row.
  struct Eight {
    const T* factor;
    int along, across, first, step;
  };
  CMAB_DEVICE Eight eight_columns(int k) const { return {&matrix(0, k), shape_.pitch, 1, k, 1}; }
  CMAB_DEVICE Eight eight_rows(int k) const { return {&matrix(k + 7, 0), 1, -shape_.pitch, k + 7, -1}; }

  struct Range {
    int first, end;
  };

  // target(i, j) -= the sum over the eight m of target(i, first + m * step) * factor(j, m). In the matrix itself, only
  // j <= i counts. A thread takes 4 x 4 elements at a time. A thread also reads elements above the diagonal, which were
  // never written, and elements past the end, where another thread may be writing. No result depends on these elements.
  // Skipping these reads would take 16 more registers (float32, sm_90a).
  CMAB_DEVICE void subtract_product(int thread, T* target, Range rows, Range columns, const Eight& eight) const {
    const int down = block_.threads / 16, across = 16, pitch = shape_.pitch;
    for (int i = rows.first + thread / 16; i < rows.end; i += 4 * down)
      for (int j = columns.first + thread % 16; j < columns.end; j += 4 * across) {
        if (target == matrix_ && j > i + 3 * down) continue;
        T* at_row[4];
        int at_column[4];
        T sums[4][4];
        CMAB_UNROLL
        for (int a = 0; a < 4; ++a) {  // past the end, the last index is used
          at_row[a] = target + least(i + a * down, rows.end - 1) * pitch;
          at_column[a] = least(j + a * across, columns.end - 1);
        }
        CMAB_UNROLL
        for (int a = 0; a < 16; ++a) sums[a / 4][a % 4] = at_row[a / 4][at_column[a % 4]];
        CMAB_NO_UNROLL  // unrolling would exceed the registers
            for (int m = 0; m < kStep; ++m) {
          T left[4], right[4];
          CMAB_UNROLL
          for (int a = 0; a < 4; ++a) {
            left[a] = at_row[a][eight.first + m * eight.step];
            right[a] = eight.factor[at_column[a] * eight.along + m * eight.across];
          }
          CMAB_UNROLL
          for (int a = 0; a < 16; ++a) sums[a / 4][a % 4] = std::fma(-left[a / 4], right[a % 4], sums[a / 4][a % 4]);
        }
        CMAB_UNROLL
        for (int a = 0; a < 16; ++a)
          if (i + a / 4 * down < rows.end && j + a % 4 * across < columns.end)
            at_row[a / 4][at_column[a % 4]] = sums[a / 4][a % 4];
      }
  }

  // Loads columns of B as rows 1, ..., and the probe of the condition as row 0. ||A^-1||_1 >= ||A^-1 d||_inf for any d
  // of magnitudes <= 1 and symmetric A. The first d is chosen during the forward solve to make the solution grow
  // (LINPACK). The second d has the signs of the first solution; this is exact if one eigenvector dominates the inverse
  // (Hager).
  CMAB_DEVICE void load_panel(int first, int count, int panel) const {
    block_.each_thread([&](int thread) {
      for (int k = thread; k < shape_.padded; k += block_.threads)
        row(0)[k] = panel == 0 ? T(0) : std::copysign(T(1), row(0)[k]);
    });
    each_element(shape_.padded, count, [&](int k, int c) {
      row(1 + c)[k] = k < system_.order ? system_.rhs[k * system_.rhs_row + (first + c) * system_.rhs_column] : T(0);
    });
  }

  CMAB_DEVICE void forward(Range rows, bool growing) const {
    for (int k = 0; k < shape_.padded; k += kStep) {
      block_.each_thread([&](int thread) {
        for (int r = rows.first + thread; r < rows.end; r += block_.threads)
          solve_forward(row(r), k, growing && r == 0);
      });
      block_.each_thread(
          [&](int thread) { subtract_product(thread, rows_, rows, {k + kStep, shape_.padded}, eight_columns(k)); });
    }
  }

  CMAB_DEVICE void backward(Range rows) const {
    for (int k = shape_.padded - kStep; k >= 0; k -= kStep) {
      block_.each_thread([&](int thread) {
        for (int r = rows.first + thread; r < rows.end; r += block_.threads) solve_backward(row(r), k);
      });
      block_.each_thread([&](int thread) { subtract_product(thread, rows_, rows, {0, k}, eight_rows(k)); });
    }
  }

  CMAB_DEVICE void store_panel(int first, int count) const {
    each_element(system_.order, count,
                 [&](int k, int c) { system_.weight[int64_t(k) * system_.columns + first + c] = row(1 + c)[k]; });
  }

  // Whether the probe shows that the system is ill-conditioned.
  CMAB_DEVICE bool is_worthless(T norm) const {
    return block_.any_thread([&](int thread) {
      bool worthless = false;
      for (int k = thread; k < system_.order; k += block_.threads)
        worthless |= !(double(norm) * std::fabs(double(row(0)[k])) * Epsilon<T>::value <= kIllConditionedLimit);
      return worthless;
    });
  }

  CMAB_DEVICE void give_up() const {
    each_element(system_.order, system_.columns,
                 [&](int k, int c) { system_.weight[int64_t(k) * system_.columns + c] = NAN; });
    finish(kNotPositiveDefinite);
  }

  CMAB_DEVICE void finish(Info info) const {
    block_.each_thread([&](int thread) {
      if (thread == 0) *system_.info = info;
    });
  }

  const Block& block_;
  const System<T>& system_;
  SolveShape shape_;
  T *matrix_, *rows_;
  int* failed_;
};

}  // namespace cmab::cuda
