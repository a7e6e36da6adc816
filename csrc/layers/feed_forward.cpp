// The feed-forward layer: tiles of rows pass through norm, expand, activation and contract, and back.
#include "layers/call.h"
#include "linear/driver.h"

namespace cmab::cpu {
namespace {

int parts_of(const FeedForward& in) { return in.activation == Activation::kGeglu ? 2 : 1; }

double multiplications(const FeedForward& in) { return double(in.rows) * in.width * in.inner * (1 + parts_of(in)); }

// The rows of expand's weight that make the features (part 0) or the gate (1).
Matrix expand_part(const FeedForward& in, int part) {
  return rows_from(in.expand.weight, int64_t(part) * in.inner, in.dtype);
}

struct Parameters {
  NormParameters norm;
  void *expand[2], *expand_bias[2], *contract, *contract_bias;

  Parameters(Taker& take, const FeedForward& in) : norm(take, in.width) {
    for (int part = 0; part < 2; ++part) {
      expand[part] = take.packed(in.width, in.inner);
      expand_bias[part] = take.vector(in.inner);
    }
    contract = take.packed(in.inner, in.width);
    contract_bias = take.vector(in.width);
  }

  void load(const LinearKernels& kernel, const FeedForward& in) {
    norm.load(kernel, in.dtype, in.norm);
    for (int part = 0; part < parts_of(in); ++part) {
      kernel.pack(in.dtype, transposed(expand_part(in, part)), in.width, in.inner, expand[part]);
      const void* bias = offset(in.expand.bias, int64_t(part) * in.inner, in.dtype);
      load_vector(kernel, in.dtype, bias, in.inner, expand_bias[part]);
    }
    kernel.pack(in.dtype, transposed(in.contract.weight), in.inner, in.width, contract);
    load_vector(kernel, in.dtype, in.contract.bias, in.width, contract_bias);
  }
};

struct Tiles {
  NormedRows x;
  RowTile hidden[2], active;

  Tiles(Taker& take, const FeedForward& in)
      : x(take, in.width), hidden{take.tile(in.inner), take.tile(in.inner)}, active(take.tile(in.inner)) {}
};

class Forward {
 public:
  Forward(const FeedForward& in, void* y, void* hidden) : in_(in), y_(y), hidden_(hidden) {}

  void run() {
    const int threads = useful_threads(multiplications(in_), in_.threads);
    Team<Parameters, Tiles, FeedForward>(kernel_, in_, threads)
        .for_each_tile(in_.rows, [&](int64_t row, int count, const Parameters& parameters, const Tiles& tiles) {
          pass(row, count, parameters, tiles);
        });
  }

 private:
  void pass(int64_t row, int count, const Parameters& parameters, const Tiles& tiles) const {
    const DType sums = state_type(in_.dtype);
    const int64_t stride = int64_t(parts_of(in_)) * in_.inner;
    kernel_.load(in_.dtype, rows_from(in_.x, row, in_.dtype), count, in_.width, nullptr, 0, tiles.x.rows);
    const RowTile normed = tiles.x.normalise(kernel_, parameters.norm, count);
    for (int part = 0; part < parts_of(in_); ++part) {
      const RowTile hidden = tiles.hidden[part];
      kernel_.multiply(normed, count, in_.width, parameters.expand[part], in_.inner, parameters.expand_bias[part],
                       false, hidden);
      if (hidden_)
        kernel_.store(hidden, count, in_.inner, sums, offset(hidden_, row * stride + part * in_.inner, sums), stride);
    }
    kernel_.activate(in_.activation, tiles.hidden[0], tiles.hidden[1], count, in_.inner, tiles.active);
    kernel_.multiply(tiles.active, count, in_.inner, parameters.contract, in_.width, parameters.contract_bias, true,
                     tiles.x.rows);
    kernel_.store(tiles.x.rows, count, in_.width, in_.dtype, offset(y_, row * in_.width, in_.dtype), in_.width);
  }

  const FeedForward& in_;
  const LinearKernels& kernel_ = linear_kernels(in_.dtype);
  void *const y_, *const hidden_;
};

// The matrices that gradients are multiplied by: dactive = dy contract, dnormed = dhidden expand.
struct BackwardParameters {
  NormParameters norm;
  void *expand[2], *contract;

  BackwardParameters(Taker& take, const FeedForward& in)
      : norm(take, in.width),
        expand{take.packed(in.inner, in.width), take.packed(in.inner, in.width)},
        contract(take.packed(in.width, in.inner)) {}

  void load(const LinearKernels& kernel, const FeedForward& in) {
    norm.load(kernel, in.dtype, in.norm);
    for (int part = 0; part < parts_of(in); ++part)
      kernel.pack(in.dtype, expand_part(in, part), in.inner, in.width, expand[part]);
    kernel.pack(in.dtype, in.contract.weight, in.width, in.inner, contract);
  }
};

struct BackwardTiles : Tiles {
  RowTile dy, dactive, dnormed;

  BackwardTiles(Taker& take, const FeedForward& in)
      : Tiles(take, in), dy(take.tile(in.width)), dactive(take.tile(in.inner)), dnormed(take.tile(in.width)) {}
};

class Backward {
 public:
  Backward(const FeedForward& in, const Matrix& dy, const void* hidden, const FeedForwardGradients& out)
      : in_(in), dy_(dy), hidden_(hidden), dx_(out.x), sums_(kernel_, in.dtype, in.rows) {
    for (int part = 0; part < parts_of(in); ++part) {
      const int64_t first = int64_t(part) * in.inner;
      expand_[part] = sums_.add(offset(out.expand.weight, first * in.width, in.dtype), in.inner, in.width);
      expand_bias_[part] = sums_.add(offset(out.expand.bias, first, in.dtype), 1, in.inner);
    }
    contract_ = sums_.add(out.contract.weight, in.width, in.inner);
    contract_bias_ = sums_.add(out.contract.bias, 1, in.width);
    norm_weight_ = sums_.add(out.norm.weight, 1, in.width);
    norm_bias_ = sums_.add(out.norm.bias, 1, in.width);
  }

  void run() {
    const int threads = useful_threads(2 * multiplications(in_), in_.threads);
    Team<BackwardParameters, BackwardTiles, FeedForward>(kernel_, in_, threads, &sums_)
        .for_each_tile_of(sums_, [&](int piece, int64_t row, int count, const BackwardParameters& parameters,
                                     const BackwardTiles& tiles) { pass(piece, row, count, parameters, tiles); });
  }

 private:
  void pass(int piece, int64_t row, int count, const BackwardParameters& parameters, const BackwardTiles& tiles) const {
    const auto sum = [&](int number) { return sums_.of(piece, number); };
    const DType sums = state_type(in_.dtype);
    const int64_t stride = int64_t(parts_of(in_)) * in_.inner;
    kernel_.load(in_.dtype, rows_from(in_.x, row, in_.dtype), count, in_.width, nullptr, 0, tiles.x.rows);
    kernel_.load(in_.dtype, rows_from(dy_, row, in_.dtype), count, in_.width, nullptr, 0, tiles.dy);
    const RowTile normed = tiles.x.normalise(kernel_, parameters.norm, count);
    for (int part = 0; part < parts_of(in_); ++part) {
      const Matrix kept{offset(hidden_, row * stride + part * in_.inner, sums), stride, 1};
      kernel_.load(sums, kept, count, in_.inner, nullptr, 0, tiles.hidden[part]);
    }
    if (sums_.needed(contract_bias_)) kernel_.add_rows(tiles.dy, count, in_.width, sum(contract_bias_).data);
    kernel_.multiply(tiles.dy, count, in_.width, parameters.contract, in_.inner, nullptr, false, tiles.dactive);
    kernel_.activate_backward(in_.activation, tiles.hidden[0], tiles.hidden[1], tiles.dactive, count, in_.inner,
                              tiles.active);
    if (sums_.needed(contract_))
      kernel_.add_products(tiles.dy, in_.width, tiles.active, in_.inner, count, sum(contract_));
    for (int part = 0; part < parts_of(in_); ++part) {
      const RowTile dhidden = tiles.hidden[part];
      if (sums_.needed(expand_[part]))
        kernel_.add_products(dhidden, in_.inner, normed, in_.width, count, sum(expand_[part]));
      if (sums_.needed(expand_bias_[part])) kernel_.add_rows(dhidden, count, in_.inner, sum(expand_bias_[part]).data);
      kernel_.multiply(dhidden, count, in_.inner, parameters.expand[part], in_.width, nullptr, part > 0, tiles.dnormed);
    }
    tiles.x.backward(kernel_, parameters.norm, tiles.dnormed, count, tiles.dy, sum(norm_weight_), sum(norm_bias_));
    if (dx_) kernel_.store(tiles.dy, count, in_.width, in_.dtype, offset(dx_, row * in_.width, in_.dtype), in_.width);
  }

  const FeedForward& in_;
  const LinearKernels& kernel_ = linear_kernels(in_.dtype);
  const Matrix dy_;
  const void* const hidden_;
  void* const dx_;
  ParameterSums sums_;
  int expand_[2], expand_bias_[2], contract_, contract_bias_, norm_weight_, norm_bias_;
};

}  // namespace

void feed_forward(const FeedForward& in, void* y, void* hidden) { Forward(in, y, hidden).run(); }

void feed_forward_backward(const FeedForward& in, const Matrix& dy, const void* hidden,
                           const FeedForwardGradients& gradients) {
  Backward(in, dy, hidden, gradients).run();
}

}  // namespace cmab::cpu
