// Rows of sums that slide with the window on a GPU, one for each query: exp(-c) Delta V, exp(-c) phi(Delta), the
// log-scale c, the peak of the scaled phi since the row was last recomputed, the size exp(-c) sum exp(S) |v|_1 of the
// values, and its peak.
//
// A new token is added, and the token that leaves is subtracted. When phi or the size falls below half of its peak, the
// rounding errors of earlier sums become visible, so the row is recomputed from the window. A row is also recomputed
// after every kSchedule tokens, and when its logits are too large for the digits of their type.
#pragma once

#include "continual/schedule.h"
#include "continual/window.cuh"

namespace cmab::cuda {

template <class T>
class SlidingRows {
  using S = Sum<T>;

 public:
  CMAB_DEVICE SlidingRows(const Block& block, const StepCall& call, const Window<T>& window, int64_t head, int rows)
      : block_(block),
        window_(window),
        logits_(block, call.scale, call.key_width),
        of_window_(block, call, window),
        memory_(call.sums.of_head<S>(head, int64_t(rows) * (call.value_width + kExtraSums))),
        width_(call.value_width),
        rows_(rows) {
    S* shared = reinterpret_cast<S*>(block.shared);
    changes_ = shared + Layout::changes;
    stale_ = shared + Layout::stale;
    sizes_ = shared + Layout::sizes_of_tokens;
    extras_ = shared + Layout::extras;
  }

  CMAB_DEVICE const S* row(int r) const { return memory_.to + int64_t(r) * (width_ + kExtraSums); }
  CMAB_DEVICE S phi(int r) const { return row(r)[width_]; }

  // Updates all rows after a token was added: row r becomes the updated row r + shift, and the last `shift` rows are
  // new. `query(r)` is the query of row r; `due(r)` says whether the row must be recomputed in any case.
  template <class Query, class Due>
  CMAB_DEVICE void slide(int shift, Query query, Due due) {
    for (int first = 0; first < rows_; first += kTileRows) {
      const int count = least(kTileRows, rows_ - first), kept = most(0, least(count, rows_ - shift - first));
      measure_tokens();
      logits_.multiply(
          2 * kept, [&](int pair) { return query(first + pair / 2); },
          [&](int pair) { return window_.key(pair % 2 ? -1 : window_.tokens() - 1); });
      const bool any_stale = block_.any_thread([&](int i) {
        if (i >= count) return false;
        const bool stale = i >= kept || slide_scale(i, old_row(first + shift + i)) || due(first + i);
        stale_[i] = stale;
        return stale;
      });
      slide_sums(first, kept, shift);
      for (int i = 0; any_stale && i < count; ++i)
        if (stale_[i] != 0) renew(first + i, query(first + i));
    }
    memory_.from = memory_.to;
  }

 private:
  CMAB_DEVICE const S* old_row(int r) const { return memory_.from + int64_t(r) * (width_ + kExtraSums); }
  CMAB_DEVICE S* new_row(int r) const { return memory_.to + int64_t(r) * (width_ + kExtraSums); }

  // Computes the parts of |v|_1 of the token that enters, and then of the token that leaves.
  CMAB_DEVICE void measure_tokens() const {
    each_index(block_, 2 * kParts, [&](int item) {
      const T* values = window_.value(item < kParts ? window_.tokens() - 1 : -1);
      S size = 0;
      for (int e = item % kParts; e < width_; e += kParts) size += std::fabs(S(as_sum(values[e])));
      sizes_[item] = size;
    });
  }
  CMAB_DEVICE S size_of(int token) const {
    S size = 0;
    for (int part = 0; part < kParts; ++part) size += sizes_[token * kParts + part];
    return size;
  }

  // Computes the last columns of row i of a tile, and the factors `change` for its sums. Returns true if the row must
  // be recomputed: its sums have lost their digits or are too large, or c is so large that a subtraction may not remove
  // what was added.
  CMAB_DEVICE bool slide_scale(int i, const S* old) {
    const S comes = logits_[2 * i], goes = logits_[2 * i + 1], before = old[width_ + 1];
    const S top = comes > before + kHeadroom ? comes : before;
    S* change = changes_ + 3 * i;
    change[0] = std::exp(before - top);
    change[1] = std::exp(comes - top);
    change[2] = std::exp(goes - top);
    const S phi = slid(change, old[width_], 1, 1), peak = change[0] * old[width_ + 2];
    const S size = slid(change, old[width_ + 3], size_of(0), size_of(1)), largest = change[0] * old[width_ + 4];
    S* extra = extras_ + kExtraSums * i;
    extra[0] = phi;
    extra[1] = top;
    extra[2] = phi > peak ? phi : peak;
    extra[3] = size;
    extra[4] = size > largest ? size : largest;
    return !(phi >= peak / 2 && size >= largest / 2 && size <= Largest<S>::value &&
             std::fabs(top) <= kLargestSure<S>);  // true for a NaN, too
  }

  // change[0] * sum + change[1] * comes - change[2] * goes.
  static CMAB_DEVICE S slid(const S* change, S sum, S comes, S goes) {
    return std::fma(-change[2], goes, std::fma(change[1], comes, change[0] * sum));
  }

  // Updates the sums of `count` rows. Works in place: a chunk is read before any of it is written, and rows move up.
  CMAB_DEVICE void slide_sums(int first, int count, int shift) {
    const int chunk = kHeld * block_.threads;
    for (int begin = 0; begin < count * width_; begin += chunk) {
      block_.each_thread([&](int thread) {
        if (begin == 0 && thread < count) {
          CMAB_UNROLL
          for (int k = 0; k < kExtraSums; ++k) new_row(first + thread)[width_ + k] = extras_[kExtraSums * thread + k];
        }
        CMAB_UNROLL
        for (int h = 0; h < kHeld; ++h) {
          const int item = least(begin + h * block_.threads + thread, count * width_ - 1);  // past the end: the last
          const int i = item / width_, e = item % width_;
          const S comes = as_sum(window_.value(window_.tokens() - 1)[e]), goes = as_sum(window_.value(-1)[e]);
          held_[thread][h] = slid(changes_ + 3 * i, old_row(first + shift + i)[e], comes, goes);
        }
      });
      block_.each_thread([&](int thread) {
        CMAB_UNROLL
        for (int h = 0; h < kHeld; ++h) {
          const int item = begin + h * block_.threads + thread;
          if (item < count * width_) new_row(first + item / width_)[item % width_] = held_[thread][h];
        }
      });
    }
  }

  // Recomputes row r from the window.
  template <class Query>
  CMAB_DEVICE void renew(int r, const Query* query) {
    of_window_.sum(query);
    block_.each_thread([&](int thread) {
      S* to = new_row(r);
      for (int e = thread; e < width_; e += block_.threads) to[e] = of_window_.total(e);
      if (thread > 0) return;
      to[width_] = to[width_ + 2] = of_window_.phi();
      to[width_ + 1] = of_window_.reference(thread);
      to[width_ + 3] = to[width_ + 4] = of_window_.size();
    });
  }

  const Block& block_;
  const Window<T>& window_;
  Logits<S> logits_;
  WindowSums<T> of_window_;
  Renewed<S> memory_;
  int width_, rows_;
  S *changes_, *stale_, *sizes_, *extras_;
  PerThread<S[kHeld]> held_;
};

}  // namespace cmab::cuda
