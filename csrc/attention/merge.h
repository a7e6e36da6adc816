// Turns the partial states of one block of queries into rows of the result. The states of the pieces of the keys are
// merged in ascending order; the result is then merged with the incoming state, or removed from it.
#pragma once

#include "attention/call.h"
#include "attention/state.h"

namespace cmab::cpu {

class Merger {
 public:
  // state_out and state_lse without data: there is no incoming state. If `reliable` is not null, the keys are removed
  // from that state, and `reliable` receives whether each row is accurate.
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

  // Writes `rows` rows, from row `first` of head h of batch element b on; part(i) is the state of piece i.
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
    const int64_t to = (b * heads_ + h) * queries_ + first;
    for (int row = 0; row < rows; ++row) {
      const double before = state_lse_.data ? *state_lse_.at<double>(b, h, first + row) : -INFINITY;
      const Mix mix = reliable_ ? without(at.total[row], before, to + row) : added(at.total[row], before);
      const bool held = before != -INFINITY && mix.lse != -INFINITY;
      lse_[to + row] = mix.lse;
      if (shape_.dtype == DType::kFloat64)
        write_row<double>(mix, at.acc + row * width, held, b, h, first + row, to + row);
      else
        write_row<float>(mix, at.acc + row * width, held, b, h, first + row, to + row);
    }
  }

 private:
  static constexpr double kLn2 = 0.69314718055994530942;
  static constexpr double kSureRounding = 0x1p-5;  // the largest error of a logit, per share of the mass that is left
  static constexpr double kFarBelow = 0x1p-10;     // in units of |lse|: keys so far below lse have no weight

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

  Mix without(const Sums<double>& sums, double before, int64_t row) const {
    double left;
    const Mix mix = removed(sums, before, left);
    const double eps = shape_.dtype == DType::kFloat64 ? 0x1p-52 : 0x1p-23;
    reliable_[row] = sums.empty() ? left == 1 : before != -INFINITY && is_sure(sums, before, left, eps);
    return mix;
  }

  // Whether half of the digits are left, and the rounding of logits cannot matter: logits may have been rounded
  // differently when the keys were added.
  static bool is_sure(const Sums<double>& sums, double before, double left, double eps) {
    if (!(left >= std::sqrt(eps))) return false;
    const double size = std::fabs(before);
    return size <= kSureRounding / eps * left || sums.reference + std::log(sums.sum) < before - kFarBelow * size;
  }

  // `held`: whether the incoming state contributes to the row.
  template <class T>
  void write_row(Mix mix, const double* __restrict acc, bool held, int64_t b, int64_t h, int64_t query,
                 int64_t row) const {
    const int width = shape_.value_width;
    T* __restrict to = static_cast<T*>(out_) + row * width;
    if (mix.lse == -INFINITY) {
      for (int e = 0; e < width; ++e) to[e] = 0;
    } else if (!held) {
      for (int e = 0; e < width; ++e) to[e] = T(mix.sums * acc[e]);
    } else {
      const T* state = state_out_.at<T>(b, h, query);
      const int64_t step = state_out_.stride[3];
      if (step == 1)
        for (int e = 0; e < width; ++e) to[e] = T(mix.sums * acc[e] + mix.state * state[e]);
      else
        for (int e = 0; e < width; ++e) to[e] = T(mix.sums * acc[e] + mix.state * state[e * step]);
    }
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
