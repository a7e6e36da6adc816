// The state of softmax attention and its algebra, for one query row.
//
// The state of a set of keys is  sum = Σ exp(S_i - reference)  and  acc = Σ exp(S_i - reference) v_i; `reference` is
// any number near the largest logit. The state of the union of two disjoint sets is the sum of both, rescaled to one
// reference: merging is associative and commutative, and the empty set (-inf, 0, 0) is its identity. The result of a
// state is (lse, out) = (reference + log(sum), acc / sum), which is a state again: reference = lse, sum = 1, acc = out.
#pragma once

#include <algorithm>
#include <cmath>

namespace cmab {

template <class T>
struct Sums {
  T reference = -INFINITY;
  T sum = 0;

  bool empty() const { return reference == -INFINITY && sum == 0; }
};

// Merges `from` into `into`. Exact where either is empty; a NaN in either stays.
template <class T>
inline void absorb(Sums<T>& into, T* __restrict acc, const Sums<T>& from, const T* __restrict from_acc, int width) {
  if (from.empty()) return;
  if (into.empty()) {
    into = from;
    for (int e = 0; e < width; ++e) acc[e] = from_acc[e];
    return;
  }
  const T top = from.reference > into.reference ? from.reference : into.reference;
  const T kept = into.reference == top ? T(1) : std::exp(into.reference - top);
  const T added = from.reference == top ? T(1) : std::exp(from.reference - top);
  into.reference = top;
  into.sum = kept * into.sum + added * from.sum;
  for (int e = 0; e < width; ++e) acc[e] = kept * acc[e] + added * from_acc[e];
}

// Takes the sums `part` over some of its keys out of the state (lse, out), in place. Returns the share of the mass that
// is left: errors have grown by its reciprocal. A row with none left, or with none there, becomes empty.
inline double remove_part(double& lse, double* __restrict out, const Sums<double>& part,
                          const double* __restrict part_acc, int width) {
  if (part.empty()) return 1;
  const double factor = lse == -INFINITY ? INFINITY : std::exp(part.reference - lse);
  double share = factor * part.sum;
  if (share > 0.999) share = std::exp(std::min(part.reference + std::log(part.sum) - lse, 0.0));  // all: exactly 1
  const double left = 1 - share;
  if (left <= 0) {
    lse = -INFINITY;
    for (int e = 0; e < width; ++e) out[e] = 0;
    return 0;
  }
  lse += std::log1p(-share);
  const double kept = 1 / left, removed = factor / left;
  for (int e = 0; e < width; ++e) out[e] = kept * out[e] - removed * part_acc[e];
  return left;
}

template <class T>
inline T log_sum(const Sums<T>& sums) {
  return sums.empty() ? T(-INFINITY) : sums.reference + std::log(sums.sum);
}

// The factor that turns acc into out; 0 for the empty state, whose out is 0.
template <class T>
inline T normaliser(const Sums<T>& sums) {
  return sums.empty() ? T(0) : T(1) / sums.sum;
}

}  // namespace cmab
