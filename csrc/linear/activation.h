// The activations of feed-forward layers and their gradients. Internal linkage, as in simd.h.
#pragma once

#include "linear/tiles.h"

namespace cmab::cpu {
namespace {

// Phi(x), the probability that a standard normal variable is below x, and its density.
template <class T>
struct Normal {
  Vector<T> below, density;
};

// With z = |x| / sqrt(2): exp(-z^2) t P(t) is the probability beyond |x|, where t = 1 / (1 + k z), and t P(t), a
// Chebyshev interpolant, is erfcx(z) / 2 to 2.4e-8 (float) or 8e-17 (double). Small values of Phi therefore keep their
// digits.
template <class T>
CMAB_INLINE Normal<T> normal(Vector<T> x) {
  using V = Vector<T>;
  constexpr double kFloat[] = {0.08458755130411702, 0.08545707812926312,  0.07352270954208108,
                               0.10978355742411859, -0.05235607054831211, 0.2806231010873495,
                               -0.2616573281539325, 0.24528579903929723,  -0.06524640777339215};
  constexpr double kDouble[] = {0.11283791670605052,  0.11283791698127764,  0.1038108737432861,   0.0857570237676877,
                                0.06083917600755816,  0.03343202745031182,  0.008809994636845054, -0.005438254987083792,
                                -0.01919181240963361, 0.01818667115681459,  -0.0695568984098986,  0.14752023983993967,
                                -0.16559097090774405, 0.008332636453890525, 0.4949462881697768,   -1.2797872151112215,
                                1.8650996091155583,   -1.8095227994221288,  1.2196892698619723,   -0.5702730857664103,
                                0.1778367057722489,   -0.03346095212311818, 0.002885639474020734};
  constexpr T kRootHalf = T(0.70710678118654752440), kDensity = T(0.39894228040143267794);
  const V z = magnitude(x) * kRootHalf;
  const V decay = exp2(z * z * T(-kLog2E));
  V tail{};
  if constexpr (sizeof(T) == 4) {
    const V t = T(1) / (T(1) + z * T(0.3));
#pragma GCC unroll 16
    for (int i = 8; i >= 0; --i) tail = tail * t + T(kFloat[i]);
    tail *= t;
  } else {
    const V t = T(1) / (T(1) + z * T(0.4));
#pragma GCC unroll 32
    for (int i = 22; i >= 0; --i) tail = tail * t + T(kDouble[i]);
    tail *= t;
  }
  tail *= decay;
  return {x < V{} ? tail : T(1) - tail, decay * kDensity};
}

template <class T>
struct Activations {
  using V = Vector<T>;

  static void activate(Activation activation, RowTile features, RowTile gate, int count, int width, RowTile to) {
    Tiles<T>::clear_past(to, count, width);
    switch (activation) {
      case Activation::kGeglu:
        return each(count, width, [&](int row, int d) {
          const V g = Tiles<T>::load_at(gate, row, d);
          store(row_of<T>(to, row) + d, Tiles<T>::load_at(features, row, d) * (g * normal<T>(g).below));
        });
      case Activation::kGelu:
        return each(count, width, [&](int row, int d) {
          const V x = Tiles<T>::load_at(features, row, d);
          store(row_of<T>(to, row) + d, x * normal<T>(x).below);
        });
      case Activation::kRelu:
        return each(count, width, [&](int row, int d) {
          const V x = Tiles<T>::load_at(features, row, d);
          store(row_of<T>(to, row) + d, x <= V{} ? V{} : x);
        });
    }
  }

  static void backward(Activation activation, RowTile features, RowTile gate, RowTile dresult, int count, int width,
                       RowTile result) {
    const auto give = [&](int row, int d, V y) { store(row_of<T>(result, row) + d, y); };
    switch (activation) {
      case Activation::kGeglu:
        return each(count, width, [&](int row, int d) {
          const V x = Tiles<T>::load_at(features, row, d), g = Tiles<T>::load_at(gate, row, d);
          const V dy = Tiles<T>::load_at(dresult, row, d);
          const Normal<T> at = normal<T>(g);
          give(row, d, x * (g * at.below));
          store(row_of<T>(features, row) + d, dy * (g * at.below));
          store(row_of<T>(gate, row) + d, dy * x * slope(g, at));
        });
      case Activation::kGelu:
        return each(count, width, [&](int row, int d) {
          const V x = Tiles<T>::load_at(features, row, d);
          const Normal<T> at = normal<T>(x);
          give(row, d, x * at.below);
          store(row_of<T>(features, row) + d, Tiles<T>::load_at(dresult, row, d) * slope(x, at));
        });
      case Activation::kRelu:
        return each(count, width, [&](int row, int d) {
          const V x = Tiles<T>::load_at(features, row, d);
          give(row, d, x <= V{} ? V{} : x);
          store(row_of<T>(features, row) + d, x <= V{} ? V{} : Tiles<T>::load_at(dresult, row, d));
        });
    }
  }

 private:
  // The derivative of gelu at x: Phi(x) + x Phi'(x). Where |x| is so large that the density is 0, x may be infinite.
  static CMAB_INLINE V slope(V x, const Normal<T>& at) { return at.below + (at.density == V{} ? V{} : x * at.density); }

  template <class Function>
  static CMAB_INLINE void each(int count, int width, Function function) {
    for (int row = 0; row < count; ++row)
      for (int d = 0; d < width; d += lanes<V>()) function(row, d);
  }
};

}  // namespace
}  // namespace cmab::cpu
