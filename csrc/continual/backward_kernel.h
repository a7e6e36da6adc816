// The gradient of one head's steps of continual attention. For Nyström attention with landmarks
// that do not change, and for retroactive outputs of exact attention, it runs backwards over the
// tokens, and carries G, the gradient of the sums, from each token to the token before it:
//   sums' = kept sums + a [v_in, 1] - b [v_out, 1],  a = exp(s_in - c'),  b = exp(s_out - c'),  kept = exp(c - c')
//   dsums = kept G,  dv_in += a G,  ds_in = a (G . [v_in, 1]),  and likewise, with -b, for the token that left.
// A row that the step recomputed from the window depends on its tokens and not on the sums before. The log-scales are
// constants: no output depends on them. Internal linkage, as in simd.h.
#pragma once

#include "continual/rows.h"

namespace cmab::cpu {
namespace {

template <class T>
T dot(const T* a, const T* b, int width) {
  using V = Vector<T>;
  V sum{};
  for_each_vector<V>(width, [&](int64_t d, int64_t in_vector) {
    sum += load_first<V>(a + d, in_vector) * load_first<V>(b + d, in_vector);
  });
  return sum_lanes(sum);
}

// to += factor * row.
template <class T>
void add_scaled(T factor, const T* row, int width, T* to) {
  using V = Vector<T>;
  for_each_vector<V>(width, [&](int64_t d, int64_t in_vector) {
    store_first(to + d, load_first<V>(to + d, in_vector) + factor * load_first<V>(row + d, in_vector), in_vector);
  });
}

// The common part of the gradients of both kinds of step: the tokens that the step read, and the
// rings.
template <class T>
class StepBackward {
 protected:
  StepBackward(const StepGradient& step, int64_t head, Arena& arena)
      : shape_(step),
        head_(head),
        key_width_(step.key_width),
        value_width_(step.value_width),
        query_(of(step.query, step.query_rows * key_width_)),
        keys_(of(step.keys, step.rows * key_width_)),
        values_(of(step.values, step.rows * value_width_)),
        dout_(of(step.dout, (step.retroactive ? step.window : step.tokens) * value_width_)) {
    dquery_ = arena.take<T>(step.query_rows * key_width_);
    dkeys_ = arena.take<T>(step.rows * key_width_);
    dvalues_ = arena.take<T>(step.rows * value_width_);
    weights_ = arena.take<T>(padded<T>(step.window));
    dweights_ = arena.take<T>(padded<T>(step.window));
  }

  // The part of this head in a tensor with this number of elements for each head.
  template <class Memory>
  auto of(Memory* memory, int64_t elements) const {
    using Element = std::conditional_t<std::is_const_v<Memory>, const T, T>;
    return memory ? static_cast<Element*>(memory) + head_ * elements : nullptr;
  }

  static void clear(T* to, int64_t elements) { __builtin_memset(to, 0, elements * sizeof(T)); }

  void clear_tokens() const {
    clear(dquery_, shape_.query_rows * key_width_);
    clear(dkeys_, shape_.rows * key_width_);
    clear(dvalues_, shape_.rows * value_width_);
  }

  void return_tokens() const {
    return_ring(dquery_, shape_.query_rows, key_width_, shape_.dnew_queries, shape_.dqueries, shape_.dquery);
    return_ring(dkeys_, shape_.rows, key_width_, shape_.dnew_keys, shape_.dkeys, shape_.dkey);
    return_ring(dvalues_, shape_.rows, value_width_, shape_.dnew_values, shape_.dvalues, shape_.dvalue);
  }

  const StepGradient& shape_;
  const int64_t head_;
  const int key_width_, value_width_;
  const T *const query_, *const keys_, *const values_, *const dout_;
  T *dquery_, *dkeys_, *dvalues_;  // of the tokens that the step read
  T *weights_, *dweights_;         // n each, padded

 private:
  // Writes the gradients of a ring before the step and of the new tokens, from that of the ring after it and those of
  // the `count` rows that the step read.
  void return_ring(const T* rows, int64_t count, int width, const void* dnew, void* dring, void* dtokens) const {
    const int64_t window = shape_.window, tokens = shape_.tokens, position = shape_.positions[head_];
    const int64_t old = count - tokens;
    const T* const after = of(dnew, shape_.new_capacity * width);
    T* const before = of(dring, shape_.capacity * width);
    T* const put = of(dtokens, tokens * width);
    const auto row_after = [&](int64_t token) { return after + token % shape_.new_capacity * width; };
    for (int64_t i = 0; before && i < shape_.capacity; ++i) {
      const int64_t token = position - window + i;
      T* const to = before + token % shape_.capacity * width;
      if (after && i >= tokens && i < window)
        __builtin_memcpy(to, row_after(token), width * sizeof(T));
      else
        clear(to, width);
      if (i < old) add_scaled(T(1), rows + i * width, width, to);
    }
    __builtin_memcpy(put, rows + old * width, tokens * width * sizeof(T));
    if (after)
      for (int64_t i = 0; i < tokens; ++i) add_scaled(T(1), row_after(position + i), width, put + i * width);
  }
};

// The gradient of rows of sums. Row q has the same number after every token. In exact attention, a row belongs to a
// query that the step read, and rows i + 1 to i + n are those of the window after token i; otherwise all rows are.
template <class T>
class SumsBackward : protected StepBackward<T> {
  using Base = StepBackward<T>;

 protected:
  using Base::clear, Base::of;
  using Base::dkeys_, Base::dvalues_, Base::key_width_, Base::keys_, Base::shape_, Base::value_width_, Base::values_;
  using Base::weights_;

  SumsBackward(const SumsGradient& step, int64_t head, Arena& arena)
      : Base(step, head, arena),
        count_(step.count),
        slides_(!step.landmark_queries),
        new_sums_(of(step.new_sums, count_ * sums_stride())),
        queries_(slides_ ? this->query_ : of(step.landmark_queries, count_ * key_width_)),
        dqueries_(slides_ ? this->dquery_ : of(step.dlandmark_queries, count_ * key_width_)),
        sums_(of(step.sums, count_ * sums_stride())),
        history_(of(step.history, step.tokens * count_ * history_stride())),
        dnew_sums_(of(step.dnew_sums, count_ * sums_stride())),
        dsums_(of(step.dsums, count_ * sums_stride())) {
    gradients_ = arena.take<T>(rows() * columns());
    for (T** each : {&added_, &removed_}) *each = arena.take<T>(padded<T>(count_));
  }

  int64_t sums_stride() const { return value_width_ + kExtraSums; }
  // The first row after a token.
  int64_t first_row(int64_t token) const { return slides_ ? token + 1 : 0; }
  int64_t last_first_row() const { return first_row(shape_.tokens - 1); }

  // G of a row, (E + 1) elements: for the sums of values, and for phi.
  T* gradient(int64_t row) const { return gradients_ + row * columns(); }
  // The history of the `index`-th row after a token, which for single outputs begins with its sums.
  const T* after(int64_t token, int64_t index) const { return history_ + (token * count_ + index) * history_stride(); }

  void begin_sums() const {
    this->clear_tokens();
    clear(gradients_, rows() * columns());
    for (int64_t i = 0; dnew_sums_ && i < count_; ++i)
      __builtin_memcpy(gradient(last_first_row() + i), dnew_sums_ + i * sums_stride(), columns() * sizeof(T));
  }

  void return_sums() const {
    this->return_tokens();
    if (!dsums_) return;
    clear(dsums_, count_ * sums_stride());
    for (int64_t i = 0; i < count_; ++i)
      __builtin_memcpy(dsums_ + i * sums_stride(), gradient(i), columns() * sizeof(T));
  }

  // Replaces G by the gradient of the sums before the token.
  void differentiate_sums(int64_t token) {
    const int64_t come = shape_.rows - shape_.tokens + token, gone = token, first = first_row(token);
    const Tile<T> queries{queries_ + first * key_width_, key_width_};
    make_logits(keys_ + come * key_width_, queries, count_, key_width_, shape_.scale, added_);
    make_logits(keys_ + gone * key_width_, queries, count_, key_width_, shape_.scale, removed_);
    for (int64_t i = 0; i < count_; ++i) {
      const T* const end = after(token, i) + history_stride() - kRecorded;
      const T log_scale = end[0];
      if (end[1] != 0) {
        differentiate_window(token, first + i, log_scale);
        continue;
      }
      const T before = log_scale_before(token, i + slides_);
      differentiate_weight(first + i, come, exponential_of(added_[i] - log_scale));
      differentiate_weight(first + i, gone, -exponential_of(removed_[i] - log_scale));
      if (before != log_scale) {
        const T kept = exponential_of(before - log_scale);
        for (int e = 0; e <= value_width_; ++e) gradient(first + i)[e] *= kept;
      }
    }
  }

  const int64_t count_;
  const bool slides_;
  const T* const new_sums_;
  T *added_, *removed_;

 private:
  static T exponential_of(T x) { return exponential(broadcast<Vector<T>>(x))[0]; }
  int64_t rows() const { return last_first_row() + count_; }
  int64_t columns() const { return value_width_ + 1; }
  int64_t history_stride() const { return history_columns(shape_.retroactive, value_width_); }
  // Without sums before the step, its history marks all rows of the first token as recomputed, and this is not called.
  T log_scale_before(int64_t token, int64_t index) const {
    return token ? after(token, index - count_)[history_stride() - kRecorded]
                 : sums_[index * sums_stride() + value_width_ + 1];
  }

  // The gradient of a row that was recomputed from the window after this token.
  void differentiate_window(int64_t token, int64_t row, T log_scale) {
    const T* const query = queries_ + row * key_width_;
    const int64_t first = token + 1;
    make_logits(query, {keys_ + first * key_width_, key_width_}, shape_.window, key_width_, shape_.scale, weights_);
    for (int64_t i = 0; i < shape_.window; ++i)
      differentiate_weight(row, first + i, exponential_of(weights_[i] - log_scale));
    __builtin_memset(gradient(row), 0, (value_width_ + 1) * sizeof(T));
  }

  // The gradient of `weight` [value, 1], a part of a row of sums, where |weight| = exp(logit - log-scale).
  void differentiate_weight(int64_t row, int64_t token, T weight) {
    const T* const key = keys_ + token * key_width_;
    const T* const query = queries_ + row * key_width_;
    const T dweight = dot(gradient(row), values_ + token * value_width_, value_width_) + gradient(row)[value_width_];
    const T dlogit = T(shape_.scale) * weight * dweight;
    add_scaled(weight, gradient(row), value_width_, dvalues_ + token * value_width_);
    add_scaled(dlogit, query, key_width_, dkeys_ + token * key_width_);
    add_scaled(dlogit, key, key_width_, dqueries_ + row * key_width_);
  }

  const T* const queries_;
  T* const dqueries_;
  const T *const sums_, *const history_, *const dnew_sums_;
  T* const dsums_;
  T* gradients_;
};

template <class T>
class NystromBackward : SumsBackward<T> {
  using Base = SumsBackward<T>;
  using Base::added_, Base::after, Base::clear, Base::gradient, Base::new_sums_, Base::of;
  using Base::dout_, Base::dquery_, Base::key_width_, Base::query_, Base::value_width_;

 public:
  static size_t bytes(const NystromGradient& step) {
    Arena arena(nullptr);
    NystromBackward(step, 0, arena);
    return arena.used();
  }

  static void run(const NystromGradient& step, int64_t head, void* scratch) {
    Arena arena(scratch);
    NystromBackward(step, head, arena).run();
  }

 private:
  NystromBackward(const NystromGradient& step, int64_t head, Arena& arena)
      : Base(step, head, arena),
        step_(step),
        m_(step.count),
        landmark_keys_(of(step.landmark_keys, m_ * key_width_)),
        inverse_(of(step.inverse, m_ * m_)),
        dlandmark_keys_(of(step.dlandmark_keys, m_ * key_width_)),
        dinverse_(of(step.dinverse, m_ * m_)) {
    for (T** each : {&near_, &shares_, &dshares_}) *each = arena.take<T>(padded<T>(m_));
    for (T** each : {&means_, &mixed_, &dmixed_}) *each = arena.take<T>(step.retroactive ? m_ * value_width_ : 0);
  }

  void run() {
    this->begin_sums();
    clear(of(step_.dlandmark_queries, m_ * key_width_), m_ * key_width_);
    clear(dlandmark_keys_, m_ * key_width_);
    clear(dinverse_, m_ * m_);
    if (dout_ && step_.retroactive) differentiate_window_outputs();
    for (int64_t i = step_.tokens - 1; i >= 0; --i) {
      if (dout_ && !step_.retroactive) differentiate_output(i);
      this->differentiate_sums(i);
    }
    this->return_sums();
  }

  // near = exp(logits) / sum of a query with each landmark key.
  void attend_landmarks(const T* query) {
    make_logits(query, {landmark_keys_, key_width_}, m_, key_width_, step_.scale, near_);
    const T share = T(1) / exponentiate(near_, m_).sum;
    for (int64_t i = 0; i < m_; ++i) near_[i] *= share;
  }

  // The gradient of a softmax over the landmarks, near_, whose gradient is in added_.
  void differentiate_softmax(const T* query, T* dquery) {
    const T mean = dot(near_, added_, int(m_));
    for (int64_t i = 0; i < m_; ++i) {
      const T dlogit = T(step_.scale) * near_[i] * (added_[i] - mean);
      add_scaled(dlogit, landmark_keys_ + i * key_width_, key_width_, dquery);
      add_scaled(dlogit, query, key_width_, dlandmark_keys_ + i * key_width_);
    }
  }

  // out = near (inverse means), with means = Delta V / phi.
  void differentiate_output(int64_t token) {
    const T* const query = query_ + token * key_width_;
    const T* const dout = dout_ + token * value_width_;
    attend_landmarks(query);
    add_rows(near_, {inverse_, m_}, m_, int(m_), true, shares_);
    for (int64_t r = 0; r < m_; ++r) {
      const T* const row = after(token, r);
      const T over_phi = T(1) / row[value_width_];
      dshares_[r] = dot(dout, row, value_width_) * over_phi;
      add_scaled(shares_[r] * over_phi, dout, value_width_, gradient(r));
      gradient(r)[value_width_] -= shares_[r] * over_phi * dshares_[r];
    }
    for (int64_t i = 0; i < m_; ++i) {
      add_scaled(near_[i], dshares_, int(m_), dinverse_ + i * m_);
      added_[i] = dot(inverse_ + i * m_, dshares_, int(m_));
    }
    differentiate_softmax(query, dquery_ + token * key_width_);
  }

  // The same for the outputs of all queries of the window after the last token: with W = inverse means,
  //   dW += near' dout,  dinverse = dW means',  dmeans = inverse' dW.
  void differentiate_window_outputs() {
    for (int64_t r = 0; r < m_; ++r) {
      const T* const sums = new_sums_ + r * this->sums_stride();
      for (int e = 0; e < value_width_; ++e) means_[r * value_width_ + e] = sums[e] / sums[value_width_];
    }
    for (int64_t i = 0; i < m_; ++i)
      add_rows(inverse_ + i * m_, {means_, value_width_}, m_, value_width_, true, mixed_ + i * value_width_);
    clear(dmixed_, m_ * value_width_);
    for (int64_t i = 0; i < step_.window; ++i) {
      const T* const query = query_ + (step_.tokens + i) * key_width_;
      const T* const dout = dout_ + i * value_width_;
      attend_landmarks(query);
      for (int64_t r = 0; r < m_; ++r) {
        added_[r] = dot(dout, mixed_ + r * value_width_, value_width_);
        add_scaled(near_[r], dout, value_width_, dmixed_ + r * value_width_);
      }
      differentiate_softmax(query, dquery_ + (step_.tokens + i) * key_width_);
    }
    for (int64_t r = 0; r < m_; ++r) {
      const T over_phi = T(1) / new_sums_[r * this->sums_stride() + value_width_];
      T* const dmean = mixed_;  // no longer needed
      clear(dmean, value_width_);
      for (int64_t i = 0; i < m_; ++i) {
        const T* const row = dmixed_ + i * value_width_;
        dinverse_[i * m_ + r] += dot(row, means_ + r * value_width_, value_width_);
        add_scaled(inverse_[i * m_ + r], row, value_width_, dmean);
      }
      add_scaled(over_phi, dmean, value_width_, gradient(r));
      gradient(r)[value_width_] -= over_phi * dot(dmean, means_ + r * value_width_, value_width_);
    }
  }

  const NystromGradient& step_;
  const int64_t m_;
  const T *const landmark_keys_, *const inverse_;
  T *const dlandmark_keys_, *const dinverse_;
  T *near_, *shares_, *dshares_;
  T *means_, *mixed_, *dmixed_;  // (m, E) each, for retroactive outputs
};

// The gradient of the outputs of exact attention for all queries of the window, out = Delta V / phi.
template <class T>
class RetroactiveBackward : SumsBackward<T> {
  using Base = SumsBackward<T>;
  using Base::dout_, Base::gradient, Base::value_width_;

 public:
  static size_t bytes(const SumsGradient& step) {
    Arena arena(nullptr);
    RetroactiveBackward(step, 0, arena);
    return arena.used();
  }

  static void run(const SumsGradient& step, int64_t head, void* scratch) {
    Arena arena(scratch);
    RetroactiveBackward made(step, head, arena);
    made.begin_sums();
    if (made.dout_) made.differentiate_outputs();
    for (int64_t i = step.tokens - 1; i >= 0; --i) made.differentiate_sums(i);
    made.return_sums();
  }

 private:
  RetroactiveBackward(const SumsGradient& step, int64_t head, Arena& arena) : Base(step, head, arena) {}

  void differentiate_outputs() const {
    for (int64_t i = 0; i < this->count_; ++i) {
      const T *const sums = this->new_sums_ + i * this->sums_stride(), *const dout = dout_ + i * value_width_;
      T* const to = gradient(this->last_first_row() + i);
      const T over_phi = T(1) / sums[value_width_];
      add_scaled(over_phi, dout, value_width_, to);
      to[value_width_] -= over_phi * over_phi * dot(dout, sums, value_width_);
    }
  }
};

// The gradient of exact attention. Single outputs are out = softmax(scale q K') V, where K and V are the window that
// ends with the token.
template <class T>
class AttentionBackward : StepBackward<T> {
  using Base = StepBackward<T>;
  using Base::dout_, Base::dweights_, Base::keys_, Base::query_, Base::shape_, Base::values_, Base::weights_;
  using Base::dquery_, Base::dkeys_, Base::dvalues_, Base::key_width_, Base::value_width_;

 public:
  static size_t bytes(const AttentionGradient& step) {
    if (step.retroactive) return RetroactiveBackward<T>::bytes(step);
    Arena arena(nullptr);
    AttentionBackward(step, 0, arena);
    return arena.used();
  }

  static void run(const AttentionGradient& step, int64_t head, void* scratch) {
    if (step.retroactive) return RetroactiveBackward<T>::run(step, head, scratch);
    Arena arena(scratch);
    AttentionBackward made(step, head, arena);
    made.clear_tokens();
    for (int64_t i = 0; made.dout_ && i < step.tokens; ++i) made.differentiate_output(i);
    made.return_tokens();
  }

 private:
  AttentionBackward(const StepGradient& step, int64_t head, Arena& arena) : Base(step, head, arena) {}

  void differentiate_output(int64_t token) {
    const T* const query = query_ + token * key_width_;
    const T* const dout = dout_ + token * value_width_;
    const int64_t first = token + 1, window = shape_.window;
    make_logits(query, {keys_ + first * key_width_, key_width_}, window, key_width_, shape_.scale, weights_);
    const T share = T(1) / exponentiate(weights_, window).sum;
    T mean = 0;
    for (int64_t i = 0; i < window; ++i) {
      weights_[i] *= share;
      dweights_[i] = dot(dout, values_ + (first + i) * value_width_, value_width_);
      mean += weights_[i] * dweights_[i];
      add_scaled(weights_[i], dout, value_width_, dvalues_ + (first + i) * value_width_);
    }
    for (int64_t i = 0; i < window; ++i) {
      const T dlogit = T(shape_.scale) * weights_[i] * (dweights_[i] - mean);
      add_scaled(dlogit, keys_ + (first + i) * key_width_, key_width_, dquery_ + token * key_width_);
      add_scaled(dlogit, query, key_width_, dkeys_ + (first + i) * key_width_);
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
