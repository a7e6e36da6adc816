// One head's steps of continual attention on the CPU, token by token: Nyström and exact. Internal linkage, as in
// simd.h.
#pragma once

#include "continual/sums.h"
#include "nystrom/kernel.h"

namespace cmab::cpu {
namespace {

// ---- tokens

// Whether all elements are finite, that is, no exponent has all bits set.
template <class Bits, Bits kExponent>
bool finite_rows(const void* data, const Operand& at, int64_t rows, int width) {
  const Bits* from = static_cast<const Bits*>(data);
  Bits found = 0;
  for (int64_t i = 0; i < rows; ++i, from += at.stride[2])
    if (at.stride[3] == 1)
      for (int d = 0; d < width; ++d) found |= (from[d] & kExponent) == kExponent;
    else
      for (int d = 0; d < width; ++d) found |= (from[d * at.stride[3]] & kExponent) == kExponent;
  return !found;
}

inline bool finite_rows(DType dtype, const Operand& operand, int64_t b, int64_t h, int64_t rows, int width) {
  const char* from =
      static_cast<const char*>(operand.data) + (b * operand.stride[0] + h * operand.stride[1]) * element_bytes(dtype);
  switch (dtype) {
    case DType::kFloat64:
      return finite_rows<uint64_t, 0x7ff0000000000000>(from, operand, rows, width);
    case DType::kFloat32:
      return finite_rows<uint32_t, 0x7f800000>(from, operand, rows, width);
    case DType::kBFloat16:
      return finite_rows<uint16_t, 0x7f80>(from, operand, rows, width);
    default:
      return finite_rows<uint16_t, 0x7c00>(from, operand, rows, width);
  }
}

inline bool finite_tokens(const Stream& stream, int64_t head) {
  const StreamShape& shape = stream.shape;
  const int64_t b = head / shape.heads, h = head % shape.heads;
  return finite_rows(shape.dtype, stream.query, b, h, shape.tokens, shape.key_width) &&
         finite_rows(shape.dtype, stream.key, b, h, shape.tokens, shape.key_width) &&
         finite_rows(shape.dtype, stream.value, b, h, shape.tokens, shape.value_width);
}

// A head's rings, and the new tokens that are written to them.
class Tokens {
 public:
  Tokens(const Stream& stream, int64_t head)
      : shape_(stream.shape),
        queries(ring(stream.queries, head, shape_.key_width)),
        keys(ring(stream.keys, head, shape_.key_width)),
        values(ring(stream.values, head, shape_.value_width)),
        sources_{of_head(stream.query, head), of_head(stream.key, head), of_head(stream.value, head)} {}

  // Copies the new token `index` to the rings as the stream's token `number`.
  void put(int64_t index, int64_t number) const {
    const Ring* rings[] = {&queries, &keys, &values};
    for (int i = 0; i < 3; ++i) {
      const Operand& source = sources_[i];
      const Ring& to = *rings[i];
      const size_t size = element_bytes(shape_.dtype);
      const char* from = static_cast<const char*>(source.data) + index * source.stride[2] * size;
      if (source.stride[3] == 1)
        __builtin_memcpy(to.row(number), from, to.row_bytes());
      else
        for (int d = 0; d < to.width; ++d)
          __builtin_memcpy(to.row(number) + d * size, from + d * source.stride[3] * size, size);
    }
  }

 private:
  const StreamShape& shape_;

 public:
  const Ring queries, keys, values;

 private:
  Ring ring(void* all, int64_t head, int width) const {
    return {shape_.dtype, static_cast<char*>(all) + head * shape_.capacity * width * element_bytes(shape_.dtype),
            shape_.capacity, width};
  }
  Operand of_head(Operand operand, int64_t head) const {
    const int64_t b = head / shape_.heads, h = head % shape_.heads;
    operand.data = static_cast<char*>(operand.data) +
                   (b * operand.stride[0] + h * operand.stride[1]) * element_bytes(shape_.dtype);
    return operand;
  }

  const Operand sources_[3];
};

// Scratch memory that both kinds of step need for a head.
template <class T>
struct HeadScratch {
  WindowScratch<T> window;
  RowScratch<T> rows;
  T *query, *added_key, *removed_key, *added_value, *removed_value;  // a row each
  T* out;

  HeadScratch(Arena& arena, const StreamShape& shape, int64_t count) : window(arena, shape), rows(arena, count) {
    for (T** each : {&query, &added_key, &removed_key}) *each = arena.take<T>(shape.key_width);
    for (T** each : {&added_value, &removed_value, &out}) *each = arena.take<T>(shape.value_width);
  }
};

// The window and guarded sums of a head, for both kinds of step.
template <class T>
class Head {
 public:
  Head(const Stream& stream, int64_t head, int64_t rows, const HeadScratch<T>& scratch)
      : shape_(stream.shape),
        tokens_(stream, head),
        position_(stream.positions[head]),
        scratch_(scratch),
        guarded_(rows, shape_.value_width, scratch.rows),
        new_sums_(static_cast<T*>(stream.new_sums) + head * rows * guarded_.stride()),
        sums_(stream.sums ? static_cast<const T*>(stream.sums) + head * rows * guarded_.stride() : new_sums_),
        history_(stream.history ? static_cast<T*>(stream.history) + head * shape_.tokens * rows * history_stride()
                                : nullptr),
        out_(static_cast<char*>(stream.out) + head * outputs() * shape_.value_width * element_bytes(shape_.dtype)) {}

 protected:
  int64_t outputs() const { return shape_.retroactive ? shape_.window : shape_.tokens; }
  int64_t taken() const { return position_ + index_; }

  // Puts the next token into the window. In its part of the history, no row counts as recomputed yet.
  void put_token() {
    tokens_.put(index_, taken());
    ++index_;
    for (int64_t row = 0; history_ && row < guarded_.rows(); ++row) recorded(row)[1] = 0;
  }

  // Computes the logits of `count` queries, from row `first` on, with the key of the newest token and with the key of
  // the token that left.
  void exchange_logits(Tile<T> queries, int64_t first, int64_t count) {
    const int64_t newest = taken() - 1;
    const auto with = [&](int64_t token, T* copy, T* logits) {
      make_logits(ring_rows(tokens_.keys, token, 1, copy).rows, queries, count, shape_.key_width, shape_.scale,
                  logits + first);
    };
    with(newest, scratch_.added_key, guarded_.added());
    with(newest - shape_.window, scratch_.removed_key, guarded_.removed());
  }

  // Adds the newest token to `rows` rows of the sums and subtracts the token that left; row `skipped` + i becomes row
  // i.
  template <class MakeAfresh>
  void exchange(int64_t skipped, int64_t rows, const MakeAfresh& make_afresh) {
    const int64_t newest = taken() - 1;
    const Exchange<T> values{ring_rows(tokens_.values, newest, 1, scratch_.added_value).rows,
                             ring_rows(tokens_.values, newest - shape_.window, 1, scratch_.removed_value).rows};
    if (shape_.window <= kSmallWindow)
      for (int64_t row = 0; row < rows; ++row) make_afresh(row);
    else
      guarded_.exchange(sums_ + skipped * guarded_.stride(), new_sums_, rows, values, make_afresh);
    sums_ = new_sums_;
  }

  // Recomputes a row of sums from the window.
  void make_afresh(const T* query, int64_t row) {
    const Total<T> total = attend_window(shape_, query, tokens_.keys, tokens_.values, taken(), scratch_.window,
                                         new_sums_ + row * guarded_.stride());
    guarded_.put(new_sums_, row, total, size_of_window(shape_, tokens_.values, taken(), scratch_.window));
    if (history_) recorded(row)[1] = 1;
  }

  // Copies the sums after the newest token to the history, as far as a gradient reads them.
  void record_sums() const {
    for (int64_t row = 0; history_ && row < guarded_.rows(); ++row) {
      const T* const sums = new_sums_ + row * guarded_.stride();
      T* const to = recorded(row);
      const int64_t before = history_stride() - kRecorded;
      __builtin_memcpy(to - before, sums, before * sizeof(T));
      to[0] = sums[shape_.value_width + 1];
    }
  }

  Tile<T> row_sums() const { return {new_sums_, guarded_.stride()}; }
  T weight_sum(int64_t row) const { return new_sums_[row * guarded_.stride() + shape_.value_width]; }

  void write(int64_t row, const T* from, T factor) const {
    const int width = shape_.value_width;
    if constexpr (sizeof(T) == 8) {
      write_as<double>(row * width, from, factor);
    } else {
      if (shape_.dtype == DType::kFloat32) write_as<float>(row * width, from, factor);
      if (shape_.dtype == DType::kBFloat16) write_as<BFloat16>(row * width, from, factor);
      if (shape_.dtype == DType::kFloat16) write_as<Float16>(row * width, from, factor);
    }
  }

  const StreamShape& shape_;
  const Tokens tokens_;
  const int64_t position_;  // before this step
  const HeadScratch<T> scratch_;
  int64_t index_ = 0;  // new tokens taken

 private:
  int64_t history_stride() const { return history_columns(shape_.retroactive, shape_.value_width); }
  // The kRecorded columns of a row after the newest token.
  T* recorded(int64_t row) const {
    return history_ + ((index_ - 1) * guarded_.rows() + row + 1) * history_stride() - kRecorded;
  }

  template <class Element>
  void write_as(int64_t at, const T* from, T factor) const {
    Element* to = reinterpret_cast<Element*>(out_) + at;
    for (int e = 0; e < shape_.value_width; ++e) narrow(from[e] * factor, to + e);
  }

  GuardedSums<T> guarded_;
  T* const new_sums_;
  const T* sums_;
  T* const history_;
  char* const out_;
};

// ---- Nyström

template <class T>
struct NystromScratch {
  HeadScratch<T> head;
  T *near, *shares;  // m each, padded
  T* kernel;         // Gamma / phi(Gamma), (m, m)
  T* pinv;
  T* values;  // for retroactive output: pinv (Delta V / phi(Delta)), (m, E)
  T* queries;
  size_t bytes;

  NystromScratch(const NystromStream& stream, void* memory) : NystromScratch(Arena(memory), stream) {}

 private:
  NystromScratch(Arena arena, const NystromStream& stream) : head(arena, stream.shape, stream.landmarks) {
    const int64_t m = stream.landmarks;
    near = arena.take<T>(padded<T>(m));
    shares = arena.take<T>(padded<T>(m));
    kernel = arena.take<T>(padded<T>(m * m));
    pinv = stream.fixed ? nullptr : arena.take<T>(pinv_workspace<Vector<T>>(m));
    values = arena.take<T>(m * stream.shape.value_width);
    queries = arena.take<T>(size_t(kBlockRows) * stream.shape.key_width);
    bytes = arena.used();
  }
};

template <class T>
class NystromHead : Head<T> {
  using Base = Head<T>;
  using Base::scratch_, Base::shape_, Base::tokens_;

 public:
  static size_t bytes(const NystromStream& stream) { return NystromScratch<T>(stream, nullptr).bytes; }
  static void run(const NystromStream& stream, int64_t head, void* scratch) {
    NystromHead(stream, head, NystromScratch<T>(stream, scratch)).run();
  }

 private:
  NystromHead(const NystromStream& stream, int64_t head, const NystromScratch<T>& scratch)
      : Base(stream, head, stream.landmarks, scratch.head),
        stream_(stream),
        landmarks_(stream.landmarks),
        at_(scratch),
        landmark_queries_(static_cast<T*>(stream.landmark_queries) + head * landmarks_ * shape_.key_width),
        landmark_keys_(static_cast<T*>(stream.landmark_keys) + head * landmarks_ * shape_.key_width),
        inverse_(static_cast<T*>(stream.inverse) + head * landmarks_ * landmarks_) {}

  void run() {
    for (int64_t i = 0; i < shape_.tokens; ++i) {
      take_token();
      if (!shape_.retroactive) this->write(i, scratch_.out, single_output());
    }
    if (shape_.retroactive) write_window();
  }

  void take_token() {
    this->put_token();
    const int64_t segment = stream_.fixed ? 0 : segment_ending(this->taken(), shape_.window, landmarks_);
    if (segment) replace_oldest(segment);
    const int64_t kept = segment ? landmarks_ - 1 : landmarks_;
    const auto afresh = [&](int64_t row) { this->make_afresh(landmark_queries_ + row * shape_.key_width, row); };
    this->exchange_logits({landmark_queries_, shape_.key_width}, 0, kept);
    this->exchange(segment ? 1 : 0, kept, afresh);
    if (segment) afresh(landmarks_ - 1);
    for (int64_t row = this->taken() % kSchedule; row < kept; row += kSchedule) afresh(row);
    this->record_sums();
  }

  void replace_oldest(int64_t segment) {
    push_mean(tokens_.queries, segment, landmark_queries_);
    push_mean(tokens_.keys, segment, landmark_keys_);
    for (int64_t r = 0; r < landmarks_; ++r) {
      T* row = at_.kernel + r * landmarks_;
      const T share = T(1) / near_landmarks(landmark_queries_ + r * shape_.key_width, row);
      for (int64_t c = 0; c < landmarks_; ++c) row[c] *= share;
    }
    iterative_pinv<Vector<T>>(at_.kernel, landmarks_, stream_.iterations, inverse_, at_.pinv);
  }

  // Drops the oldest landmark and appends the mean of the newest `count` tokens.
  void push_mean(const Ring& ring, int64_t count, T* landmarks) const {
    const int width = ring.width;
    __builtin_memmove(landmarks, landmarks + width, size_t(landmarks_ - 1) * width * sizeof(T));
    T* mean = landmarks + (landmarks_ - 1) * width;
    T* weights = scratch_.window.weights;
    for (int64_t i = 0; i < count; ++i) weights[i] = 1;
    for (int64_t i = 0; i < count; i += kBlockRows) {
      const int64_t block = least(count - i, kBlockRows);
      add_rows(weights, ring_rows(ring, this->taken() - count + i, block, at_.queries), block, width, i == 0, mean);
    }
    for (int d = 0; d < width; ++d) mean[d] /= T(count);
  }

  // near[i] = exp(logit - top) of a query with each landmark key, where top is the largest logit; returns their sum.
  T near_landmarks(const T* query, T* near) const {
    make_logits(query, {landmark_keys_, shape_.key_width}, landmarks_, shape_.key_width, shape_.scale, near);
    return exponentiate(near, landmarks_).sum;
  }

  // Writes (near pinv) (Delta V / phi(Delta)) of the newest query to scratch_.out, and returns the factor by which it
  // must still be multiplied.
  T single_output() const {
    const T* query = ring_rows(tokens_.queries, this->taken() - 1, 1, scratch_.query).rows;
    const T sum = near_landmarks(query, at_.near);
    add_rows(at_.near, {inverse_, landmarks_}, landmarks_, int(landmarks_), true, at_.shares);
    for (int64_t r = 0; r < landmarks_; ++r) at_.shares[r] /= this->weight_sum(r);
    add_rows(at_.shares, this->row_sums(), landmarks_, shape_.value_width, true, scratch_.out);
    return T(1) / sum;
  }

  // Writes near (pinv (Delta V / phi(Delta))) for every query of the window.
  void write_window() const {
    const int width = shape_.value_width;
    for (int64_t r = 0; r < landmarks_; ++r) {
      for (int64_t s = 0; s < landmarks_; ++s) at_.shares[s] = inverse_[r * landmarks_ + s] / this->weight_sum(s);
      add_rows(at_.shares, this->row_sums(), landmarks_, width, true, at_.values + r * width);
    }
    for (int64_t i = 0; i < shape_.window; ++i) {
      const T* query = ring_rows(tokens_.queries, this->taken() - shape_.window + i, 1, scratch_.query).rows;
      const T sum = near_landmarks(query, at_.near);
      add_rows(at_.near, {at_.values, width}, landmarks_, width, true, scratch_.out);
      this->write(i, scratch_.out, T(1) / sum);
    }
  }

  const NystromStream& stream_;
  const int64_t landmarks_;
  const NystromScratch<T> at_;
  T *const landmark_queries_, *const landmark_keys_, *const inverse_;
};

// ---- exact

template <class T>
struct AttentionScratch {
  HeadScratch<T> head;
  T* queries;
  size_t bytes;

  AttentionScratch(const AttentionStream& stream, void* memory) : AttentionScratch(Arena(memory), stream.shape) {}

 private:
  AttentionScratch(Arena arena, const StreamShape& shape)
      : head(arena, shape, shape.retroactive ? shape.window : 0),
        queries(arena.take<T>(size_t(kBlockRows) * shape.key_width)) {
    bytes = arena.used();
  }
};

template <class T>
class AttentionHead : Head<T> {
  using Base = Head<T>;
  using Base::scratch_, Base::shape_, Base::tokens_;

 public:
  static size_t bytes(const AttentionStream& stream) { return AttentionScratch<T>(stream, nullptr).bytes; }
  static void run(const AttentionStream& stream, int64_t head, void* scratch) {
    AttentionHead made(stream, head, AttentionScratch<T>(stream, scratch));
    if (stream.shape.retroactive)
      made.write_window();
    else
      made.write_each();
  }

 private:
  AttentionHead(const AttentionStream& stream, int64_t head, const AttentionScratch<T>& scratch)
      : Base(stream, head, stream.shape.retroactive ? stream.shape.window : 0, scratch.head),
        has_sums_(stream.sums),
        queries_(scratch.queries) {}

  void write_each() {
    for (int64_t i = 0; i < shape_.tokens; ++i) {
      this->put_token();
      const Total<T> total = attend_window(shape_, query(this->taken() - 1), tokens_.keys, tokens_.values,
                                           this->taken(), scratch_.window, scratch_.out);
      this->write(i, scratch_.out, T(1) / total.sum);
    }
  }

  void write_window() {
    for (int64_t i = 0; i < shape_.tokens; ++i) take_token();
    const Tile<T> sums = this->row_sums();
    for (int64_t row = 0; row < shape_.window; ++row)
      this->write(row, sums.rows + row * sums.stride, T(1) / this->weight_sum(row));
  }

  // Adds a token: the row of the oldest query is removed, and the row of the newest query is added.
  void take_token() {
    this->put_token();
    exchange_rows();
    this->record_sums();
  }

  void exchange_rows() {
    const int64_t window = shape_.window, oldest = this->taken() - window;
    const auto afresh = [&](int64_t row) { this->make_afresh(query(oldest + row), row); };
    if (!has_sums_) {
      for (int64_t row = 0; row < window; ++row) afresh(row);
      has_sums_ = true;
      return;
    }
    for (int64_t i = 0; i < window - 1; i += kBlockRows) {
      const int64_t count = least(window - 1 - i, kBlockRows);
      this->exchange_logits(ring_rows(tokens_.queries, oldest + i, count, queries_), i, count);
    }
    this->exchange(1, window - 1, afresh);
    afresh(window - 1);
    for (int64_t row = window - kSchedule; row >= 0; row -= kSchedule) afresh(row);
  }

  const T* query(int64_t token) const { return ring_rows(tokens_.queries, token, 1, scratch_.query).rows; }

  bool has_sums_;
  T* const queries_;
};

}  // namespace
}  // namespace cmab::cpu
