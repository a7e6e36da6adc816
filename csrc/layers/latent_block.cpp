// What follows the first cross-attention of a block: seven layers in one call, forward and back.
#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "common/plan.h"
#include "layers/call.h"

namespace cmab::cpu {
namespace {

// The input of each layer, and what it keeps. Without `keep`, layers overwrite their input and share what they need.
struct Kept {
  void* block[4];    // the block latents before each of their layers, and after the last
  void* latents[3];  // the latents before each layer but the first; null without `keep`: `y` itself
  AttentionKept attention[3];
  size_t bytes;

  Kept(const LatentBlock& in, bool keep, void* memory) {
    Arena arena(memory);
    const DType sums = state_type(in.dtype);
    const int64_t m = in.batch * in.block_latents, n = in.batch * in.latents, most = std::max(m, n);
    const auto rows = [&](int64_t count, int64_t width, DType dtype) -> void* {
      return arena.take<char>(count * width * element_bytes(dtype));
    };
    for (int i = 0; i < 4; ++i) block[i] = keep || i == 0 ? rows(m, in.width, in.dtype) : block[0];
    for (int i = 0; i < 3; ++i) latents[i] = keep ? rows(n, in.width, in.dtype) : nullptr;
    for (int i = 0; i < 3; ++i) {
      if (!keep && i > 0) {
        attention[i] = attention[0];
        continue;
      }
      const int64_t queries = !keep ? most : i == 0 ? m : n, keys = !keep ? most : i == 2 ? n : m;
      attention[i].query = rows(queries, in.width, sums);
      attention[i].key = rows(keys, in.width, sums), attention[i].value = rows(keys, in.width, sums);
      attention[i].out = rows(queries, in.width, sums);
      attention[i].lse = static_cast<double*>(rows(queries, in.heads, DType::kFloat64));
    }
    bytes = arena.used();
  }
};

Matrix rows_of(const LatentBlock& in, const void* data) { return {data, in.width, 1}; }

FeedForward feed_forward_of(const LatentBlock& in, int number, const Matrix& x) {
  const FeedForwardWeights& weights = in.feed_forward[number];
  const int64_t rows = in.batch * (number < 2 ? in.block_latents : in.latents);
  return {in.dtype, rows,         in.width,       in.inner,         Activation::kGeglu,
          x,        weights.norm, weights.expand, weights.contract, in.threads};
}

// Attention on the block latents (0), of the latents over them (1) and on the latents (2).
AttentionLayer attention_of(const LatentBlock& in, int number, const Matrix& x, const Matrix& context) {
  const AttentionWeights& weights = in.attention[number];
  AttentionLayer layer{};
  layer.dtype = in.dtype, layer.batch = in.batch;
  layer.latents = number == 0 ? in.block_latents : in.latents;
  layer.keys = number == 2 ? in.latents : in.block_latents;
  layer.width = layer.context_width = in.width, layer.heads = in.heads;
  layer.key_width = layer.value_width = in.width / in.heads;
  layer.scale = in.scale, layer.crosses = number == 1, layer.x = x, layer.context = context;
  layer.norm = weights.norm, layer.context_norm = weights.context_norm;
  layer.query = weights.query, layer.key = weights.key, layer.value = weights.value, layer.output = weights.output;
  layer.threads = in.threads;
  return layer;
}

AttentionLayer attended_of(const LatentBlock& in, const void* x) {
  AttentionLayer layer = attention_of(in, 0, rows_of(in, x), {});
  layer.output = in.output;
  return layer;
}

}  // namespace

size_t latent_block_bytes(const LatentBlock& in) { return Kept(in, true, nullptr).bytes; }

void latent_block(const LatentBlock& in, void* y, void* memory) {
  Workspace workspace;
  if (!memory) workspace.reserve(Kept(in, false, nullptr).bytes);
  const Kept kept(in, memory != nullptr, memory ? memory : workspace.at(0));
  const size_t bytes = in.block_latents * in.width * element_bytes(in.dtype);
  for (int64_t b = 0; b < in.batch; ++b) std::memcpy(static_cast<char*>(kept.block[0]) + b * bytes, in.block, bytes);
  void* const latents[4] = {memory ? kept.latents[0] : y, memory ? kept.latents[1] : y, memory ? kept.latents[2] : y,
                            y};

  const auto block = [&](int i) { return rows_of(in, kept.block[i]); };
  const auto row = [&](int i) { return rows_of(in, latents[i]); };
  attended_layer(attended_of(in, kept.block[0]), in.attended, kept.block[0]);
  feed_forward(feed_forward_of(in, 0, block(0)), kept.block[1]);
  attention_layer(attention_of(in, 0, block(1), {}), kept.attention[0], kept.block[2]);
  feed_forward(feed_forward_of(in, 1, block(2)), kept.block[3]);
  attention_layer(attention_of(in, 1, in.x, block(3)), kept.attention[1], latents[0]);
  feed_forward(feed_forward_of(in, 2, row(0)), latents[1]);
  attention_layer(attention_of(in, 2, row(1), {}), kept.attention[2], latents[2]);
  feed_forward(feed_forward_of(in, 3, row(2)), latents[3]);
}

void latent_block_backward(const LatentBlock& in, const Matrix& dy, void* memory,
                           const LatentBlockGradients& gradients) {
  const Kept kept(in, true, memory);
  const Matrix dx = rows_of(in, gradients.x), dblock = rows_of(in, gradients.block);
  const auto back = [&](int number, const void* x, const Matrix& d, void* to) {
    const FeedForwardWeightGradients& of = gradients.feed_forward[number];
    feed_forward_backward(feed_forward_of(in, number, rows_of(in, x)), d, {to, of.norm, of.expand, of.contract});
  };
  const auto attend_back = [&](int number, const Matrix& x, const Matrix& context, const Matrix& d, void* to) {
    const AttentionWeightGradients& of = gradients.attention[number];
    void* const dcontext = number == 1 ? gradients.block : nullptr;
    attention_layer_backward(attention_of(in, number, x, context), d, kept.attention[number],
                             {to, dcontext, of.norm, of.context_norm, of.query, of.key, of.value, of.output});
  };
  back(3, kept.latents[2], dy, gradients.x);
  attend_back(2, rows_of(in, kept.latents[1]), {}, dx, gradients.x);
  back(2, kept.latents[0], dx, gradients.x);
  attend_back(1, in.x, rows_of(in, kept.block[3]), dx, gradients.x);
  back(1, kept.block[2], dblock, gradients.block);
  attend_back(0, rows_of(in, kept.block[1]), {}, dblock, gradients.block);
  back(0, kept.block[0], dblock, gradients.block);
  attended_layer_backward(attended_of(in, kept.block[0]), dblock, in.attended, gradients.output, gradients.attended);
}

}  // namespace cmab::cpu
