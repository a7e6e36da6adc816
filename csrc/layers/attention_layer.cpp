// The attention layer: rows are normed and projected to heads, the attention family attends, and the result is
// projected back.
#include "attention/call.h"
#include "layers/crew.h"
#include "layers/projection.h"

namespace cmab::cpu {
namespace {

struct OutputTiles {
  NormedRows x;
  RowTile heads;
  OutputTiles(Taker& take, const AttentionLayer& in) : x(take, in.width), heads(take.tile(in.heads * in.value_width)) {}
};

// The norm of the residual, and the packed matrix of the output projection, (H E, C), or of its gradient, (C, H E).
template <bool kBackward>
struct OutputParameters {
  NormParameters norm;
  void *bias, *packed;

  OutputParameters(Taker& take, const AttentionLayer& in)
      : norm(take, in.width),
        bias(take.vector(in.width)),
        packed(kBackward ? take.packed(in.width, in.heads * in.value_width)
                         : take.packed(in.heads * in.value_width, in.width)) {}

  void load(const LinearKernels& kernel, const AttentionLayer& in) {
    const int depth = in.heads * in.value_width;
    if constexpr (kBackward) {
      kernel.pack(in.dtype, in.output.weight, in.width, depth, packed);
    } else {
      kernel.pack(in.dtype, transposed(in.output.weight), depth, in.width, packed);
      load_vector(kernel, in.dtype, in.output.bias, in.width, bias);
      if (in.residual == Residual::kNormed) norm.load(kernel, in.dtype, in.norm);
    }
  }
};

double output_multiplications(const AttentionLayer& in) {
  return double(in.batch) * in.latents * in.heads * in.value_width * in.width;
}

double multiplications(const AttentionLayer& in) {
  const double depth = double(in.heads) * in.key_width, width = double(in.heads) * in.value_width;
  const double latents = double(in.batch) * in.latents, keys = double(in.batch) * in.keys;
  return latents * in.width * (depth + width) + keys * in.context_width * (depth + width) +
         latents * in.keys * (depth + width);
}

Heads heads_of(const AttentionLayer& in, const void* data, int width, int64_t rows) {
  return {const_cast<void*>(data), in.heads, width, rows};
}

// Computes y = r + output(out) for some rows of all sets, on the calling thread.
void project_output(const LinearKernels& kernel, const AttentionLayer& in, const Rows& rows, const void* out, void* y) {
  using Parameters = OutputParameters<false>;
  const int depth = in.heads * in.value_width;
  const DType sums = state_type(in.dtype);
  const Heads heads = heads_of(in, out, in.value_width, in.latents);
  for_each_tile<Parameters, OutputTiles>(
      kernel, in, rows.count, [&](int64_t at, int count, const Parameters& parameters, const OutputTiles& mine) {
        const int64_t row = rows.first + at;
        heads.load(kernel, sums, row, count, mine.heads);
        kernel.load(in.dtype, rows_from(in.x, row, in.dtype), count, in.width, nullptr, 0, mine.x.rows);
        const RowTile sum = mine.x.normalise(kernel, parameters.norm, count);
        kernel.multiply(mine.heads, count, depth, parameters.packed, in.width, parameters.bias, true, sum);
        kernel.store(sum, count, in.width, in.dtype, offset(y, row * in.width, in.dtype), in.width);
      });
}

// The gradient of the output projection: dout (B, H, L, E) in the type of sums, and the gradients of its parameters.
void output_backward(const LinearKernels& kernel, const AttentionLayer& in, const Matrix& dy, const void* out,
                     const WeightGradients& gradient, void* dout) {
  using Parameters = OutputParameters<true>;
  const int depth = in.heads * in.value_width;
  const DType sums = state_type(in.dtype);
  const Heads heads = heads_of(in, out, in.value_width, in.latents);
  const Heads dheads = heads_of(in, dout, in.value_width, in.latents);
  ParameterSums parts(kernel, in.dtype, in.batch * in.latents);
  const int weight = parts.add(gradient.weight, in.width, depth), bias = parts.add(gradient.bias, 1, in.width);
  const int threads = useful_threads(2 * output_multiplications(in), in.threads);
  Team<Parameters, OutputTiles, AttentionLayer>(kernel, in, threads, parts)
      .for_each_tile_of(
          parts, [&](int piece, int64_t row, int count, const Parameters& parameters, const OutputTiles& mine) {
            const RowTile slopes = mine.x.rows;
            kernel.load(in.dtype, rows_from(dy, row, in.dtype), count, in.width, nullptr, 0, slopes);
            if (parts.needed(weight)) {
              heads.load(kernel, sums, row, count, mine.heads);
              kernel.add_products(slopes, in.width, mine.heads, depth, count, parts.of(piece, weight));
            }
            if (parts.needed(bias)) kernel.add_rows(slopes, count, in.width, parts.of(piece, bias).data);
            kernel.multiply(slopes, count, in.width, parameters.packed, depth, nullptr, false, mine.heads);
            dheads.store(kernel, sums, mine.heads, row, count);
          });
}

// ---- the layer

// The rows from which queries are made. If there is no context, they also make keys and values.
Source latents_of(const AttentionLayer& in, const AttentionKept& kept, const AttentionLayerGradients& gradients) {
  const int depth = in.heads * in.key_width, width = in.heads * in.value_width;
  Source source{in.dtype, in.x, 0, in.batch * in.latents, in.width, nullptr, &in.norm, {}};
  source.branches.push_back({&in.query, depth, heads_of(in, kept.query, in.key_width, in.latents), gradients.query});
  if (in.crosses) return source;
  source.branches.push_back({&in.key, depth, heads_of(in, kept.key, in.key_width, in.keys), gradients.key});
  source.branches.push_back({&in.value, width, heads_of(in, kept.value, in.value_width, in.keys), gradients.value});
  return source;
}

Source context_of(const AttentionLayer& in, const AttentionKept& kept, const AttentionLayerGradients& gradients) {
  const int depth = in.heads * in.key_width, width = in.heads * in.value_width;
  return {in.dtype,
          in.context,
          0,
          in.batch * in.keys,
          in.context_width,
          in.ignored,
          &in.context_norm,
          {{&in.key, depth, heads_of(in, kept.key, in.key_width, in.keys), gradients.key},
           {&in.value, width, heads_of(in, kept.value, in.value_width, in.keys), gradients.value}}};
}

Operand operand(const AttentionLayer& in, void* heads, int64_t rows, int width) {
  return {heads, {in.heads * rows * width, rows * width, width, 1}};
}

Inputs attention_inputs(const AttentionLayer& in, const AttentionKept& kept) {
  Inputs inputs{};
  inputs.shape = {state_type(in.dtype), in.key_width, in.value_width, in.scale};
  inputs.batch = in.batch, inputs.heads = in.heads, inputs.queries = in.latents, inputs.keys = in.keys;
  inputs.query = operand(in, kept.query, in.latents, in.key_width);
  inputs.key = operand(in, kept.key, in.keys, in.key_width);
  inputs.value = operand(in, kept.value, in.keys, in.value_width);
  inputs.ignored = in.ignored;
  inputs.ignored_stride[0] = in.keys, inputs.ignored_stride[1] = 1;
  inputs.threads = in.threads;
  return inputs;
}

}  // namespace

void attended_rows(const AttentionLayer& in, const Rows& rows, const void* out, void* y) {
  if (rows.count) project_output(linear_kernels(in.dtype), in, rows, out, y);
}

void attended_layer_backward(const AttentionLayer& in, const Matrix& dy, const void* out, const WeightGradients& output,
                             void* dout) {
  output_backward(linear_kernels(in.dtype), in, dy, out, output, dout);
}

void project_latents(const AttentionLayer& in, const Rows& rows, const AttentionKept& kept) {
  if (rows.count) project(linear_kernels(in.dtype), part_of(latents_of(in, kept, {}), rows));
}

void project_context(const AttentionLayer& in, const Rows& rows, const AttentionKept& kept) {
  if (rows.count) project(linear_kernels(in.dtype), part_of(context_of(in, kept, {}), rows));
}

void attend(const AttentionLayer& in, const Rows& rows, const AttentionKept& kept, const Crew::Member& member,
            void* y) {
  member.wait(in.batch);
  member.run(
      [&] { attention_forward_share(attention_inputs(in, kept), member.number, member.threads, kept.out, kept.lse); });
  member.wait(in.batch);
  member.run([&] { attended_rows(in, rows, kept.out, y); });
}

void attention_layer(const AttentionLayer& in, const AttentionKept& kept, void* y) {
  Crew::run(useful_threads(multiplications(in), in.threads), [&](const Crew::Member& member) {
    const Rows latents = member.share(in.batch, in.latents);
    member.run([&] {
      project_latents(in, latents, kept);
      if (in.crosses) project_context(in, member.share(in.batch, in.keys), kept);
    });
    attend(in, latents, kept, member, y);
  });
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
  attention_backward(attention_inputs(in, kept), operand(in, dout, in.latents, in.value_width), {&no_dlse, {}},
                     kept.out, kept.lse, {dquery, dkey, dvalue});
  const Heads of_key = heads_of(in, dkey, in.key_width, in.keys);
  const Heads of_value = heads_of(in, dvalue, in.value_width, in.keys);
  std::vector<Heads> dresults{heads_of(in, dquery, in.key_width, in.latents)};
  if (!in.crosses) dresults.insert(dresults.end(), {of_key, of_value});
  const Source source = latents_of(in, kept, gradients);
  ProjectionBackward(kernel, source, dresults, in.residual, dy, gradients.x, gradients.norm).run(in.threads);
  if (!in.crosses) return;
  const Source context = context_of(in, kept, gradients);
  ProjectionBackward(kernel, context, {of_key, of_value}, Residual::kInput, {}, gradients.context,
                     gradients.context_norm)
      .run(in.threads);
}

}  // namespace cmab::cpu
