// The pseudo-inverse of one m x m matrix by the iteration of Razavi et al. (2014), as Nyströmformer uses it:
//   Z_0 = A' / (largest column sum of |A| * largest row sum of |A|),
//   Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.
#pragma once

#include "pinv_products.h"

namespace cmab::cpu {
namespace {

// NaN if either is.
template <class V>
CMAB_INLINE V maximum_or_nan(V a, V b) {
  return (b > a) | (b != b) ? b : a;
}

// The largest column sum of |A|. Where all are zero it is 1, for it is divided by.
template <class V, class T>
T largest_column(const T* matrix, int64_t m) {
  const int64_t width = padded_columns<T>(m);
  V most{};
  for (int64_t j = 0; j < width; j += lanes<V>()) {
    V sum{};
    for (int64_t i = 0; i < m; ++i) sum += magnitude(load<V>(matrix + i * width + j));
    most = maximum_or_nan(most, sum);
  }
  T largest = 0;
  for (int i = 0; i < lanes<V>(); ++i) largest = most[i] > largest || most[i] != most[i] ? most[i] : largest;
  return largest == 0 ? T(1) : largest;
}

// One after the other: their product may overflow.
template <class V, class T>
CMAB_INLINE void divide(T* matrix, int64_t size, T column, T row) {
  for (int64_t i = 0; i < size; i += lanes<V>()) store(matrix + i, load<V>(matrix + i) / column / row);
}

// diagonal * I - sum, a vector of it.
template <class V>
CMAB_INLINE V diagonal_minus(ElementOf<V> diagonal, int64_t row, int64_t column, V sum) {
  using T = ElementOf<V>;
  return (lane_numbers<V>() == T(row - column) ? broadcast<V>(diagonal) : V{}) - sum;
}

// Z and what makes it: padded m x m matrices.
template <class V>
class PinvIteration {
  using T = ElementOf<V>;

 public:
  static int64_t elements(int64_t m) { return 5 * padded_size<T>(m, m); }

  PinvIteration(int64_t m, T* memory) : m_(m), width_(padded_columns<T>(m)), size_(padded_size<T>(m, m)) {
    for (T** each : {&matrix_, &inverse_, &product_, &odd_, &even_}) *each = memory, memory += size_;
  }

  T* matrix() { return matrix_; }  // to be filled
  const T* inverse() const { return inverse_; }

  void run(int iterations) {
    transpose_matrix<V>(matrix_, m_, m_, inverse_);
    divide<V>(inverse_, size_, largest_column<V>(matrix_, m_), largest_column<V>(inverse_, m_));
    for (int i = 0; i < iterations; ++i) iterate();
  }

 private:
  void iterate() {
    times(matrix_, inverse_, [this](int64_t row, int64_t column, V sum) {
      store(product_ + row * width_ + column, sum);
      store(odd_ + row * width_ + column, diagonal_minus(T(7), row, column, sum));
    });
    times(product_, odd_, [this](int64_t row, int64_t column, V sum) {
      store(even_ + row * width_ + column, diagonal_minus(T(15), row, column, sum));
    });
    times(product_, even_, [this](int64_t row, int64_t column, V sum) {
      store(odd_ + row * width_ + column, diagonal_minus(T(13), row, column, sum));
    });
    times(inverse_, odd_,
          [this](int64_t row, int64_t column, V sum) { store(even_ + row * width_ + column, T(0.25) * sum); });
    std::swap(inverse_, even_);
  }

  template <class Finish>
  CMAB_INLINE void times(const T* left, const T* right, const Finish& finish) const {
    multiply<V>(Left<T>{left, width_, 1}, right, width_, padded_rows(m_), m_, width_, finish);
  }

  const int64_t m_, width_, size_;
  T *matrix_, *inverse_, *product_, *odd_, *even_;
};

template <class V>
int64_t pinv_workspace(int64_t m) {
  return PinvIteration<V>::elements(m);
}

// Both matrices are contiguous; the workspace, of pinv_workspace<V>(m) elements, is 64-byte aligned and uninitialised.
template <class V>
void iterative_pinv(const ElementOf<V>* matrix, int64_t m, int iterations, ElementOf<V>* inverse,
                    ElementOf<V>* workspace) {
  PinvIteration<V> iteration(m, workspace);
  read_matrix<V>(matrix, m, 1, m, m, iteration.matrix());
  iteration.run(iterations);
  write_matrix<V>(iteration.inverse(), m, m, inverse);
}

}  // namespace
}  // namespace cmab::cpu
