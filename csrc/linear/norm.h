// LayerNorm of rows and its gradient:
//
//   normed = x^ * weight + bias      x^ = (x - mean) / deviation      deviation = sqrt(mean of (x - mean)^2 + eps)
//   dx = (g - mean of g - x^ * mean of (g * x^)) / deviation      g = dnormed * weight
//
// Internal linkage, as in simd.h.
#pragma once

#include "linear/tiles.h"

namespace cmab::cpu {
namespace {

template <class T>
struct Normaliser {
  using V = Vector<T>;
  static constexpr int kLanes = lanes<V>();

  struct Stats {
    T mean, scale;  // scale = 1 / deviation
  };
  static size_t stats_bytes() { return kRowTile * sizeof(Stats); }

  static void normalise(RowTile rows, int count, int width, const Norm& norm, void* stats, RowTile to) {
    const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
    for (int row = 0; row < count; ++row) {
      const T* from = row_of<T>(rows, row);
      const T mean = sum(width, [&](int d) { return load<V>(from + d); }) / width;
      const T squares = sum(width, [&](int d) {
        const V apart = within(width, d, load<V>(from + d) - mean);
        return apart * apart;
      });
      const T scale = T(1) / std::sqrt(squares / width + T(norm.eps));
      static_cast<Stats*>(stats)[row] = {mean, scale};
      T* target = row_of<T>(to, row);
      for (int d = 0; d < width; d += kLanes)
        store(target + d, (load<V>(from + d) - mean) * scale * load<V>(weight + d) + load<V>(bias + d));
    }
  }

  static void backward(RowTile rows, RowTile dnormed, int count, int width, const Norm& norm, const void* stats,
                       RowTile drows, void* dweight, void* dbias) {
    const T* weight = static_cast<const T*>(norm.weight);
    for (int row = 0; row < count; ++row) {
      const Stats& found = static_cast<const Stats*>(stats)[row];
      const T *x = row_of<T>(rows, row), *dy = row_of<T>(dnormed, row);
      const auto slope = [&](int d) { return load<V>(dy + d) * load<V>(weight + d); };
      const auto unit = [&](int d) { return within(width, d, (load<V>(x + d) - found.mean) * found.scale); };
      const T mean = sum(width, slope) / width;
      const T along = sum(width, [&](int d) { return slope(d) * unit(d); }) / width;
      T* to = row_of<T>(drows, row);
      for (int d = 0; d < width; d += kLanes) {
        const V change = (slope(d) - mean - unit(d) * along) * found.scale;
        store(to + d, load<V>(to + d) + within(width, d, change));
      }
    }
    for (int d = 0; d < width; d += kLanes) {
      V of_weight{}, of_bias{};
      for (int row = 0; row < count; ++row) {
        const Stats& found = static_cast<const Stats*>(stats)[row];
        const V dy = load<V>(row_of<T>(dnormed, row) + d);
        of_weight += dy * within(width, d, (load<V>(row_of<T>(rows, row) + d) - found.mean) * found.scale);
        of_bias += dy;
      }
      add_to(static_cast<T*>(dweight) + d, of_weight);
      add_to(static_cast<T*>(dbias) + d, of_bias);
    }
  }

 private:
  static CMAB_INLINE void add_to(T* sums, V x) { store(sums, load<V>(sums) + x); }

  // x in the lanes from column d on that are columns of the row, 0 past its end.
  static CMAB_INLINE V within(int width, int d, V x) {
    if (width - d >= kLanes) return x;
    return lane_numbers<V>() < broadcast<V>(T(width - d)) ? x : V{};
  }

  template <class Term>
  static CMAB_INLINE T sum(int width, Term term) {
    V sums{};
    for (int d = 0; d < width; d += kLanes) sums += term(d);
    T total = 0;
    for (int i = 0; i < kLanes; ++i) total += sums[i];
    return total;
  }
};

}  // namespace
}  // namespace cmab::cpu
