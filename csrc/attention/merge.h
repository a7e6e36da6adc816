// How the partial states of one block of queries become rows of the result: those of the pieces of the keys are merged
// in ascending order, then with the incoming state, or they are removed from it.
#pragma once

#include "attention/call.h"
#include "attention/state.h"

namespace cmab::cpu {

class Merger {
 public:
  // state_out and state_lse without data: there is no incoming state. `reliable` (null: they are added) says that keys
  // are removed, and takes whether a row is accurate.
  Merger(const ForwardKernel& kernel, const Shape& shape, int64_t heads, int64_t queries, const Operand& state_out,
         const Operand& state_lse, void* out, double* lse, bool* reliable)
      : kernel_(kernel),
        shape_(shape),
        heads_(heads),
        queries_(queries),
        state_out_(state_out),
        state_lse_(state_lse),
        out_(out),
        lse_(lse),
        reliable_(reliable) {}

  size_t scratch_bytes() const {
    return kernel_.block * (sizeof(Sums<double>) + 2 * (1 + shape_.value_width) * sizeof(double));
  }

  // Writes `rows` rows from row `first` of head h of batch element b on; part(i) is the state of piece i.
  template <class Part>
  void finish(int64_t b, int64_t h, int64_t first, int rows, int64_t pieces, Part part, char* scratch) const {
    const int width = shape_.value_width;
    const Buffers at(shape_, kernel_.block, scratch);
    if (pieces == 0) {
      for (int row = 0; row < rows; ++row) at.total[row] = Sums<double>();
      for (int i = 0; i < rows * width; ++i) at.acc[i] = 0.0;
    }
    for (int64_t piece = 0; piece < pieces; ++piece) {
      double* acc = piece == 0 ? at.acc : at.part;
      kernel_.read(shape_, rows, part(piece), at.reference, at.sum, acc);
      for (int row = 0; row < rows; ++row) {
        const Sums<double> sums{at.reference[row] * kLn2, at.sum[row]};
        if (piece == 0)
          at.total[row] = sums;
        else
          absorb(at.total[row], at.acc + row * width, sums, at.part + row * width, width);
      }
    }
    if (reliable_)
      for (int row = 0; row < rows; ++row) remove_rows(at, row, b, h, first + row);
    else if (state_lse_.data)
      for (int row = 0; row < rows; ++row) absorb_state(at, row, b, h, first + row);
    const int64_t to = (b * heads_ + h) * queries_ + first;
    for (int row = 0; row < rows; ++row) {
      lse_[to + row] = log_sum(at.total[row]);
      write_out((to + row) * width, normaliser(at.total[row]), at.acc + row * width);
    }
  }

 private:
  static constexpr double kLn2 = 0.69314718055994530942;

  struct Buffers {
    Sums<double>* total;             // [rows]
    double *reference, *sum, *part;  // [rows], [rows], [rows][E]: of one piece
    double* acc;                     // [rows][E]: of all pieces so far

    Buffers(const Shape& shape, int rows, char* memory)
        : total(reinterpret_cast<Sums<double>*>(memory)),
          reference(reinterpret_cast<double*>(total + rows)),
          sum(reference + rows),
          part(sum + rows),
          acc(part + rows * shape.value_width) {}
  };

  // Reads a row of the incoming state into `at.part`; returns its lse.
  double read_state(const Buffers& at, int64_t b, int64_t h, int64_t query) const {
    if (shape_.dtype == DType::kFloat64)
      copy(state_out_.at<double>(b, h, query), state_out_.stride[3], at.part, shape_.value_width);
    else
      copy(state_out_.at<float>(b, h, query), state_out_.stride[3], at.part, shape_.value_width);
    return *state_lse_.at<double>(b, h, query);
  }

  void absorb_state(const Buffers& at, int row, int64_t b, int64_t h, int64_t query) const {
    const int width = shape_.value_width;
    const double lse = read_state(at, b, h, query);
    absorb(at.total[row], at.acc + row * width, {lse, lse == -INFINITY ? 0.0 : 1.0}, at.part, width);
  }

  // Replaces a row's sums by what is left of the incoming state without them.
  void remove_rows(const Buffers& at, int row, int64_t b, int64_t h, int64_t query) const {
    const int width = shape_.value_width;
    double *const acc = at.acc + row * width, lse = read_state(at, b, h, query);
    const bool held = lse != -INFINITY, empty = at.total[row].empty();
    const double left = remove_part(lse, at.part, at.total[row], acc, width);
    const double eps = shape_.dtype == DType::kFloat64 ? 0x1p-52 : 0x1p-23;
    reliable_[(b * heads_ + h) * queries_ + query] = empty || (held && left >= std::sqrt(eps));
    at.total[row] = {lse, lse == -INFINITY ? 0.0 : 1.0};
    for (int e = 0; e < width; ++e) acc[e] = at.part[e];
  }

  template <class T>
  static void copy(const T* from, int64_t stride, double* to, int count) {
    if (stride == 1)
      for (int i = 0; i < count; ++i) to[i] = from[i];
    else
      for (int i = 0; i < count; ++i) to[i] = from[i * stride];
  }

  void write_out(int64_t at, double factor, const double* acc) const {
    if (shape_.dtype == DType::kFloat64)
      write_row(static_cast<double*>(out_) + at, factor, acc, shape_.value_width);
    else
      write_row(static_cast<float*>(out_) + at, factor, acc, shape_.value_width);
  }

  template <class T>
  static void write_row(T* to, double factor, const double* acc, int count) {
    for (int i = 0; i < count; ++i) to[i] = T(acc[i] * factor);
  }

  const ForwardKernel& kernel_;
  const Shape& shape_;
  const int64_t heads_, queries_;
  const Operand &state_out_, &state_lse_;
  void* out_;
  double* lse_;
  bool* const reliable_;
};

}  // namespace cmab::cpu
