// A step of continual Nyström attention on a GPU, for one head, by one block.
#pragma once

#include "common/stream.h"
#include "continual/pinv_block.cuh"
#include "continual/sliding_rows.cuh"

namespace cmab::cuda {

template <class T>
class NystromStepBlock {
  using S = Sum<T>;

 public:
  CMAB_DEVICE NystromStepBlock(const Block& block, const NystromStepCall& call, int64_t head, Window<T>& window,
                               SlidingRows<T>& rows)
      : block_(block),
        call_(call),
        head_(head),
        landmarks_(call.landmarks),
        window_(window),
        rows_(rows),
        logits_(block, call.scale, call.key_width),
        landmark_queries_(of_head(call.landmark_queries).to),
        landmark_keys_(of_head(call.landmark_keys).to),
        inverse_(call.inverse.of_head<S>(head, call.landmarks * call.landmarks).to) {
    S* shared = reinterpret_cast<S*>(block.shared);
    affinity_ = shared + Layout::affinity;
    mixture_ = shared + Layout::mixture;
    matrices_ = shared + Layout(call.value_width, call.landmarks).matrices;
  }

  CMAB_DEVICE void run() {
    window_.move();
    for (int t = 0; t < call_.tokens; ++t) {
      const bool spoilt = window_.admit(t);
      const int segment = call_.fixed ? 0 : segment_ending(window_.position(), call_.window, landmarks_);
      renew_landmarks(segment, t == 0);
      rows_.slide(
          segment > 0 ? 1 : 0, [&](int r) { return landmark_query(r); },
          [&](int r) { return spoilt || (window_.position() - r) % kSchedule == 0; });
      if (segment > 0) invert();
      if (!call_.retroactive || t == call_.tokens - 1) put_out(t);
    }
    window_.put_position();
  }

 private:
  CMAB_DEVICE const S* landmark_query(int r) const { return landmark_queries_ + r * call_.key_width; }
  CMAB_DEVICE const S* landmark_key(int r) const { return landmark_keys_ + r * call_.key_width; }

  CMAB_DEVICE Renewed<S> of_head(const Renewal& landmarks) const {
    return landmarks.of_head<S>(head_, int64_t(landmarks_) * call_.key_width);
  }

  // Before the first token, copies the landmarks to the memory that the step writes. If a segment has ended, its means
  // replace the oldest landmark.
  CMAB_DEVICE void renew_landmarks(int segment, bool first) const {
    const bool moving = first && call_.landmark_keys.from != call_.landmark_keys.to;
    if (segment == 0 && !moving) return;
    move_up(of_head(call_.landmark_queries), segment > 0, first);
    move_up(of_head(call_.landmark_keys), segment > 0, first);
    if (segment > 0) return put_means(segment);
    const S* inverse = call_.inverse.of_head<S>(head_, landmarks_ * landmarks_).from;
    move_elements<S>(
        block_, landmarks_ * landmarks_, [&](int i) { return inverse + i; }, [&](int i) { return inverse_ + i; });
  }

  // Drops the first `rows` landmarks and moves the others up, from the old memory for the first token.
  CMAB_DEVICE void move_up(const Renewed<S>& landmarks, int rows, bool first) const {
    const S* from = (first ? landmarks.from : landmarks.to) + rows * call_.key_width;
    move_elements<S>(
        block_, (landmarks_ - rows) * call_.key_width, [&](int i) { return from + i; },
        [&](int i) { return landmarks.to + i; });
  }

  // Writes the means of the newest `segment` tokens' queries and keys as the last landmark.
  CMAB_DEVICE void put_means(int segment) const {
    each_index(block_, call_.key_width, [&](int d) {
      const S share = S(1) / segment;  // applied to each term: the plain sum could overflow
      S query = 0, key = 0;
      for (int i = call_.window - segment; i < call_.window; ++i) {
        query = std::fma(share, S(as_sum(window_.query(i)[d])), query);
        key = std::fma(share, S(as_sum(window_.key(i)[d])), key);
      }
      const int last = (landmarks_ - 1) * call_.key_width + d;
      landmark_queries_[last] = query;
      landmark_keys_[last] = key;
    });
  }

  // affinity_ = exp(S - max S) of `count` queries with all landmarks. It can be read in the next phase; count * m <=
  // kTilePairs.
  template <class Query>
  CMAB_DEVICE void attend(int count, Query query) const {
    const int m = landmarks_, pairs = count * m;
    logits_.multiply(
        pairs, [&](int pair) { return query(pair / m); }, [&](int pair) { return landmark_key(pair % m); });
    each_index(block_, pairs, [&](int pair) { mixture_[pair] = logits_[pair]; });
    each_index(block_, pairs, [&](int pair) {
      const S* of_query = mixture_ + pair / m * m;
      S largest = of_query[0];
      for (int j = 1; j < m; ++j) largest = of_query[j] > largest ? of_query[j] : largest;
      affinity_[pair] = std::exp(mixture_[pair] - largest);
    });
  }

  CMAB_DEVICE int queries_at_once() const { return kTilePairs / landmarks_; }

  // Sets inverse_ to the pseudo-inverse of softmax(scale q~ k~') over the landmarks q~, k~.
  CMAB_DEVICE void invert() const {
    const int m = landmarks_;
    const PinvBlock<S> pinv(block_, matrices_, m);
    for (int first = 0; first < m; first += queries_at_once()) {
      const int count = least(queries_at_once(), m - first);
      attend(count, [&](int i) { return landmark_query(first + i); });
      each_index(block_, count * m, [&](int pair) {
        S sum = 0;
        for (int j = 0; j < m; ++j) sum += affinity_[pair / m * m + j];
        pinv.matrix(first + pair / m, pair % m) = affinity_[pair] / sum;
      });
    }
    pinv.invert(call_.iterations);
    each_index(block_, m * m, [&](int i) { inverse_[i] = pinv.inverse(i / m, i % m); });
  }

  // Writes softmax(scale q k~') inverse (Delta V / phi) for the newest token, number t of the call, or for the whole
  // window if retroactive.
  CMAB_DEVICE void put_out(int t) const {
    const bool all = call_.retroactive;
    const int m = landmarks_, width = call_.value_width, first = all ? 0 : call_.window - 1;
    const int tokens = all ? call_.window : 1;
    T* out = static_cast<T*>(call_.out) + (all ? head_ * call_.window : head_ * call_.tokens + t) * width;
    for (int begin = 0; begin < tokens; begin += queries_at_once()) {
      const int count = least(queries_at_once(), tokens - begin);
      attend(count, [&](int i) { return window_.query(first + begin + i); });
      each_index(block_, count * m, [&](int pair) {
        const S* of_query = affinity_ + pair / m * m;
        S sum = 0, mixed = 0;
        for (int r = 0; r < m; ++r) {
          sum += of_query[r];
          mixed = std::fma(of_query[r], inverse_[r * m + pair % m], mixed);
        }
        mixture_[pair] = mixed / sum / rows_.phi(pair % m);
      });
      each_index(block_, count * width, [&](int item) {
        const int i = item / width, e = item % width;
        S sum = 0;
        for (int r = 0; r < m; ++r) sum = std::fma(mixture_[i * m + r], rows_.row(r)[e], sum);
        round_to(sum, out + (int64_t(begin) + i) * width + e);
      });
    }
  }

  const Block& block_;
  const NystromStepCall& call_;
  int64_t head_;
  int landmarks_;
  Window<T>& window_;
  SlidingRows<T>& rows_;
  Logits<S> logits_;
  S *landmark_queries_, *landmark_keys_, *inverse_;
  S *affinity_, *mixture_, *matrices_;
};

template <class T>
CMAB_DEVICE void step_head(const Block& block, const NystromStepCall& call, int64_t head) {
  Window<T> window(block, call, head);
  SlidingRows<T> rows(block, call, window, head, call.landmarks);
  NystromStepBlock<T>(block, call, head, window, rows).run();
}

// Launches the step asynchronously; allocates nothing.
void nystrom_step(const NystromStepCall& call, Stream on);

}  // namespace cmab::cuda
