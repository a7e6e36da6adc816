// The guarded sums of a sliding window on the CPU. A row of log-scale c holds, for a query's logits S,
//   exp(-c) sum exp(S) v  |  exp(-c) sum exp(S)  |  c  |  the peak of the second since the row was last recomputed.
// A new token is added, the one that leaves is subtracted. A subtraction leaves behind the rounding error of the term:
// the row is recomputed from the window before that shows. Internal linkage, as in simd.h.
#pragma once

#include "continual/rows.h"

namespace cmab::cpu {
namespace {

constexpr int kExtra = 3;             // columns of a row beside the values'
constexpr double kLeastOfPeak = 0.5;  // a row is recomputed if its sum is below this share of its peak,
constexpr double kMostRemoved = 2;    // or the values subtracted exceed this multiple of those left
constexpr int64_t kSmallWindow = 4;   // up to this size rows are always recomputed: as fast, and exact

// Scratch for attending to a head's window.
template <class T>
struct WindowScratch {
  T *keys, *values;  // kBlockRows rows of each
  T* weights;        // n, padded

  WindowScratch(Arena& arena, const StreamShape& shape)
      : keys(arena.take<T>(size_t(kBlockRows) * shape.key_width)),
        values(arena.take<T>(size_t(kBlockRows) * shape.value_width)),
        weights(arena.take<T>(padded<T>(shape.window))) {}
};

// Writes Delta V, over the `window` tokens before `end`, to `to`; returns the row's log-scale and sum.
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

// Scratch for an exchange of tokens, one element per row.
template <class T>
struct RowScratch {
  T *added, *removed;  // logits of the two tokens, then their weights
  T* kept;             // the row's rescaling factor; after is_sound, whether it is sound
  T *top, *sum, *peak;
  T* size;  // sum |.| of the row's values

  RowScratch(Arena& arena, int64_t rows) {
    for (T** each : {&added, &removed, &kept, &top, &sum, &peak, &size}) *each = arena.take<T>(padded<T>(rows));
  }
};

// The values of the token that comes and of the one that leaves.
template <class T>
struct Exchange {
  const T *added, *removed;
};

// The rows of sums of a head, and their update when a token comes and one leaves.
template <class T>
class GuardedSums {
  using V = Vector<T>;
  static constexpr int kTile = lanes<V>() < 4 ? lanes<V>() : 4;  // rows that are updated side by side

 public:
  GuardedSums(int64_t rows, int value_width, const RowScratch<T>& scratch)
      : rows_(rows), width_(value_width), stride_(value_width + kExtra), at_(scratch) {}

  int64_t stride() const { return stride_; }
  // Where the caller puts the logits of both tokens, one per row.
  T* added() { return at_.added; }
  T* removed() { return at_.removed; }

  // Writes the last columns of a row that was recomputed.
  void put(T* sums, int64_t row, const Total<T>& total) const {
    T* extra = sums + row * stride_ + width_;
    extra[0] = total.sum, extra[1] = total.top, extra[2] = total.sum;
  }

  // Writes `rows` rows of `from`, with the tokens exchanged, to `to`. Calls make_afresh(row) where the guard requires
  // it.
  template <class MakeAfresh>
  void exchange(const T* from, T* to, int64_t rows, const Exchange<T>& values, const MakeAfresh& make_afresh) {
    gather(from, rows);
    weigh(rows);
    for_each_tile<kTile>(0, rows, [&](int64_t first, auto tile) {
      update_rows<decltype(tile)::value>(from + first * stride_, to + first * stride_, first, values);
    });
    for (int64_t r = 0; r < rows; ++r) {
      T* extra = to + r * stride_ + width_;
      extra[0] = at_.sum[r], extra[1] = at_.top[r], extra[2] = at_.peak[r];
    }
    if (!is_sound(rows, size_of(values.added), size_of(values.removed)))
      for (int64_t r = 0; r < rows; ++r)
        if (at_.kept[r] == 0) make_afresh(r);
  }

 private:
  void gather(const T* from, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      const T* extra = from + r * stride_ + width_;
      at_.sum[r] = extra[0], at_.top[r] = extra[1], at_.peak[r] = extra[2];
    }
    for (int64_t r = rows; r < next_multiple(rows, lanes<V>()); ++r) {
      at_.sum[r] = at_.peak[r] = 1, at_.top[r] = at_.added[r] = at_.size[r] = 0;
      at_.removed[r] = -std::numeric_limits<T>::infinity();
    }
  }

  // Turns the logits into weights relative to the larger of the row's log-scale and the new logit.
  void weigh(int64_t rows) const {
    for (int64_t r = 0; r < rows; r += lanes<V>()) {
      const V logit = load<V>(at_.added + r), before = load<V>(at_.top + r), top = maximum(before, logit);
      // exp2(0) may be off by an epsilon, which would accumulate with every token.
      const V kept = logit > before ? exponential(before - top) : broadcast<V>(T(1));
      const V added = exponential(logit - top);
      const V removed = exponential(load<V>(at_.removed + r) - top);
      const V sum = load<V>(at_.sum + r) * kept + added - removed;
      store(at_.kept + r, kept);
      store(at_.added + r, added);
      store(at_.removed + r, removed);
      store(at_.top + r, top);
      store(at_.sum + r, sum);
      store(at_.peak + r, maximum(load<V>(at_.peak + r) * kept, sum));
    }
  }

  template <int R>
  CMAB_INLINE void update_rows(const T* from, T* to, int64_t first, const Exchange<T>& values) const {
    V size[R] = {};
    int64_t column = 0;
    for (; column + 4 * lanes<V>() <= width_; column += 4 * lanes<V>())
      update_columns<R, 4>(from, to, first, values, column, lanes<V>(), size);
    for (; column + lanes<V>() <= width_; column += lanes<V>())
      update_columns<R, 1>(from, to, first, values, column, lanes<V>(), size);
    if (column < width_) update_columns<R, 1>(from, to, first, values, column, width_ - column, size);
    const V sizes = sum_lanes(size);
    for (int r = 0; r < R; ++r) at_.size[first + r] = sizes[r];
  }

  template <int R, int C>
  CMAB_INLINE void update_columns(const T* from, T* to, int64_t first, const Exchange<T>& values, int64_t column,
                                  int64_t in_last, V (&size)[R]) const {
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
        size[r] += magnitude(sum);
      }
    }
  }

  T size_of(const T* values) const {
    V size{};
    for_each_vector<V>(width_,
                       [&](int64_t d, int64_t in_vector) { size += magnitude(load_first<V>(values + d, in_vector)); });
    return sum_lanes(size);
  }

  // Whether every row is sound; kept[r] becomes 0 where one is not (or is NaN) and 1 elsewhere.
  bool is_sound(int64_t rows, T come, T gone) const {
    bool all = true;
    for (int64_t r = 0; r < rows; r += lanes<V>()) {
      const V sum = load<V>(at_.sum + r), left = load<V>(at_.size + r) + load<V>(at_.added + r) * come;
      const auto sure = magnitude(load<V>(at_.top + r)) <= kLargestSure<T>;
      const auto sound = sure & (sum >= load<V>(at_.peak + r) * T(kLeastOfPeak)) &
                         (load<V>(at_.removed + r) * gone <= left * T(kMostRemoved)) & (left <= kLargest<T>);
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
