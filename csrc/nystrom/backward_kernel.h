// The gradient of the iterative pseudo-inverse. The iterates are recomputed, transposed, so that every factor of the
// adjoint products is read along its rows: with X = A Z,
//   P = 7 I - X,  Q = 15 I - X P,  R = 13 I - X Q,  Z_next = Z R / 4,
// and G the gradient of Z_next,
//   dR = Z' G / 4,  dQ = -X' dR,  dP = -X' dQ,  dX = -dR Q' - dQ P' - dP,
//   dA += dX Z',  dZ = G R' / 4 + A' dX.
// P' = 7 I - X' is not stored: dQ P' = 7 dQ - dQ X'.
#pragma once

#include "nystrom/kernel.h"

namespace cmab::cpu {
namespace {

template <class T>
class PinvGradient : PinvSquares<T> {
  using Squares = PinvSquares<T>;
  using Squares::columns_, Squares::rows_;
  using Squares::identity, Squares::m_, Squares::over_norms, Squares::size_, Squares::times, Squares::width_;
  using V = Vector<T>;

 public:
  // Elements of workspace: four squares per iteration (Z, X, Q, R), the last iterate, the identity and eight more.
  static int64_t elements(int64_t m, int iterations) { return Squares::elements(m, 4 * iterations + 10); }

  PinvGradient(int64_t m, int iterations, T* memory) : Squares(m, memory), iterations_(iterations) {
    for (T** each : {&matrix_, &turned_, &gradient_, &next_, &dr_, &dq_, &dx_, &dmatrix_}) *each = Squares::take(size_);
    trail_ = Squares::take((4 * iterations + 1) * size_);
  }

  T* matrix() { return matrix_; }                                               // must be filled before run
  T* gradient() { return gradient_; }                                           // of the inverse; before differentiate
  const T* turned_inverse() const { return trail_ + 4 * size_ * iterations_; }  // after run
  const T* dmatrix() const { return dmatrix_; }                                 // after differentiate
  const T* turned() const { return turned_; }                                   // the transpose of the matrix

  void write(T* dmatrix) const {
    for (int64_t i = 0; i < m_; ++i) write_row(dmatrix_ + i * width_, m_, dmatrix + i * m_);
  }

  void run() {
    transpose_matrix(matrix_, m_, m_, turned_);
    Squares::take_norms(matrix_, turned_);
    for (int64_t i = 0; i < size_; i += kVectorLanes<T>) store(trail_ + i, over_norms(load<V>(matrix_ + i)));
    for (int i = 0; i < iterations_; ++i) iterate(step(i), step(i + 1).z);
  }

  void differentiate() {
    for (int64_t i = 0; i < size_; i += kVectorLanes<T>) store(dmatrix_ + i, V{});
    for (int i = iterations_ - 1; i >= 0; --i) iterate_back(step(i));
    differentiate_start();
  }

 private:
  // The transposes of Z, X, Q and R.
  struct Step {
    T *z, *x, *q, *r;
  };

  Step step(int i) const {
    T* z = trail_ + 4 * size_ * i;
    return {z, z + size_, z + 2 * size_, z + 3 * size_};
  }

  void iterate(const Step& step, T* next) {
    T* p = next_;
    times(step.z, turned_, [&](int64_t at, V sum) {
      store(step.x + at, sum);
      store(p + at, T(7) * identity(at) - sum);
    });
    times(p, step.x, [&](int64_t at, V sum) { store(step.q + at, T(15) * identity(at) - sum); });
    times(step.q, step.x, [&](int64_t at, V sum) { store(step.r + at, T(13) * identity(at) - sum); });
    times(step.r, step.z, [&](int64_t at, V sum) { store(next + at, T(0.25) * sum); });
  }

  void iterate_back(const Step& step) {
    times(step.z, gradient_, [&](int64_t at, V sum) { store(dr_ + at, T(0.25) * sum); });
    times(step.x, dr_, [&](int64_t at, V sum) { store(dq_ + at, -sum); });
    times(dr_, step.q, [&](int64_t at, V sum) { store(dx_ + at, -sum - T(7) * load<V>(dq_ + at)); });
    times(dq_, step.x, [&](int64_t at, V sum) { store(dx_ + at, load<V>(dx_ + at) + sum); });
    times(step.x, dq_, [&](int64_t at, V sum) { store(dx_ + at, load<V>(dx_ + at) + sum); });
    times(dx_, step.z, [&](int64_t at, V sum) { store(dmatrix_ + at, load<V>(dmatrix_ + at) + sum); });
    times(gradient_, step.r, [&](int64_t at, V sum) { store(next_ + at, T(0.25) * sum); });
    times(turned_, dx_, [&](int64_t at, V sum) { store(next_ + at, load<V>(next_ + at) + sum); });
    std::swap(gradient_, next_);
  }

  // Adds the gradient through Z_0 = A' / (c r): through A' itself, and through the norms c and r to the columns and
  // rows that attain them. Columns or rows with equal sums have equal shares.
  void differentiate_start() {
    transpose_matrix(gradient_, m_, m_, next_);
    if (columns_.largest == 0) {
      for (int64_t i = 0; i < size_; i += kVectorLanes<T>) store(dmatrix_ + i, V{});
      return;
    }
    V products{};
    for (int64_t i = 0; i < m_ * width_; i += kVectorLanes<T>) products += load<V>(next_ + i) * load<V>(trail_ + i);
    T product = 0;
    for (int i = 0; i < kVectorLanes<T>; ++i) product += products[i];
    share(product, columns_);
    share(product, rows_);
    for (int64_t i = 0; i < m_; ++i)
      for (int64_t j = 0; j < width_; j += kVectorLanes<T>) {
        const int64_t at = i * width_ + j;
        const V a = load<V>(matrix_ + at), slope = load<V>(columns_.of + j) + rows_.of[i];
        const V sign = a == T(0) ? V{} : with_sign_of(a, broadcast<V>(T(1)));
        store(dmatrix_ + at, load<V>(dmatrix_ + at) + over_norms(load<V>(next_ + at)) - sign * slope);
      }
  }

  // Replaces each column's sum by the gradient of the norm with respect to the elements of that column; it is 0 unless
  // the column has the largest sum.
  void share(T product, ColumnSums<T>& sums) const {
    int64_t count = 0;
    for (int64_t j = 0; j < m_; ++j) count += sums.of[j] == sums.largest;
    for (int64_t j = 0; j < m_; ++j) sums.of[j] = sums.of[j] == sums.largest ? product / sums.largest / T(count) : T(0);
  }

  const int iterations_;
  T *matrix_, *turned_, *gradient_, *next_, *dr_, *dq_, *dx_, *dmatrix_, *trail_;
};

}  // namespace
}  // namespace cmab::cpu
