// The window of a stream on a GPU: its rings of tokens, and a query's softmax sums over it.
#pragma once

#include "continual/step.cuh"

namespace cmab::cuda {

constexpr int kHeld = 4;  // elements that a thread loads at a time

// *to(i) = *from(i) for i < count, provided that no from(i) is a to(j) of a smaller j.
template <class T, class From, class To>
CMAB_DEVICE void move_elements(const Block& block, int count, From from, To to) {
  PerThread<T[kHeld]> held;
  for (int begin = 0; begin < count; begin += kHeld * block.threads) {
    block.each_thread([&](int thread) {
      CMAB_UNROLL
      for (int h = 0; h < kHeld; ++h)  // past the end, the last index is used
        held[thread][h] = *from(least(begin + h * block.threads + thread, count - 1));
    });
    block.each_thread([&](int thread) {
      CMAB_UNROLL
      for (int h = 0; h < kHeld; ++h) {
        const int i = begin + h * block.threads + thread;
        if (i < count) *to(i) = held[thread][h];
      }
    });
  }
}

// The n newest tokens of a head. Only the row of the oldest token is stored; token i of the window is i rows further,
// with wrap-around.
template <class T>
class Window {
 public:
  CMAB_DEVICE Window(const Block& block, const StepCall& call, int64_t head)
      : block_(block),
        call_(call),
        head_(head),
        queries_(ring(call.queries, call.key_width).to),
        keys_(ring(call.keys, call.key_width).to),
        values_(ring(call.values, call.value_width).to),
        position_(*clock().from),
        oldest_(int((position_ - call.window) % call.capacity_to)) {}

  CMAB_DEVICE int64_t position() const { return position_; }
  CMAB_DEVICE int tokens() const { return call_.window; }

  // The rows of token i of the window; i = -1 is the token that left last.
  CMAB_DEVICE const T* query(int i) const { return queries_ + row(i) * call_.key_width; }
  CMAB_DEVICE const T* key(int i) const { return keys_ + row(i) * call_.key_width; }
  CMAB_DEVICE const T* value(int i) const { return values_ + row(i) * call_.value_width; }

  // Copies the window to the new rings, if there are any.
  CMAB_DEVICE void move() const {
    move(call_.queries, call_.key_width);
    move(call_.keys, call_.key_width);
    move(call_.values, call_.value_width);
  }

  // Adds token t of the call; the oldest token leaves the window. Returns true if the token that leaves was not finite:
  // then the sums that contain it are not finite either, and must be recomputed.
  CMAB_DEVICE bool admit(int t) {
    ++position_;
    oldest_ = wrapped(oldest_ + 1, call_.capacity_to);
    const int64_t b = head_ / call_.heads, h = head_ % call_.heads, newest = row(call_.window - 1);
    const Matrix<T> query_in = call_.query.template rows<T>(b, h, t, call_.key_width);
    const Matrix<T> key_in = call_.key.template rows<T>(b, h, t, call_.key_width);
    const Matrix<T> value_in = call_.value.template rows<T>(b, h, t, call_.value_width);
    return block_.any_thread([&](int thread) {
      bool finite = true;
      for (int d = thread; d < call_.key_width; d += block_.threads) {
        queries_[newest * call_.key_width + d] = query_in.data[d * query_in.column_stride];
        keys_[newest * call_.key_width + d] = key_in.data[d * key_in.column_stride];
        finite &= bool(std::isfinite(as_sum(key(-1)[d])));
      }
      for (int e = thread; e < call_.value_width; e += block_.threads) {
        values_[newest * call_.value_width + e] = value_in.data[e * value_in.column_stride];
        finite &= bool(std::isfinite(as_sum(value(-1)[e])));
      }
      return !finite;
    });
  }

  CMAB_DEVICE void put_position() const {
    block_.each_thread([&](int thread) {
      if (thread == 0) *clock().to = position_;
    });
  }

 private:
  static CMAB_DEVICE int wrapped(int row, int capacity) { return row < capacity ? row : row - capacity; }

  CMAB_DEVICE int64_t row(int i) const {
    return i < 0 && oldest_ == 0 ? call_.capacity_to - 1 : wrapped(oldest_ + i, call_.capacity_to);
  }

  CMAB_DEVICE Renewed<int64_t> clock() const { return call_.position.of_head<int64_t>(head_, 1); }

  CMAB_DEVICE Renewed<T> ring(const Renewal& of_all, int width) const {
    return {static_cast<const T*>(of_all.from) + head_ * call_.capacity_from * width,
            static_cast<T*>(of_all.to) + head_ * call_.capacity_to * width};
  }

  CMAB_DEVICE void move(const Renewal& of_all, int width) const {
    if (of_all.from == of_all.to) return;
    const Renewed<T> own = ring(of_all, width);
    const int first = int((position_ - call_.window) % call_.capacity_from);
    move_elements<T>(
        block_, call_.window * width,
        [&](int i) { return own.from + int64_t(wrapped(first + i / width, call_.capacity_from)) * width + i % width; },
        [&](int i) { return own.to + row(i / width) * width + i % width; });
  }

  const Block& block_;
  const StepCall& call_;
  int64_t head_;
  T *queries_, *keys_, *values_;
  int64_t position_;
  int oldest_;
};

// Logits scale a b' of pairs of vectors: one phase computes partial sums, the next adds them up. The bits of a pair do
// not depend on its neighbours, so exactly the value that was added to a sum is subtracted later.
template <class S>
class Logits {
 public:
  CMAB_DEVICE Logits(const Block& block, double scale, int width)
      : block_(block), parts_(reinterpret_cast<S*>(block.shared) + Layout::parts), scale_(S(scale)), width_(width) {}

  // The phase that computes the partial sums. left(i) and right(i) are the vectors of pair i, for i < pairs <=
  // kTilePairs.
  template <class Left, class Right>
  CMAB_DEVICE void multiply(int pairs, Left left, Right right) const {
    each_index(block_, pairs * kParts, [&](int item) {
      const int pair = item / kParts;
      const auto* a = left(pair);
      const auto* b = right(pair);
      S sum = 0;
      for (int d = item % kParts; d < width_; d += kParts)
        sum = std::fma(scale_ * S(as_sum(a[d])), S(as_sum(b[d])), sum);
      parts_[item] = sum;
    });
  }

  CMAB_DEVICE S operator[](int pair) const {
    const S* p = parts_ + pair * kParts;
    return clamped(((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])));
  }

 private:
  const Block& block_;
  S* parts_;
  S scale_;
  int width_;
};

// One query's sums over the window: c = max S, the sum of exp(S - c) v, and, in columns E and E + 1, the sums of
// exp(S - c) and of exp(S - c) |v|_1.
template <class T>
class WindowSums {
  using S = Sum<T>;

 public:
  CMAB_DEVICE WindowSums(const Block& block, const StepCall& call, const Window<T>& window)
      : block_(block), window_(window), logits_(block, call.scale, call.key_width), columns_(call.value_width + 2) {
    S* shared = reinterpret_cast<S*>(block.shared);
    weights_ = shared + Layout::weights;
    sizes_ = shared + Layout::sizes_of_window;
    maxima_ = shared + Layout::maxima;
    sums_ = shared + Layout::sums;
    groups_ = most(1, block.threads / columns_);
  }

  // Computes the sums; they can be read in the next phase.
  template <class Query>
  CMAB_DEVICE void sum(const Query* query) {
    for (int first = 0; first < window_.tokens(); first += kTilePairs)
      add_tile(query, first, least(kTilePairs, window_.tokens() - first));
    each_index(block_, columns_, [&](int column) {
      S total = 0;
      for (int group = 0; group < groups_; ++group) total += sums_[group * columns_ + column];
      sums_[column] = total;
    });
  }

  CMAB_DEVICE S total(int column) const { return sums_[column]; }
  CMAB_DEVICE S phi() const { return sums_[columns_ - 2]; }
  CMAB_DEVICE S size() const { return sums_[columns_ - 1]; }
  CMAB_DEVICE S reference(int thread) { return reference_[thread]; }

 private:
  // Adds tokens first to first + count - 1; keeps the largest logit so far in every thread.
  template <class Query>
  CMAB_DEVICE void add_tile(const Query* query, int first, int count) {
    logits_.multiply(count, [&](int) { return query; }, [&](int i) { return window_.key(first + i); });
    each_index(block_, count, [&](int i) {
      weights_[i] = logits_[i];
      S size = 0;
      for (int e = 0; e < columns_ - 2; ++e) size += std::fabs(S(as_sum(window_.value(first + i)[e])));
      sizes_[i * kParts] = size;
    });
    each_index(block_, kMaxima, [&](int part) {
      S largest = -Largest<S>::value;  // ignores NaN: the weight of a NaN is NaN in any case
      for (int i = part; i < count; i += kMaxima) largest = weights_[i] > largest ? weights_[i] : largest;
      maxima_[part] = largest;
    });
    block_.each_thread([&](int thread) {
      const S before = first == 0 ? -Largest<S>::value : reference_[thread];
      S top = before;
      for (int part = 0; part < kMaxima; ++part) top = maxima_[part] > top ? maxima_[part] : top;
      reference_[thread] = top;
      kept_[thread] = std::exp(before - top);
      if (thread < count) weights_[thread] = std::exp(weights_[thread] - top);
    });
    block_.each_thread([&](int thread) {
      for (int item = thread; item < groups_ * columns_; item += block_.threads) {
        const int group = item / columns_, column = item % columns_;
        S sum = first == 0 ? S(0) : kept_[thread] * sums_[item];
        for (int i = group; i < count; i += groups_) {
          const S value = column < columns_ - 2    ? S(as_sum(window_.value(first + i)[column]))
                          : column == columns_ - 2 ? S(1)
                                                   : sizes_[i * kParts];
          sum = std::fma(weights_[i], value, sum);
        }
        sums_[item] = sum;
      }
    });
  }

  const Block& block_;
  const Window<T>& window_;
  Logits<S> logits_;
  int columns_, groups_;
  S *weights_, *sizes_, *maxima_, *sums_;
  PerThread<S> reference_, kept_;
};

}  // namespace cmab::cuda
