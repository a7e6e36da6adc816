// The iterative pseudo-inverse of one small matrix, in shared memory, by one block (Razavi et al. 2014):
//   Z = A' / (largest column sum of |A| * largest row sum of |A|),
//   Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.
#pragma once

#include "continual/step.cuh"

namespace cmab::cuda {

template <class S>
class PinvBlock {
 public:
  // `matrices` has room for 4 m^2 + 2 m elements. The first m^2 elements are A, which must be filled before invert().
  CMAB_DEVICE PinvBlock(const Block& block, S* matrices, int order)
      : block_(block), a_(matrices), order_(order), size_(order * order) {}

  CMAB_DEVICE S& matrix(int i, int j) const { return a_[i * order_ + j]; }
  CMAB_DEVICE S inverse(int i, int j) const { return z()[i * order_ + j]; }

  CMAB_DEVICE void invert(int iterations) const {
    start();
    for (int i = 0; i < iterations; ++i) {
      if (order_ <= kSide)
        iterate<1>();
      else if (order_ <= 2 * kSide)
        iterate<2>();
      else
        iterate<4>();
    }
  }

 private:
  static constexpr int kSide = 16;  // the threads form a square, kSide x kSide

  CMAB_DEVICE S* z() const { return a_ + size_; }
  CMAB_DEVICE S* az() const { return a_ + 2 * size_; }
  CMAB_DEVICE S* inner() const { return a_ + 3 * size_; }

  CMAB_DEVICE void start() const {
    S* norms = a_ + 4 * size_;  // row sums of |A|, then column sums
    each_index(block_, 2 * order_, [&](int line) {
      const bool column = line >= order_;
      const S* from = column ? a_ + line - order_ : a_ + line * order_;
      S sum = 0;
      for (int k = 0; k < order_; ++k) sum += std::fabs(from[column ? k * order_ : k]);
      norms[line] = sum;
    });
    block_.each_thread([&](int thread) {
      S row = 0, column = 0;
      for (int k = 0; k < order_; ++k) {
        row = std::fmax(row, norms[k]);
        column = std::fmax(column, norms[order_ + k]);
      }
      for (int item = thread; item < size_; item += block_.threads)
        z()[item] = matrix(item % order_, item / order_) / column / row;  // their product may overflow or underflow
    });
  }

  template <int kEach>
  CMAB_DEVICE void iterate() const {
    const auto minus = [](S diagonal) {
      return [diagonal](int i, int j, S x) { return (i == j ? diagonal : S(0)) - x; };
    };
    const auto same = [](int, int, S x) { return x; };
    multiply<kEach>(a_, z(), az(), same, same);
    multiply<kEach>(az(), az(), inner(), minus(7), minus(15));
    multiply<kEach>(az(), inner(), inner(), same, minus(13));
    multiply<kEach>(z(), inner(), z(), same, [](int, int, S x) { return x / 4; });
  }

  // to = after(left * before(right)); `to` may be one of the factors. A thread has kEach x kEach elements, which are
  // kSide apart.
  template <int kEach, class Before, class After>
  CMAB_DEVICE void multiply(const S* left, const S* right, S* to, Before before, After after) const {
    PerThread<S[kEach * kEach]> sums;
    block_.each_thread([&](int thread) {
      const int row = thread / kSide, column = thread % kSide;
      CMAB_UNROLL
      for (int s = 0; s < kEach * kEach; ++s) sums[thread][s] = 0;
      CMAB_UNROLL_BY_2
      for (int k = 0; k < order_; ++k) {
        S a[kEach], b[kEach];
        CMAB_UNROLL
        for (int s = 0; s < kEach; ++s) {  // past the end, the last index is used
          const int i = least(row + s * kSide, order_ - 1), j = least(column + s * kSide, order_ - 1);
          a[s] = left[i * order_ + k];
          b[s] = before(k, j, right[k * order_ + j]);
        }
        CMAB_UNROLL
        for (int s = 0; s < kEach * kEach; ++s) sums[thread][s] = std::fma(a[s / kEach], b[s % kEach], sums[thread][s]);
      }
    });
    block_.each_thread([&](int thread) {
      CMAB_UNROLL
      for (int s = 0; s < kEach * kEach; ++s) {
        const int i = thread / kSide + s / kEach * kSide, j = thread % kSide + s % kEach * kSide;
        if (i < order_ && j < order_) to[i * order_ + j] = after(i, j, sums[thread][s]);
      }
    });
  }

  const Block& block_;
  S* a_;
  int order_, size_;
};

}  // namespace cmab::cuda
