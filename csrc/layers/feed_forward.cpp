// The feed-forward layer: tiles of rows pass through norm, expand, activation and contract, and back through the
// gradients of these.
#include "layers/call.h"
#include "layers/crew.h"
#include "linear/driver.h"

namespace cmab::cpu {
namespace {

int parts_of(const FeedForward& in) { return in.activation == Activation::kGeglu ? 2 : 1; }

double multiplications(const FeedForward& in) { return double(in.rows) * in.width * in.inner * (1 + parts_of(in)); }

// The rows of expand's weight that make the features (part 0) or the gate (1).
Matrix expand_part(const FeedForward& in, int part) {
  return rows_from(in.expand.weight, int64_t(part) * in.inner, in.dtype);
}

// The parameters that make the hidden features of a row: those of the norm and of expand.
struct Expansion {
  NormParameters norm;
  void *packed[2], *bias[2];

  Expansion(Taker& take, const FeedForward& in) : norm(take, in.width) {
    for (int part = 0; part < 2; ++part) {
      packed[part] = take.packed(in.width, in.inner);
      bias[part] = take.vector(in.inner);
    }
  }

  void load(const LinearKernels& kernel, const FeedForward& in) {
    norm.load(kernel, in.dtype, in.norm);
    for (int part = 0; part < parts_of(in); ++part) {
      kernel.pack(in.dtype, transposed(expand_part(in, part)), in.width, in.inner, packed[part]);
      load_vector(kernel, in.dtype, offset(in.expand.bias, int64_t(part) * in.inner, in.dtype), in.inner, bias[part]);
    }
  }
};

struct Tiles {
  NormedRows x;
  RowTile hidden[2], active;

  Tiles(Taker& take, const FeedForward& in)
      : x(take, in.width), hidden{take.tile(in.inner), take.tile(in.inner)}, active(take.tile(in.inner)) {}

  // Loads rows of x and computes their hidden features; returns the normed rows. The backward pass also calls this:
  // computing these products takes no longer than writing hidden features to memory and reading them again.
  RowTile expand(const LinearKernels& kernel, const FeedForward& in, const Expansion& by, int64_t row,
                 int count) const {
    kernel.load(in.dtype, rows_from(in.x, row, in.dtype), count, in.width, nullptr, 0, x.rows);
    const RowTile normed = x.normalise(kernel, by.norm, count);
    for (int part = 0; part < parts_of(in); ++part)
      kernel.multiply(normed, count, in.width, by.packed[part], in.inner, by.bias[part], false, hidden[part]);
    return normed;
  }
};

struct Parameters {
  Expansion expansion;
  void *contract, *contract_bias;

  Parameters(Taker& take, const FeedForward& in)
      : expansion(take, in), contract(take.packed(in.inner, in.width)), contract_bias(take.vector(in.width)) {}

  void load(const LinearKernels& kernel, const FeedForward& in) {
    expansion.load(kernel, in);
    kernel.pack(in.dtype, transposed(in.contract.weight), in.inner, in.width, contract);
    load_vector(kernel, in.dtype, in.contract.bias, in.width, contract_bias);
  }
};

void forward(const FeedForward& in, void* y) {
  const LinearKernels& kernel = linear_kernels(in.dtype);
  for_each_tile<Parameters, Tiles>(
      kernel, in, in.rows, [&](int64_t row, int count, const Parameters& parameters, const Tiles& tiles) {
        const RowTile normed = tiles.expand(kernel, in, parameters.expansion, row, count);
        const RowTile sum = in.residual == Residual::kNormed ? normed : tiles.x.rows;
        kernel.activate(in.activation, tiles.hidden[0], tiles.hidden[1], count, in.inner, tiles.active);
        kernel.multiply(tiles.active, count, in.inner, parameters.contract, in.width, parameters.contract_bias, true,
                        sum);
        kernel.store(sum, count, in.width, in.dtype, offset(y, row * in.width, in.dtype), in.width);
      });
}

// The matrices by which gradients are multiplied: dactive = dy contract, dnormed = dhidden expand.
struct BackwardParameters {
  Expansion expansion;
  void *expand[2], *contract;

  BackwardParameters(Taker& take, const FeedForward& in)
      : expansion(take, in),
        expand{take.packed(in.inner, in.width), take.packed(in.inner, in.width)},
        contract(take.packed(in.width, in.inner)) {}

  void load(const LinearKernels& kernel, const FeedForward& in) {
    expansion.load(kernel, in);
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
  Backward(const FeedForward& in, const Matrix& dy, const FeedForwardGradients& out)
      : in_(in), dy_(dy), dx_(out.x), sums_(kernel_, in.dtype, in.rows) {
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
    Team<BackwardParameters, BackwardTiles, FeedForward>(kernel_, in_, threads, sums_)
        .for_each_tile_of(sums_, [&](int piece, int64_t row, int count, const BackwardParameters& parameters,
                                     const BackwardTiles& tiles) { pass(piece, row, count, parameters, tiles); });
  }

 private:
  void pass(int piece, int64_t row, int count, const BackwardParameters& parameters, const BackwardTiles& tiles) const {
    const auto sum = [&](int number) { return sums_.of(piece, number); };
    const RowTile normed = tiles.expand(kernel_, in_, parameters.expansion, row, count);
    kernel_.load(in_.dtype, rows_from(dy_, row, in_.dtype), count, in_.width, nullptr, 0, tiles.dy);
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
    tiles.x.backward(kernel_, parameters.expansion.norm, in_.residual, tiles.dnormed, count, tiles.dy,
                     sum(norm_weight_), sum(norm_bias_));
    if (dx_) kernel_.store(tiles.dy, count, in_.width, in_.dtype, offset(dx_, row * in_.width, in_.dtype), in_.width);
  }

  const FeedForward& in_;
  const LinearKernels& kernel_ = linear_kernels(in_.dtype);
  const Matrix dy_;
  void* const dx_;
  ParameterSums sums_;
  int expand_[2], expand_bias_[2], contract_, contract_bias_, norm_weight_, norm_bias_;
};

}  // namespace

void feed_forward_rows(const FeedForward& in, const Rows& rows, void* y) {
  if (!rows.count) return;
  FeedForward part = in;
  part.x = rows_from(in.x, rows.first, in.dtype), part.rows = rows.count;
  forward(part, offset(y, rows.first * in.width, in.dtype));
}

void feed_forward(const FeedForward& in, void* y) {
  Crew::run(useful_threads(multiplications(in), in.threads), [&](const Crew::Member& member) {
    member.run([&] { feed_forward_rows(in, member.share(in.rows, 1), y); });
  });
}

void feed_forward_backward(const FeedForward& in, const Matrix& dy, const FeedForwardGradients& gradients) {
  Backward(in, dy, gradients).run();
}

}  // namespace cmab::cpu
