// LayerNorm of rows and its gradient:
//
//   normed = x^ * weight + bias      x^ = (x - mean) / deviation      deviation = sqrt(mean of (x - mean)^2 + eps)
//   dx = (g - mean of g - x^ * mean of (g * x^)) / deviation      g = dnormed * weight
//
// Internal linkage, as in simd.h.
#pragma once

#include "common/panels.h"
#include "linear/tiles.h"

namespace cmab::cpu {
namespace {

template <class T>
struct Normaliser {
  using V = Vector<T>;
  static constexpr int kLanes = lanes<V>();
  static constexpr int kRows = least(4, kLanes);  // rows at a time

  struct Stats {
    T mean, scale;  // scale = 1 / deviation
  };
  static size_t stats_bytes() { return kRowTile * sizeof(Stats); }

  static void normalise(RowTile rows, int count, int width, const Norm& norm, void* stats, RowTile to) {
    const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
    for_each_tile<kRows>(0, count, [&](int first, auto number) {
      constexpr int R = decltype(number)::value;
      const V mean = sums<R>(width, [&](int r, int d) { return Tiles<T>::load_at(rows, first + r, d); }) / T(width);
      const V squares = sums<R>(width, [&](int r, int d) {
        const V apart = within(width, d, Tiles<T>::load_at(rows, first + r, d) - mean[r]);
        return apart * apart;
      });
      const V scale = T(1) / square_root(squares / T(width) + T(norm.eps));
      for (int r = 0; r < R; ++r) {
        static_cast<Stats*>(stats)[first + r] = {mean[r], scale[r]};
        T* target = row_of<T>(to, first + r);
        for (int d = 0; d < width; d += kLanes) {
          const V apart = Tiles<T>::load_at(rows, first + r, d) - mean[r];
          store(target + d, apart * scale[r] * load<V>(weight + d) + load<V>(bias + d));
        }
      }
    });
    Tiles<T>::clear_past(to, count, width);
  }

  static void backward(RowTile rows, RowTile dnormed, int count, int width, const Norm& norm, const void* stats,
                       RowTile drows, void* dweight, void* dbias) {
    const T* weight = static_cast<const T*>(norm.weight);
    for_each_tile<kRows>(0, count, [&](int first, auto number) {
      constexpr int R = decltype(number)::value;
      const Stats* found = static_cast<const Stats*>(stats) + first;
      const auto slope = [&](int r, int d) { return Tiles<T>::load_at(dnormed, first + r, d) * load<V>(weight + d); };
      const auto unit = [&](int r, int d) {
        return within(width, d, (Tiles<T>::load_at(rows, first + r, d) - found[r].mean) * found[r].scale);
      };
      const V mean = sums<R>(width, slope) / T(width);
      const V along = sums<R>(width, [&](int r, int d) { return slope(r, d) * unit(r, d); }) / T(width);
      for (int r = 0; r < R; ++r)
        for (int d = 0; d < width; d += kLanes) {
          const V change = (slope(r, d) - mean[r] - unit(r, d) * along[r]) * found[r].scale;
          add_to(row_of<T>(drows, first + r) + d, within(width, d, change));
        }
    });
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

  // x in those lanes from column d on that are columns of the row; 0 past its end.
  static CMAB_INLINE V within(int width, int d, V x) {
    if (width - d >= kLanes) return x;
    return lane_numbers<V>() < broadcast<V>(T(width - d)) ? x : V{};
  }

  // Lane r is the sum of term(r, d) over a row.
  template <int R, class Term>
  static CMAB_INLINE V sums(int width, Term term) {
    V parts[R] = {};
    for (int d = 0; d < width; d += kLanes)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) parts[r] += term(r, d);
    return sum_lanes(parts);
  }
};

}  // namespace
}  // namespace cmab::cpu
