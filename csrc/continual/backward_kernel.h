// The gradient of one head's step of continual Nyström attention: fixed landmarks, single outputs. It runs backwards
// over the tokens and carries G, the gradient of the sums, from each token to the one before it:
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

template <class T>
class NystromBackward {
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
      : step_(step),
        head_(head),
        m_(step.landmarks),
        key_width_(step.key_width),
        value_width_(step.value_width),
        columns_(step.value_width + kRecorded),
        query_(of(step.query, head, step.tokens * key_width_)),
        keys_(of(step.keys, head, step.rows * key_width_)),
        values_(of(step.values, head, step.rows * value_width_)),
        sums_(of(step.sums, head, m_ * sums_stride())),
        history_(of(step.history, head, step.tokens * m_ * columns_)),
        landmark_queries_(of(step.landmark_queries, head, m_ * key_width_)),
        landmark_keys_(of(step.landmark_keys, head, m_ * key_width_)),
        inverse_(of(step.inverse, head, m_ * m_)),
        dout_(of(step.dout, head, step.tokens * value_width_)),
        dnew_sums_(of(step.dnew_sums, head, m_ * sums_stride())),
        dquery_(of(step.dquery, head, step.tokens * key_width_)),
        dsums_(of(step.dsums, head, m_ * sums_stride())),
        dlandmark_queries_(of(step.dlandmark_queries, head, m_ * key_width_)),
        dlandmark_keys_(of(step.dlandmark_keys, head, m_ * key_width_)),
        dinverse_(of(step.dinverse, head, m_ * m_)) {
    for (T** each : {&near_, &shares_, &dshares_, &added_, &removed_}) *each = arena.take<T>(padded<T>(m_));
    weights_ = arena.take<T>(padded<T>(step.window));
    dkeys_ = arena.take<T>(step.rows * key_width_);
    dvalues_ = arena.take<T>(step.rows * value_width_);
  }

  template <class Memory>
  static auto of(Memory* memory, int64_t head, int64_t elements) {
    using Element = std::conditional_t<std::is_const_v<Memory>, const T, T>;
    return memory ? static_cast<Element*>(memory) + head * elements : nullptr;
  }

  int64_t sums_stride() const { return value_width_ + kExtraSums; }

  void run() {
    const auto clear = [](T* to, int64_t elements) { __builtin_memset(to, 0, elements * sizeof(T)); };
    clear(dquery_, step_.tokens * key_width_);
    clear(dkeys_, step_.rows * key_width_);
    clear(dvalues_, step_.rows * value_width_);
    clear(dsums_, m_ * sums_stride());
    clear(dlandmark_queries_, m_ * key_width_);
    clear(dlandmark_keys_, m_ * key_width_);
    clear(dinverse_, m_ * m_);
    if (dnew_sums_)
      for (int64_t r = 0; r < m_; ++r)
        __builtin_memcpy(gradient(r), dnew_sums_ + r * sums_stride(), (value_width_ + 1) * sizeof(T));
    for (int64_t i = step_.tokens - 1; i >= 0; --i) {
      if (dout_) differentiate_output(i);
      differentiate_sums(i);
    }
    if (step_.dnew_queries) return_ring(nullptr, key_width_, step_.dnew_queries, step_.dqueries, step_.dquery);
    return_ring(dkeys_, key_width_, step_.dnew_keys, step_.dkeys, step_.dkey);
    return_ring(dvalues_, value_width_, step_.dnew_values, step_.dvalues, step_.dvalue);
  }

  // Writes the gradients of a ring before the step and of the new tokens, from that of the ring after it and those of
  // the `rows` that the step read. Without `rows`, adds to the gradient of the new tokens.
  void return_ring(const T* rows, int width, const void* dnew, void* dring, void* dtokens) const {
    const int64_t window = step_.window, tokens = step_.tokens, position = step_.positions[head_];
    const int64_t old = step_.rows - tokens;
    const T* const after = of(dnew, head_, step_.new_capacity * width);
    T* const before = of(dring, head_, step_.capacity * width);
    T* const put = of(dtokens, head_, tokens * width);
    const size_t bytes = width * sizeof(T);
    const auto row_after = [&](int64_t token) { return after + token % step_.new_capacity * width; };
    for (int64_t i = 0; i < step_.capacity; ++i) {
      const int64_t token = position - window + i;
      T* const to = before + token % step_.capacity * width;
      if (after && i >= tokens && i < window)
        __builtin_memcpy(to, row_after(token), bytes);
      else
        __builtin_memset(to, 0, bytes);
      if (rows && i < old) add_scaled(T(1), rows + i * width, width, to);
    }
    if (rows) __builtin_memcpy(put, rows + old * width, tokens * bytes);
    if (after)
      for (int64_t i = 0; i < tokens; ++i) add_scaled(T(1), row_after(position + i), width, put + i * width);
  }

  // G of a row: (E + 1) elements, of the sums of values and of phi, where the gradient of the sums before is returned.
  T* gradient(int64_t row) const { return dsums_ + row * sums_stride(); }
  const T* after(int64_t token, int64_t row) const { return history_ + (token * m_ + row) * columns_; }
  T log_scale_before(int64_t token, int64_t row) const {
    return token ? after(token - 1, row)[value_width_ + 1] : sums_[row * sums_stride() + value_width_ + 1];
  }

  // out = (near / sum near) inverse (Delta V / phi).
  void differentiate_output(int64_t token) {
    const T* const query = query_ + token * key_width_;
    const T* const dout = dout_ + token * value_width_;
    make_logits(query, {landmark_keys_, key_width_}, m_, key_width_, step_.scale, near_);
    const T share = T(1) / exponentiate(near_, m_).sum;
    for (int64_t i = 0; i < m_; ++i) near_[i] *= share;
    add_rows(near_, {inverse_, m_}, m_, int(m_), true, shares_);
    for (int64_t r = 0; r < m_; ++r) {
      const T* const row = after(token, r);
      const T over_phi = T(1) / row[value_width_];
      dshares_[r] = dot(dout, row, value_width_) * over_phi;
      add_scaled(shares_[r] * over_phi, dout, value_width_, gradient(r));
      gradient(r)[value_width_] -= shares_[r] * over_phi * dshares_[r];
    }
    T mean = 0;
    for (int64_t i = 0; i < m_; ++i) {
      add_scaled(near_[i], dshares_, int(m_), dinverse_ + i * m_);
      added_[i] = dot(inverse_ + i * m_, dshares_, int(m_));
      mean += near_[i] * added_[i];
    }
    for (int64_t i = 0; i < m_; ++i) {
      const T dlogit = T(step_.scale) * near_[i] * (added_[i] - mean);
      add_scaled(dlogit, landmark_keys_ + i * key_width_, key_width_, dquery_ + token * key_width_);
      add_scaled(dlogit, query, key_width_, dlandmark_keys_ + i * key_width_);
    }
  }

  void differentiate_sums(int64_t token) {
    const int64_t come = step_.rows - step_.tokens + token, gone = token;
    const Tile<T> queries{landmark_queries_, key_width_};
    make_logits(keys_ + come * key_width_, queries, m_, key_width_, step_.scale, added_);
    make_logits(keys_ + gone * key_width_, queries, m_, key_width_, step_.scale, removed_);
    for (int64_t r = 0; r < m_; ++r) {
      const T* const row = after(token, r);
      const T log_scale = row[value_width_ + 1];
      if (row[value_width_ + 2] != 0) {
        differentiate_window(token, r, log_scale);
        continue;
      }
      const T before = log_scale_before(token, r);
      differentiate_weight(r, come, exponential_of(added_[r] - log_scale));
      differentiate_weight(r, gone, -exponential_of(removed_[r] - log_scale));
      if (before != log_scale) {
        const T kept = exponential_of(before - log_scale);
        for (int e = 0; e <= value_width_; ++e) gradient(r)[e] *= kept;
      }
    }
  }

  // The gradient of a row that was recomputed from the window after this token.
  void differentiate_window(int64_t token, int64_t row, T log_scale) {
    const T* const query = landmark_queries_ + row * key_width_;
    const int64_t first = token + 1;
    make_logits(query, {keys_ + first * key_width_, key_width_}, step_.window, key_width_, step_.scale, weights_);
    for (int64_t i = 0; i < step_.window; ++i)
      differentiate_weight(row, first + i, exponential_of(weights_[i] - log_scale));
    __builtin_memset(gradient(row), 0, (value_width_ + 1) * sizeof(T));
  }

  // The gradient of `weight` [value, 1], a part of a row of sums, where |weight| = exp(logit - log-scale).
  void differentiate_weight(int64_t row, int64_t token, T weight) {
    const T* const key = keys_ + token * key_width_;
    const T* const query = landmark_queries_ + row * key_width_;
    const T dweight = dot(gradient(row), values_ + token * value_width_, value_width_) + gradient(row)[value_width_];
    const T dlogit = T(step_.scale) * weight * dweight;
    add_scaled(weight, gradient(row), value_width_, dvalues_ + token * value_width_);
    add_scaled(dlogit, query, key_width_, dkeys_ + token * key_width_);
    add_scaled(dlogit, key, key_width_, dlandmark_queries_ + row * key_width_);
  }

  static T exponential_of(T x) { return exponential(broadcast<Vector<T>>(x))[0]; }

  const NystromGradient& step_;
  const int64_t head_, m_;
  const int key_width_, value_width_;
  const int64_t columns_;
  const T *const query_, *const keys_, *const values_, *const sums_, *const history_;
  const T *const landmark_queries_, *const landmark_keys_, *const inverse_, *const dout_, *const dnew_sums_;
  T *const dquery_, *const dsums_;
  T *const dlandmark_queries_, *const dlandmark_keys_, *const dinverse_;
  T *near_, *shares_, *dshares_, *added_, *removed_, *weights_;
  T *dkeys_, *dvalues_;  // of the rows of keys and values
};

}  // namespace
}  // namespace cmab::cpu
