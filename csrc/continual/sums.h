// The guarded sums of a sliding window on the CPU. A row of log-scale c holds, for a query's logits S,
//   exp(-c) sum exp(S) v  |  phi = exp(-c) sum exp(S)  |  c  |  the peak of phi  |  exp(-c) sum exp(S) |v|_1  |  its
//   peak
// with peaks since the row was last recomputed. A new token is added, and the token that leaves is subtracted. The
// largest terms leave their rounding errors behind. So the row is recomputed from the window when phi, or the size of
// its values, has fallen so far below its peak that such an error becomes visible. Internal linkage, as in simd.h.
#pragma once

#include "continual/rows.h"

namespace cmab::cpu {
namespace {

constexpr double kLeastOfPeak = 0.5;  // a row is recomputed if one of its sums is below this share of its peak
constexpr int64_t kSmallWindow = 4;   // windows up to this size are always recomputed: this is as fast, and exact

// Scratch for attending to a head's window.
template <class T>
struct WindowScratch {
  T *keys, *values;  // kBlockRows rows of keys and of values
  T* weights;        // n, padded

  WindowScratch(Arena& arena, const StreamShape& shape)
      : keys(arena.take<T>(size_t(kBlockRows) * shape.key_width)),
        values(arena.take<T>(size_t(kBlockRows) * shape.value_width)),
        weights(arena.take<T>(padded<T>(shape.window))) {}
};

// Writes Delta V, over the `window` tokens before `end`, to `to`; returns the log-scale and the sum of the row.
template <class T>
Total<T> attend_window(const StreamShape& shape, const T* query, const Ring& keys, const Ring& values, int64_t end,
                       const WindowScratch<T>& scratch, T* to) {
  const int64_t window = shape.window, begin = end - window;
  const auto block = [&](int64_t i) { return least(window - i, kBlockRows); };
  for (int64_t i = 0; i < window; i += kBlockRows)
    make_logits(query, ring_rows(keys, begin + i, block(i), scratch.keys), block(i), shape.key_width, shape.scale,
                scratch.weights + i);
  const Total<T> total = exponentiate(scratch.weights, window);
  for (int64_t i = 0; i < window; i += kBlockRows)
    add_rows(scratch.weights + i, ring_rows(values, begin + i, block(i), scratch.values), block(i), shape.value_width,
             i == 0, to);
  return total;
}

// |v|_1 of one token's values.
template <class T>
inline T size_of(const T* values, int width) {
  using V = Vector<T>;
  V size{};
  for_each_vector<V>(width,
                     [&](int64_t d, int64_t in_vector) { size += magnitude(load_first<V>(values + d, in_vector)); });
  return sum_lanes(size);
}

// The sum of exp(S - c) |v|_1 over the window before `end`; attend_window must have left the exponentials in scratch.
template <class T>
T size_of_window(const StreamShape& shape, const Ring& values, int64_t end, const WindowScratch<T>& scratch) {
  using V = Vector<T>;
  const int64_t window = shape.window, begin = end - window;
  V size{};
  for (int64_t i = 0; i < window; i += kBlockRows) {
    const int64_t count = least(window - i, kBlockRows);
    const Tile<T> rows = ring_rows(values, begin + i, count, scratch.values);
    for (int64_t k = 0; k < count; ++k)
      for_each_vector<V>(shape.value_width, [&](int64_t d, int64_t in_vector) {
        size += scratch.weights[i + k] * magnitude(load_first<V>(rows.rows + k * rows.stride + d, in_vector));
      });
  }
  return sum_lanes(size);
}

// Scratch for an exchange of tokens, one element per row.
template <class T>
struct RowScratch {
  T *added, *removed;  // logits of the two tokens, then their weights
  T* kept;             // the row's rescaling factor; after is_sound, whether it is sound
  T *phi, *top, *peak, *size, *largest;

  RowScratch(Arena& arena, int64_t rows) {
    for (T** each : {&added, &removed, &kept, &phi, &top, &peak, &size, &largest})
      *each = arena.take<T>(padded<T>(rows));
  }
};

// The values of the token that enters and of the token that leaves.
template <class T>
struct Exchange {
  const T *added, *removed;
};

// The rows of sums of a head, and their update when one token enters and one leaves.
template <class T>
class GuardedSums {
  using V = Vector<T>;
  static constexpr int kTile = lanes<V>() < 4 ? lanes<V>() : 4;  // rows that are updated side by side

 public:
  GuardedSums(int64_t rows, int value_width, const RowScratch<T>& scratch)
      : rows_(rows), width_(value_width), stride_(value_width + kExtraSums), at_(scratch) {}

  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }
  // The place where the caller puts the logits of both tokens, one per row.
  T* added() { return at_.added; }
  T* removed() { return at_.removed; }

  // Writes the last columns of a row that was recomputed; `size` is the size of its values.
  void put(T* sums, int64_t row, const Total<T>& total, T size) const {
    T* extra = sums + row * stride_ + width_;
    extra[0] = total.sum, extra[1] = total.top, extra[2] = total.sum, extra[3] = extra[4] = size;
  }

  // Writes `rows` rows of `from`, with the tokens exchanged, to `to`. Calls make_afresh(row) where the guard requires
  // it.
  template <class MakeAfresh>
  void exchange(const T* from, T* to, int64_t rows, const Exchange<T>& values, const MakeAfresh& make_afresh) {
    gather(from, rows);
    weigh(rows, size_of(values.added, width_), size_of(values.removed, width_));
    for_each_tile<kTile>(0, rows, [&](int64_t first, auto tile) {
      update_rows<decltype(tile)::value>(from + first * stride_, to + first * stride_, first, values);
    });
    for (int64_t r = 0; r < rows; ++r) {
      T* extra = to + r * stride_ + width_;
      extra[0] = at_.phi[r], extra[1] = at_.top[r], extra[2] = at_.peak[r];
      extra[3] = at_.size[r], extra[4] = at_.largest[r];
    }
    if (!is_sound(rows))
      for (int64_t r = 0; r < rows; ++r)
        if (at_.kept[r] == 0) make_afresh(r);
  }

 private:
  void gather(const T* from, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      const T* extra = from + r * stride_ + width_;
      at_.phi[r] = extra[0], at_.top[r] = extra[1], at_.peak[r] = extra[2];
      at_.size[r] = extra[3], at_.largest[r] = extra[4];
    }
    for (int64_t r = rows; r < next_multiple(rows, lanes<V>()); ++r) {
      at_.phi[r] = at_.peak[r] = at_.size[r] = at_.largest[r] = 1, at_.top[r] = at_.added[r] = 0;
      at_.removed[r] = -std::numeric_limits<T>::infinity();
    }
  }

  // Turns the logits into weights relative to the row's log-scale; if the new logit is far above it, the log-scale
  // becomes that logit. Exchanges the tokens in all sums but those of the values; `come` and `gone` are the sizes of
  // the values of the two tokens.
  void weigh(int64_t rows, T come, T gone) const {
    for (int64_t r = 0; r < rows; r += lanes<V>()) {
      const V logit = load<V>(at_.added + r), before = load<V>(at_.top + r);
      const auto rises = logit > before + T(kHeadroom);
      const V top = rises ? logit : before;
      // the error of exp2(0) may be an epsilon, which would accumulate with every token
      const V kept = rises ? exponential(before - top) : broadcast<V>(T(1));
      const V added = exponential(logit - top);
      const V removed = exponential(load<V>(at_.removed + r) - top);
      const V phi = load<V>(at_.phi + r) * kept + added - removed;
      const V size = load<V>(at_.size + r) * kept + come * added - gone * removed;
      store(at_.kept + r, kept);
      store(at_.added + r, added);
      store(at_.removed + r, removed);
      store(at_.top + r, top);
      store(at_.phi + r, phi);
      store(at_.peak + r, maximum(load<V>(at_.peak + r) * kept, phi));
      store(at_.size + r, size);
      store(at_.largest + r, maximum(load<V>(at_.largest + r) * kept, size));
    }
  }

  template <int R>
  CMAB_INLINE void update_rows(const T* from, T* to, int64_t first, const Exchange<T>& values) const {
    int64_t column = 0;
    for (; column + 4 * lanes<V>() <= width_; column += 4 * lanes<V>())
      update_columns<R, 4>(from, to, first, values, column, lanes<V>());
    for (; column + lanes<V>() <= width_; column += lanes<V>())
      update_columns<R, 1>(from, to, first, values, column, lanes<V>());
    if (column < width_) update_columns<R, 1>(from, to, first, values, column, width_ - column);
  }

  template <int R, int C>
  CMAB_INLINE void update_columns(const T* from, T* to, int64_t first, const Exchange<T>& values, int64_t column,
                                  int64_t in_last) const {
    const auto elements = [&](int c) { return c + 1 < C ? int64_t(lanes<V>()) : in_last; };
    V come[C], gone[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      come[c] = load_first<V>(values.added + column + c * lanes<V>(), elements(c));
      gone[c] = load_first<V>(values.removed + column + c * lanes<V>(), elements(c));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const T kept = at_.kept[first + r], added = at_.added[first + r], removed = at_.removed[first + r];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const int64_t at = r * stride_ + column + c * lanes<V>();
        const V sum = load_first<V>(from + at, elements(c)) * kept + come[c] * added - gone[c] * removed;
        store_first(to + at, sum, elements(c));
      }
    }
  }

  // Whether every row is sound. kept[r] becomes 0 if row r is not sound (or is NaN), and 1 otherwise.
  bool is_sound(int64_t rows) const {
    bool all = true;
    for (int64_t r = 0; r < rows; r += lanes<V>()) {
      const V size = load<V>(at_.size + r);
      const auto sure = magnitude(load<V>(at_.top + r)) <= kLargestSure<T>;
      const auto sound = sure & (load<V>(at_.phi + r) >= load<V>(at_.peak + r) * T(kLeastOfPeak)) &
                         (size >= load<V>(at_.largest + r) * T(kLeastOfPeak)) & (size <= kLargest<T>);
      store(at_.kept + r, sound ? broadcast<V>(T(1)) : V{});
      all &= !any(~sound);
    }
    return all;
  }

  const int64_t rows_;
  const int width_;
  const int64_t stride_;
  const RowScratch<T> at_;
};

}  // namespace
}  // namespace cmab::cpu
