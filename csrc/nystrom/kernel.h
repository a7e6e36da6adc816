// The pseudo-inverse of one m x m matrix by the iteration of Razavi et al. (2014), as Nyströmformer uses it:
//   Z_0 = A' / (largest column sum of |A| * largest row sum of |A|),
//   Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.
#pragma once

#include "nystrom/products.h"

namespace cmab::cpu {
namespace {

// The larger of a and b in each lane, or NaN if either is NaN.
template <class V>
CMAB_INLINE V maximum_or_nan(V a, V b) {
  return ((b > a) | (b != b)) ? b : a;
}

// The column sums of |A|, zero-padded, and the largest of them.
template <class T>
struct ColumnSums {
  T* of;
  T largest;

  // The largest sum, or 1 for A = 0, because Z of that matrix is 0.
  T divisor() const { return largest == 0 ? T(1) : largest; }
};

// The workspace of m x m matrices in padded rows ("squares"), and operations on them.
template <class T>
class PinvSquares {
 protected:
  using V = Vector<T>;

  static int64_t elements(int64_t m, int64_t squares) {
    return squares * padded_size<T>(m, m) + 2 * padded_columns<T>(m);
  }

  PinvSquares(int64_t m, T* memory)
      : m_(m), width_(padded_columns<T>(m)), size_(padded_size<T>(m, m)), memory_(memory) {
    columns_.of = take(width_);
    rows_.of = take(width_);
    identity_ = take(size_);
    for (int64_t i = 0; i < size_; i += kVectorLanes<T>) store(identity_ + i, V{});
    for (int64_t i = 0; i < m; ++i) identity_[i * width_ + i] = 1;
  }

  T* take(int64_t count) { return std::exchange(memory_, memory_ + count); }

  V identity(int64_t at) const { return load<V>(identity_ + at); }

  // Multiplies two squares: calls finish(offset in a square, vector of the product) for every vector.
  template <class Finish>
  CMAB_INLINE void times(const T* left, const T* right, const Finish& finish) const {
    multiply(Left<T>{left, width_, 1}, right, width_, padded_rows(m_), m_, width_,
             [&](int64_t row, int64_t column, V sum) { finish(row * width_ + column, sum); });
  }

  // Computes the largest column sums of |A| and of its transpose, and replaces subnormal elements of both by 0: the
  // softmax of large logits has many such elements, and each product with one of them would take a hundred times as
  // long. over_norms divides by each norm in turn, because the product of the norms may overflow.
  void take_norms(T* matrix, T* turned) {
    add_columns(matrix, columns_);
    add_columns(turned, rows_);
  }
  V over_norms(V x) const { return x / columns_.divisor() / rows_.divisor(); }

  const int64_t m_, width_, size_;
  ColumnSums<T> columns_, rows_;

 private:
  void add_columns(T* matrix, ColumnSums<T>& sums) const {
    constexpr T kSmallest = sizeof(T) == 4 ? T(0x1p-126) : T(0x1p-1022);
    V most{};
    for (int64_t j = 0; j < width_; j += kVectorLanes<T>) {
      V sum{};
      for (int64_t i = 0; i < m_; ++i) {
        const V x = load<V>(matrix + i * width_ + j), size = magnitude(x);
        store(matrix + i * width_ + j, size < kSmallest ? V{} : x);
        sum += size;
      }
      store(sums.of + j, sum);
      most = maximum_or_nan(most, sum);
    }
    sums.largest = 0;
    for (int i = 0; i < kVectorLanes<T>; ++i)
      sums.largest = most[i] > sums.largest || most[i] != most[i] ? most[i] : sums.largest;
  }

  T *memory_, *identity_;
};

// Iterates on one matrix: fill matrix(), call run(), read inverse().
template <class T>
class PinvIteration : PinvSquares<T> {
  using Squares = PinvSquares<T>;
  using Squares::identity, Squares::m_, Squares::over_norms, Squares::size_, Squares::times, Squares::width_;
  using V = Vector<T>;

 public:
  static int64_t elements(int64_t m) { return Squares::elements(m, 6); }

  PinvIteration(int64_t m, T* memory) : Squares(m, memory) {
    for (T** each : {&matrix_, &inverse_, &product_, &odd_, &even_}) *each = Squares::take(size_);
  }

  T* matrix() { return matrix_; }  // must be filled before run
  const T* inverse() const { return inverse_; }
  void write(T* inverse) const {
    for (int64_t i = 0; i < m_; ++i) write_row(inverse_ + i * width_, m_, inverse + i * m_);
  }

  void run(int iterations) {
    transpose_matrix(matrix_, m_, m_, inverse_);
    Squares::take_norms(matrix_, inverse_);
    for (int64_t i = 0; i < size_; i += kVectorLanes<T>) store(inverse_ + i, over_norms(load<V>(inverse_ + i)));
    for (int i = 0; i < iterations; ++i) iterate();
  }

 private:
  void iterate() {
    times(matrix_, inverse_, [this](int64_t at, V sum) {
      store(product_ + at, sum);
      store(odd_ + at, T(7) * identity(at) - sum);
    });
    times(product_, odd_, [this](int64_t at, V sum) { store(even_ + at, T(15) * identity(at) - sum); });
    times(product_, even_, [this](int64_t at, V sum) { store(odd_ + at, T(13) * identity(at) - sum); });
    times(inverse_, odd_, [this](int64_t at, V sum) { store(even_ + at, T(0.25) * sum); });
    std::swap(inverse_, even_);
  }

  T *matrix_, *inverse_, *product_, *odd_, *even_;
};

template <class V>
int64_t pinv_workspace(int64_t m) {
  return PinvIteration<ElementOf<V>>::elements(m);
}

// The pseudo-inverse of one contiguous m x m matrix; `inverse` may be `matrix`. The workspace, of pinv_workspace<V>(m)
// elements, is 64-byte aligned and uninitialised.
template <class V>
void iterative_pinv(const ElementOf<V>* matrix, int64_t m, int iterations, ElementOf<V>* inverse,
                    ElementOf<V>* workspace) {
  PinvIteration<ElementOf<V>> iteration(m, workspace);
  read_matrix(matrix, m, 1, nullptr, m, m, iteration.matrix());
  iteration.run(iterations);
  iteration.write(inverse);
}

}  // namespace
}  // namespace cmab::cpu
