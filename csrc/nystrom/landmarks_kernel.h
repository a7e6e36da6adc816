// The landmark part of Nyström attention, W = pinv(softmax(scale q k')) v, and its gradients. Absent landmarks are left
// out when the operands are read. The softmax is computed on the transpose, k q', so that its sums run down the
// columns.
#pragma once

#include "common/tile.h"
#include "nystrom/backward_kernel.h"
#include "nystrom/pinv.h"

namespace cmab::cpu {
namespace {

// The queries and keys of the present landmarks of one matrix, in padded rows, and their softmax.
template <class T>
class Landmarks {
  using V = Vector<T>;

 public:
  Landmarks(const LandmarkCall& call, int64_t matrix, Arena& arena)
      : call_(call), matrix_(matrix), width_(padded_columns<T>(call.width)) {
    which_ = arena.take<int64_t>(call.order);
    query_ = arena.take<T>(padded_size<T>(call.order, call.width));
    key_ = arena.take<T>(padded_size<T>(call.order, call.width));
    turned_query_ = arena.take<T>(padded_size<T>(call.width, call.order));
    turned_softmax_ = arena.take<T>(padded_size<T>(call.order, call.order));
  }

  // Reads the operands; the constructor only lays out memory.
  void read() {
    for (int64_t i = 0; i < call_.order; ++i)
      if (!call_.absent || !call_.absent[matrix_ * call_.absent_stride[0] + i * call_.absent_stride[1]])
        which_[present_++] = i;
    read_rows(call_.query, call_.width, query_);
    read_rows(call_.key, call_.width, key_);
    for (int64_t i = 0; i < present_ * width_; i += kVectorLanes<T>)
      store(query_ + i, T(call_.scale) * load<V>(query_ + i));
  }

  int64_t present() const { return present_; }
  const T* scaled_query() const { return query_; }
  const T* key() const { return key_; }

  void read_rows(const Matrices& from, int64_t columns, T* to) const {
    read_matrix(from.at<T>(matrix_), from.stride[1], from.stride[2], which_, present_, columns, to);
  }

  // Writes padded rows of the present landmarks to a result that has a row for every landmark; absent landmarks get
  // zeros.
  void write_rows(const T* from, int64_t columns, void* result) const {
    T* to = static_cast<T*>(result) + matrix_ * call_.order * columns;
    const int64_t width = padded_columns<T>(columns);
    for (int64_t i = 0, taken = 0; i < call_.order; ++i, to += columns)
      if (taken < present_ && which_[taken] == i)
        write_row(from + width * taken++, columns, to);
      else
        for (int64_t j = 0; j < columns; ++j) to[j] = 0;
  }

  // Writes softmax(scale q k'), by rows. The scale is applied to the query, so that a small scale keeps large products
  // in range.
  void softmax(T* to) const {
    const int64_t columns = padded_columns<T>(present_);
    transpose_matrix(query_, present_, call_.width, turned_query_);
    multiply(Left<T>{key_, width_, 1}, turned_query_, columns, padded_rows(present_), call_.width, columns,
             [&](int64_t row, int64_t column, V sum) { store(turned_softmax_ + row * columns + column, finite(sum)); });
    for (int64_t column = 0; column < columns; column += kVectorLanes<T>) normalise(turned_softmax_ + column, column);
    transpose_matrix(turned_softmax_, present_, present_, to);
  }

 private:
  // Clamps a logit to the finite range; keeps a NaN.
  static V finite(V logit) {
    constexpr T kMost = std::numeric_limits<T>::max();
    logit = logit > kMost ? broadcast<V>(kMost) : logit;
    return logit < -kMost ? broadcast<V>(-kMost) : logit;
  }

  // Normalises a vector of columns, and writes zeros in the padding.
  void normalise(T* logits, int64_t column) const {
    const int64_t row = padded_columns<T>(present_);
    V most = load<V>(logits), sum{};
    for (int64_t i = 1; i < present_; ++i) most = maximum(load<V>(logits + i * row), most);
    for (int64_t i = 0; i < present_; ++i) {
      const V weight = exp2((load<V>(logits + i * row) - most) * T(kLog2E));
      sum += weight;
      store(logits + i * row, weight);
    }
    const V share = lane_numbers<V>() < T(present_ - column) ? T(1) / sum : V{};
    for (int64_t i = 0; i < present_; ++i) store(logits + i * row, load<V>(logits + i * row) * share);
  }

  const LandmarkCall& call_;
  const int64_t matrix_, width_;
  int64_t present_ = 0;
  int64_t* which_;
  T *query_, *key_, *turned_query_, *turned_softmax_;
};

// Computes W for one matrix of a call.
template <class T>
class LandmarkValues {
  using V = Vector<T>;

 public:
  LandmarkValues(const LandmarkCall& call, int64_t matrix, void* memory)
      : call_(call), arena_(memory), landmarks_(call, matrix, arena_) {
    value_ = arena_.take<T>(padded_size<T>(call.order, call.value_width));
    out_ = arena_.take<T>(padded_size<T>(call.order, call.value_width));
    squares_ = arena_.take<T>(PinvIteration<T>::elements(call.order));
  }

  size_t bytes() const { return arena_.used(); }

  void run() {
    landmarks_.read();
    const int64_t present = landmarks_.present(), columns = padded_columns<T>(call_.value_width);
    PinvIteration<T> iteration(present, squares_);
    if (present) {
      landmarks_.softmax(iteration.matrix());
      iteration.run(call_.iterations);
      landmarks_.read_rows(call_.value, call_.value_width, value_);
      multiply(Left<T>{iteration.inverse(), padded_columns<T>(present), 1}, value_, columns, padded_rows(present),
               present, columns,
               [&](int64_t row, int64_t column, V sum) { store(out_ + row * columns + column, sum); });
    }
    landmarks_.write_rows(out_, call_.value_width, call_.out);
  }

 private:
  const LandmarkCall& call_;
  Arena arena_;
  Landmarks<T> landmarks_;
  T *value_, *out_, *squares_;
};

// Computes the gradients of W to query, key and value for one matrix of a call.
template <class T>
class LandmarkGradients {
  using V = Vector<T>;

 public:
  LandmarkGradients(const LandmarkCall& call, int64_t matrix, void* memory)
      : call_(call), arena_(memory), landmarks_(call, matrix, arena_) {
    const int64_t order = call.order;
    for (T** each : {&value_, &dout_, &dvalue_}) *each = arena_.take<T>(padded_size<T>(order, call.value_width));
    turned_value_ = arena_.take<T>(padded_size<T>(call.value_width, order));
    dlogits_ = arena_.take<T>(padded_size<T>(order, order));
    for (T** each : {&dquery_, &dkey_}) *each = arena_.take<T>(padded_size<T>(order, call.width));
    squares_ = arena_.take<T>(PinvGradient<T>::elements(order, call.iterations));
  }

  size_t bytes() const { return arena_.used(); }

  void run() {
    landmarks_.read();
    present_ = landmarks_.present();
    if (present_) {
      PinvGradient<T> pinv(present_, call_.iterations, squares_);
      landmarks_.softmax(pinv.matrix());
      pinv.run();
      differentiate_product(pinv);
      pinv.differentiate();
      differentiate_softmax(pinv);
    }
    landmarks_.write_rows(dquery_, call_.width, call_.dquery);
    landmarks_.write_rows(dkey_, call_.width, call_.dkey);
    landmarks_.write_rows(dvalue_, call_.value_width, call_.dvalue);
  }

 private:
  // W = Z v: dv = Z' dW and dZ = dW v'.
  void differentiate_product(PinvGradient<T>& pinv) {
    const int64_t columns = padded_columns<T>(present_), width = padded_columns<T>(call_.value_width);
    landmarks_.read_rows(call_.value, call_.value_width, value_);
    landmarks_.read_rows(call_.dout, call_.value_width, dout_);
    write_product({pinv.turned_inverse(), columns, 1}, dout_, present_, call_.value_width, dvalue_);
    transpose_matrix(value_, present_, call_.value_width, turned_value_);
    write_product({dout_, width, 1}, turned_value_, call_.value_width, present_, pinv.gradient());
  }

  // With A = softmax(S): dS = A (dA - the row sums of A dA), computed on the transpose.
  void differentiate_softmax(const PinvGradient<T>& pinv) {
    const int64_t columns = padded_columns<T>(present_);
    transpose_matrix(pinv.dmatrix(), present_, present_, dlogits_);
    for (int64_t column = 0; column < columns; column += kVectorLanes<T>) {
      const T* softmax = pinv.turned() + column;
      T* slope = dlogits_ + column;
      V sum{};
      for (int64_t i = 0; i < present_ * columns; i += columns) sum += load<V>(softmax + i) * load<V>(slope + i);
      for (int64_t i = 0; i < present_ * columns; i += columns)
        store(slope + i, load<V>(softmax + i) * (load<V>(slope + i) - sum));
    }
    write_product({dlogits_, 1, columns}, landmarks_.key(), present_, call_.width, dquery_, T(call_.scale));
    write_product({dlogits_, columns, 1}, landmarks_.scaled_query(), present_, call_.width, dkey_);
  }

  // Writes factor * left * right, with a row for each present landmark.
  void write_product(const Left<T>& left, const T* right, int64_t steps, int64_t columns, T* to, T factor = 1) const {
    const int64_t width = padded_columns<T>(columns);
    multiply(left, right, width, padded_rows(present_), steps, width,
             [&](int64_t row, int64_t column, V sum) { store(to + row * width + column, factor * sum); });
  }

  const LandmarkCall& call_;
  Arena arena_;
  Landmarks<T> landmarks_;
  int64_t present_ = 0;
  T *value_, *dout_, *dvalue_, *turned_value_, *dlogits_, *dquery_, *dkey_, *squares_;
};

// The entries of the kernel table, for vectors of CMAB_VECTOR_BYTES.
template <class T>
struct Pinv {
  using V = Vector<T>;

  static size_t pinv_bytes(const PinvCall& call) { return sizeof(T) * PinvIteration<T>::elements(call.order); }
  static void pinv(const PinvCall& call, int64_t matrix, void* scratch) {
    PinvIteration<T> iteration(call.order, static_cast<T*>(scratch));
    read(call.matrix, call, matrix, iteration.matrix());
    iteration.run(call.iterations);
    iteration.write(out(call, matrix));
  }

  static size_t pinv_backward_bytes(const PinvCall& call) {
    return sizeof(T) * PinvGradient<T>::elements(call.order, call.iterations);
  }
  static void pinv_backward(const PinvCall& call, int64_t matrix, void* scratch) {
    PinvGradient<T> gradient(call.order, call.iterations, static_cast<T*>(scratch));
    read(call.matrix, call, matrix, gradient.matrix());
    gradient.run();
    read(call.dinverse, call, matrix, gradient.gradient());
    gradient.differentiate();
    gradient.write(out(call, matrix));
  }

  static void read(const Matrices& from, const PinvCall& call, int64_t matrix, T* to) {
    read_matrix(from.at<T>(matrix), from.stride[1], from.stride[2], nullptr, call.order, call.order, to);
  }
  static T* out(const PinvCall& call, int64_t matrix) {
    return static_cast<T*>(call.out) + matrix * call.order * call.order;
  }

  template <class Operation>
  static size_t bytes(const LandmarkCall& call) {
    return Operation(call, 0, nullptr).bytes();
  }
  template <class Operation>
  static void run(const LandmarkCall& call, int64_t matrix, void* scratch) {
    Operation(call, matrix, scratch).run();
  }

  static constexpr PinvKernel kernel = {{pinv_bytes, pinv},
                                        {pinv_backward_bytes, pinv_backward},
                                        {bytes<LandmarkValues<T>>, run<LandmarkValues<T>>},
                                        {bytes<LandmarkGradients<T>>, run<LandmarkGradients<T>>}};
};

}  // namespace
}  // namespace cmab::cpu
