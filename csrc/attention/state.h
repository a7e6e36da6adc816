// The state of softmax attention and its algebra, for one query row.
//
// A set of keys leaves behind  sum = Σ exp(S_i - reference)  and  acc = Σ exp(S_i - reference) v_i; `reference` is any
// number near the largest logit. The union of two disjoint sets has the sums of both, brought to one reference: merging
// is associative and commutative, and the empty set (-inf, 0, 0) is its identity. Read out, a state is
// (lse, out) = (reference + log(sum), acc / sum), and (lse, out) is a state again: reference = lse, sum = 1, acc = out.
#pragma once

#include <cmath>

namespace cmab {

template <class T>
struct Sums {
  T reference = -INFINITY;
  T sum = 0;

  bool empty() const { return reference == -INFINITY && sum == 0; }
};

// Takes `from` into `into`. Exact where either is empty; a NaN in either stays.
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

template <class T>
inline T log_sum(const Sums<T>& sums) {
  return sums.empty() ? T(-INFINITY) : sums.reference + std::log(sums.sum);
}

// What acc is multiplied with to give out; 0 for the empty state, whose out is 0.
template <class T>
inline T normaliser(const Sums<T>& sums) {
  return sums.empty() ? T(0) : T(1) / sums.sum;
}

}  // namespace cmab
