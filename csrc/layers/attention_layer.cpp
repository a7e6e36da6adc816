// The attention layer: rows are normed and projected to heads, the attention family attends, and its result is
// projected back.
#include "attention/call.h"
#include "layers/call.h"
#include "linear/driver.h"

namespace cmab::cpu {
namespace {

// A linear layer of the rows, `width` columns of result, and where that result (rows, width) or, going back, its
// gradient is, in the type of sums.
struct Branch {
  const Weights* weights;
  int width;
  void* result;
  WeightGradients gradient;
};

// Rows that are normed and projected to one or more branches.
struct Source {
  DType dtype;
  Matrix rows;
  int64_t count;
  int width;
  const uint8_t* ignored;
  const NormWeights* norm;
  std::vector<Branch> branches;

  double multiplications() const {
    double columns = 0;
    for (const Branch& branch : branches) columns += branch.width;
    return double(count) * width * columns;
  }

  void load(const LinearKernels& kernel, int64_t row, int rows_to_load, RowTile to) const {
    kernel.load(dtype, rows_from(rows, row, dtype), rows_to_load, width, ignored ? ignored + row : nullptr, 1, to);
  }
};

// The packed matrices and biases of the branches, for the forward or the backward pass.
template <bool kBackward>
struct SourceParameters {
  NormParameters norm;
  std::vector<void*> packed, bias;

  SourceParameters(Taker& take, const Source& source) : norm(take, source.width) {
    for (const Branch& branch : source.branches) {
      packed.push_back(kBackward ? take.packed(branch.width, source.width) : take.packed(source.width, branch.width));
      bias.push_back(take.vector(branch.width));
    }
  }

  void load(const LinearKernels& kernel, const Source& source) {
    norm.load(kernel, source.dtype, *source.norm);
    for (size_t i = 0; i < packed.size(); ++i) {
      const Branch& branch = source.branches[i];
      const Matrix& weight = branch.weights->weight;
      if constexpr (kBackward) {
        kernel.pack(source.dtype, weight, branch.width, source.width, packed[i]);
      } else {
        kernel.pack(source.dtype, transposed(weight), source.width, branch.width, packed[i]);
        load_vector(kernel, source.dtype, branch.weights->bias, branch.width, bias[i]);
      }
    }
  }
};

int widest_branch(const Source& source) {
  int width = 0;
  for (const Branch& branch : source.branches) width = std::max(width, branch.width);
  return width;
}

struct SourceTiles {
  NormedRows x;
  RowTile branch, dx, dnormed;

  SourceTiles(Taker& take, const Source& source)
      : x(take, source.width),
        branch(take.tile(widest_branch(source))),
        dx(take.tile(source.width)),
        dnormed(take.tile(source.width)) {}
};

// Fills the branches' results from the rows.
void project(const LinearKernels& kernel, const Source& source, int threads) {
  using Parameters = SourceParameters<false>;
  const DType sums = state_type(source.dtype);
  Team<Parameters, SourceTiles, Source>(kernel, source, useful_threads(source.multiplications(), threads))
      .for_each_tile(source.count, [&](int64_t row, int count, const Parameters& parameters, const SourceTiles& mine) {
        source.load(kernel, row, count, mine.x.rows);
        const RowTile normed = mine.x.normalise(kernel, parameters.norm, count);
        for (size_t i = 0; i < source.branches.size(); ++i) {
          const Branch& branch = source.branches[i];
          kernel.multiply(normed, count, source.width, parameters.packed[i], branch.width, parameters.bias[i], false,
                          mine.branch);
          kernel.store(mine.branch, count, branch.width, sums, offset(branch.result, row * branch.width, sums),
                       branch.width);
        }
      });
}

// Heads (batch, heads, rows, width), contiguous, in the type of sums, which are read as rows (batch * rows, heads *
// width).
struct Heads {
  const void* data;
  int heads, width;
  int64_t rows;

  void load(const LinearKernels& kernel, DType sums, int64_t row, int count, RowTile to) const {
    for (int done = 0; done < count;) {
      const int64_t batch = (row + done) / rows, at = (row + done) % rows;
      const int some = int(std::min<int64_t>(count - done, rows - at));
      kernel.load_heads(sums, offset(data, (batch * heads * rows + at) * width, sums), width, rows * width, heads,
                        width, some, {offset(to.data, done * to.stride, sums), to.stride});
      done += some;
    }
  }
};

// Adds up the gradients of the rows and of all parameters, given those of the branches' results as heads. drows =
// residual (without data: 0) + the gradient through the branches.
class ProjectionBackward {
 public:
  ProjectionBackward(const LinearKernels& kernel, const Source& source, std::vector<Heads> dresults,
                     const Matrix& residual, void* drows, const WeightGradients& norm)
      : kernel_(kernel),
        source_(source),
        dresults_(std::move(dresults)),
        residual_(residual),
        drows_(drows),
        sums_(kernel, source.dtype, source.count) {
    for (const Branch& branch : source.branches) {
      weights_.push_back(sums_.add(branch.gradient.weight, branch.width, source.width));
      biases_.push_back(sums_.add(branch.gradient.bias, 1, branch.width));
    }
    norm_weight_ = sums_.add(norm.weight, 1, source.width);
    norm_bias_ = sums_.add(norm.bias, 1, source.width);
  }

  void run(int threads) {
    Team<Parameters, SourceTiles, Source>(kernel_, source_, useful_threads(2 * source_.multiplications(), threads),
                                          &sums_)
        .for_each_tile_of(sums_, [&](int piece, int64_t row, int count, const Parameters& parameters,
                                     const SourceTiles& tiles) { pass(piece, row, count, parameters, tiles); });
  }

 private:
  using Parameters = SourceParameters<true>;

  void pass(int piece, int64_t row, int count, const Parameters& parameters, const SourceTiles& tiles) const {
    const auto sum = [&](int number) { return sums_.of(piece, number); };
    const DType dtype = source_.dtype;
    const uint8_t absent = residual_.data == nullptr;
    source_.load(kernel_, row, count, tiles.x.rows);
    kernel_.load(dtype, rows_from(residual_, row, dtype), count, source_.width, absent ? &absent : nullptr, 0,
                 tiles.dx);
    const RowTile normed = tiles.x.normalise(kernel_, parameters.norm, count);
    for (size_t i = 0; i < source_.branches.size(); ++i) {
      const int width = source_.branches[i].width;
      dresults_[i].load(kernel_, state_type(dtype), row, count, tiles.branch);
      if (sums_.needed(weights_[i]))
        kernel_.add_products(tiles.branch, width, normed, source_.width, count, sum(weights_[i]));
      if (sums_.needed(biases_[i])) kernel_.add_rows(tiles.branch, count, width, sum(biases_[i]).data);
      kernel_.multiply(tiles.branch, count, width, parameters.packed[i], source_.width, nullptr, i > 0, tiles.dnormed);
    }
    tiles.x.backward(kernel_, parameters.norm, tiles.dnormed, count, tiles.dx, sum(norm_weight_), sum(norm_bias_));
    if (drows_)
      kernel_.store(tiles.dx, count, source_.width, dtype, offset(drows_, row * source_.width, dtype), source_.width);
  }

  const LinearKernels& kernel_;
  const Source& source_;
  const std::vector<Heads> dresults_;
  const Matrix residual_;
  void* const drows_;
  ParameterSums sums_;
  std::vector<int> weights_, biases_;
  int norm_weight_, norm_bias_;
};

// ---- the output projection

struct OutputTiles {
  RowTile x, heads;
  OutputTiles(Taker& take, const AttentionLayer& in)
      : x(take.tile(in.width)), heads(take.tile(in.heads * in.value_width)) {}
};

// The packed matrix of the output projection, (H E, C), or of its gradient, (C, H E).
template <bool kBackward>
struct OutputParameters {
  void *packed, *bias;

  OutputParameters(Taker& take, const AttentionLayer& in)
      : packed(kBackward ? take.packed(in.width, in.heads * in.value_width)
                         : take.packed(in.heads * in.value_width, in.width)),
        bias(take.vector(in.width)) {}

  void load(const LinearKernels& kernel, const AttentionLayer& in) {
    const int depth = in.heads * in.value_width;
    if constexpr (kBackward) {
      kernel.pack(in.dtype, in.output.weight, in.width, depth, packed);
    } else {
      kernel.pack(in.dtype, transposed(in.output.weight), depth, in.width, packed);
      load_vector(kernel, in.dtype, in.output.bias, in.width, bias);
    }
  }
};

double output_multiplications(const AttentionLayer& in) {
  return double(in.batch) * in.latents * in.heads * in.value_width * in.width;
}

Heads heads_of(const AttentionLayer& in, const void* data, int width, int64_t rows) {
  return {data, in.heads, width, rows};
}

// y = x + output(out)
void project_output(const LinearKernels& kernel, const AttentionLayer& in, const void* out, void* y) {
  using Parameters = OutputParameters<false>;
  const int depth = in.heads * in.value_width;
  const DType sums = state_type(in.dtype);
  const Heads heads = heads_of(in, out, in.value_width, in.latents);
  Team<Parameters, OutputTiles, AttentionLayer>(kernel, in, useful_threads(output_multiplications(in), in.threads))
      .for_each_tile(
          in.batch * in.latents, [&](int64_t row, int count, const Parameters& parameters, const OutputTiles& mine) {
            heads.load(kernel, sums, row, count, mine.heads);
            kernel.load(in.dtype, rows_from(in.x, row, in.dtype), count, in.width, nullptr, 0, mine.x);
            kernel.multiply(mine.heads, count, depth, parameters.packed, in.width, parameters.bias, true, mine.x);
            kernel.store(mine.x, count, in.width, in.dtype, offset(y, row * in.width, in.dtype), in.width);
          });
}

// The gradient of the output projection: dout (B, L, H E) in the type of sums, and those of its parameters.
void output_backward(const LinearKernels& kernel, const AttentionLayer& in, const Matrix& dy, const void* out,
                     const WeightGradients& gradient, void* dout) {
  using Parameters = OutputParameters<true>;
  const int depth = in.heads * in.value_width;
  const DType sums = state_type(in.dtype);
  const Heads heads = heads_of(in, out, in.value_width, in.latents);
  ParameterSums parts(kernel, in.dtype, in.batch * in.latents);
  const int weight = parts.add(gradient.weight, in.width, depth), bias = parts.add(gradient.bias, 1, in.width);
  const int threads = useful_threads(2 * output_multiplications(in), in.threads);
  Team<Parameters, OutputTiles, AttentionLayer>(kernel, in, threads, &parts)
      .for_each_tile_of(
          parts, [&](int piece, int64_t row, int count, const Parameters& parameters, const OutputTiles& mine) {
            kernel.load(in.dtype, rows_from(dy, row, in.dtype), count, in.width, nullptr, 0, mine.x);
            if (parts.needed(weight)) {
              heads.load(kernel, sums, row, count, mine.heads);
              kernel.add_products(mine.x, in.width, mine.heads, depth, count, parts.of(piece, weight));
            }
            if (parts.needed(bias)) kernel.add_rows(mine.x, count, in.width, parts.of(piece, bias).data);
            kernel.multiply(mine.x, count, in.width, parameters.packed, depth, nullptr, false, mine.heads);
            kernel.store(mine.heads, count, depth, sums, offset(dout, row * depth, sums), depth);
          });
}

// ---- the layer

// The rows that make queries, and keys and values too where there is no context.
Source latents_of(const AttentionLayer& in, const AttentionKept& kept, const AttentionLayerGradients& gradients) {
  const int depth = in.heads * in.key_width, width = in.heads * in.value_width;
  Source source{in.dtype, in.x, in.batch * in.latents, in.width, nullptr, &in.norm, {}};
  source.branches.push_back({&in.query, depth, kept.query, gradients.query});
  if (in.crosses) return source;
  source.branches.push_back({&in.key, depth, kept.key, gradients.key});
  source.branches.push_back({&in.value, width, kept.value, gradients.value});
  return source;
}

Source context_of(const AttentionLayer& in, const AttentionKept& kept, const AttentionLayerGradients& gradients) {
  const int depth = in.heads * in.key_width, width = in.heads * in.value_width;
  return {in.dtype,
          in.context,
          in.batch * in.keys,
          in.context_width,
          in.ignored,
          &in.context_norm,
          {{&in.key, depth, kept.key, gradients.key}, {&in.value, width, kept.value, gradients.value}}};
}

Operand heads_apart(const AttentionLayer& in, void* rows, int64_t count, int width) {
  return {rows, {count * in.heads * width, width, int64_t(in.heads) * width, 1}};
}

Inputs attention_inputs(const AttentionLayer& in, const AttentionKept& kept) {
  Inputs inputs{};
  inputs.shape = {state_type(in.dtype), in.key_width, in.value_width, in.scale};
  inputs.batch = in.batch, inputs.heads = in.heads, inputs.queries = in.latents, inputs.keys = in.keys;
  inputs.query = heads_apart(in, kept.query, in.latents, in.key_width);
  inputs.key = heads_apart(in, kept.key, in.keys, in.key_width);
  inputs.value = heads_apart(in, kept.value, in.keys, in.value_width);
  inputs.ignored = in.ignored;
  inputs.ignored_stride[0] = in.keys, inputs.ignored_stride[1] = 1;
  inputs.threads = in.threads;
  return inputs;
}

}  // namespace

void attended_layer(const AttentionLayer& in, const void* out, void* y) {
  project_output(linear_kernels(in.dtype), in, out, y);
}

void attended_layer_backward(const AttentionLayer& in, const Matrix& dy, const void* out, const WeightGradients& output,
                             void* dout) {
  output_backward(linear_kernels(in.dtype), in, dy, out, output, dout);
}

void attention_layer(const AttentionLayer& in, const AttentionKept& kept, void* y) {
  const LinearKernels& kernel = linear_kernels(in.dtype);
  project(kernel, latents_of(in, kept, {}), in.threads);
  if (in.crosses) project(kernel, context_of(in, kept, {}), in.threads);
  attention_forward(attention_inputs(in, kept), {}, {}, kept.out, kept.lse, nullptr);
  project_output(kernel, in, kept.out, y);
}

void attention_layer_backward(const AttentionLayer& in, const Matrix& dy, const AttentionKept& kept,
                              const AttentionLayerGradients& gradients) {
  const LinearKernels& kernel = linear_kernels(in.dtype);
  const DType sums = state_type(in.dtype);
  const int depth = in.heads * in.key_width, width = in.heads * in.value_width;
  const int64_t latents = in.batch * in.latents, keys = in.batch * in.keys;
  const auto bytes = [&](int64_t rows, int columns) { return align(rows * columns * element_bytes(sums)); };
  Workspace workspace;
  workspace.reserve(bytes(latents, width) + bytes(latents, depth) + bytes(keys, depth) + bytes(keys, width));
  void* const dout = workspace.at(0);
  void* const dquery = workspace.at(bytes(latents, width));
  void* const dkey = static_cast<char*>(dquery) + bytes(latents, depth);
  void* const dvalue = static_cast<char*>(dkey) + bytes(keys, depth);
  output_backward(kernel, in, dy, kept.out, gradients.output, dout);
  double no_dlse = 0;
  attention_backward(attention_inputs(in, kept), heads_apart(in, dout, in.latents, in.value_width), {&no_dlse, {}},
                     kept.out, kept.lse, {dquery, dkey, dvalue});
  const Heads of_key = heads_of(in, dkey, in.key_width, in.keys);
  const Heads of_value = heads_of(in, dvalue, in.value_width, in.keys);
  std::vector<Heads> dresults{heads_of(in, dquery, in.key_width, in.latents)};
  if (!in.crosses) dresults.insert(dresults.end(), {of_key, of_value});
  const Source source = latents_of(in, kept, gradients);
  ProjectionBackward(kernel, source, dresults, dy, gradients.x, gradients.norm).run(in.threads);
  if (!in.crosses) return;
  const Source context = context_of(in, kept, gradients);
  ProjectionBackward(kernel, context, {of_key, of_value}, {}, gradients.context, gradients.context_norm)
      .run(in.threads);
}

}  // namespace cmab::cpu
