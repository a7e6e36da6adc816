// The state of softmax attention and its algebra, for one query row.
//
// The state of a set of keys is  sum = Σ exp(S_i - reference)  and  acc = Σ exp(S_i - reference) v_i; `reference` is
// any number near the largest logit. The state of the union of two disjoint sets is the sum of both, rescaled to one
// reference: merging is associative and commutative, and the empty set (-inf, 0, 0) is its identity. The result of a
// state is (lse, out) = (reference + log(sum), acc / sum). The result is a state again: reference = lse, sum = 1, acc =
// out.
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

// Merges `from` into `into`. The result is exact if one of them is empty; a NaN in one of them stays.
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

// A row of a result: sums * acc + state * out of an incoming state, and its lse. The row is 0 where lse is -inf.
struct Mix {
  double sums, state, lse;
};

// The row of a result that has sums but no incoming state.
inline Mix alone(const Sums<double>& sums) { return {1 / sums.sum, 0, sums.reference + std::log(sums.sum)}; }

// Whether an lse is NaN or +inf. A row with such an lse, and every row that it is merged with, becomes kRefused.
inline bool is_refused(double lse) { return !(lse < INFINITY); }
inline constexpr Mix kRefused = {NAN, NAN, NAN};

// The row of a result that adds sums to an incoming state. The result is exact if one of them is empty; a NaN in one of
// them stays.
inline Mix added(const Sums<double>& sums, double lse) {
  if (is_refused(lse)) return kRefused;
  if (lse == -INFINITY) return alone(sums);
  if (sums.empty()) return {0, 1, lse};
  const double top = lse > sums.reference ? lse : sums.reference;
  const double kept = sums.reference == top ? 1 : std::exp(sums.reference - top);
  const double state = lse == top ? 1 : std::exp(lse - top);
  const double total = kept * sums.sum + state;
  return {kept / total, state / total, top + std::log(total)};
}

// The row of a result that removes the sums over some keys from a state. `left` receives the share of the mass that is
// left; errors have grown by the factor 1 / left. A row becomes empty if no mass is left, or if the state had none.
inline Mix removed(const Sums<double>& sums, double lse, double& left) {
  if (is_refused(lse)) return left = NAN, kRefused;
  left = 1;
  if (sums.empty()) return {0, 1, lse};
  if (lse == -INFINITY) return left = 0, Mix{0, 0, lse};
  const double factor = std::exp(sums.reference - lse);
  double share = factor * sums.sum;
  if (share > 0.999) share = std::exp(std::min(sums.reference + std::log(sums.sum) - lse, 0.0));  // all: exactly 1
  left = 1 - share;
  if (left <= 0) return left = 0, Mix{0, 0, -INFINITY};
  return {-factor / left, 1 / left, lse + std::log(left)};  // log1p is slower, and lse cannot hold its extra digits
}

}  // namespace cmab
