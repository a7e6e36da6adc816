// The layers after the first cross-attention of a block, forward and backward.
#include "layers/latent_block.h"

#include <cstring>

namespace cmab::cpu {
namespace {

Matrix rows_of(const LatentBlock& in, const void* data) { return {data, in.width, 1}; }

FeedForward feed_forward_of(const LatentBlock& in, int number, const Matrix& x) {
  const FeedForwardWeights& weights = in.feed_forward[number];
  const int64_t rows = in.batch * (number < 2 ? in.block_latents : in.latents);
  return {in.dtype, rows,         in.width,       in.inner,         Activation::kGeglu, in.residual,
          x,        weights.norm, weights.expand, weights.contract, in.threads};
}

// The attention on the block latents (0), the attention of the latents to the block latents (1), and the attention on
// the latents (2).
AttentionLayer attention_of(const LatentBlock& in, int number, const Matrix& x, const Matrix& context) {
  const AttentionWeights& weights = in.attention[number];
  AttentionLayer layer{};
  layer.dtype = in.dtype, layer.batch = in.batch;
  layer.latents = number == 0 ? in.block_latents : in.latents;
  layer.keys = number == 2 ? in.latents : in.block_latents;
  layer.width = layer.context_width = in.width, layer.heads = in.heads;
  layer.key_width = layer.value_width = in.width / in.heads;
  layer.scale = in.scale, layer.residual = in.residual, layer.crosses = number == 1, layer.x = x,
  layer.context = context;
  layer.norm = weights.norm, layer.context_norm = weights.context_norm;
  layer.query = weights.query, layer.key = weights.key, layer.value = weights.value, layer.output = weights.output;
  layer.threads = in.threads;
  return layer;
}

AttentionLayer attended_of(const LatentBlock& in, const void* x) {
  AttentionLayer layer = attention_of(in, 0, rows_of(in, x), {});
  layer.norm = in.norm, layer.output = in.output;
  return layer;
}

}  // namespace

void compress(const LatentBlock& in, const BlockMemory& at, const Crew::Member& member) {
  const Rows rows = member.share(in.batch, in.block_latents);
  const auto block = [&](int i) { return rows_of(in, at.block[i]); };
  const AttentionLayer among = attention_of(in, 0, block(1), {});
  member.run([&] {
    const size_t bytes = in.width * element_bytes(in.dtype);
    for (int64_t row = rows.first; row < rows.end(); ++row)
      std::memcpy(static_cast<char*>(at.block[0]) + row * bytes,
                  static_cast<const char*>(in.block) + row % in.block_latents * bytes, bytes);
    attended_rows(attended_of(in, at.block[0]), rows, in.attended, at.block[0]);
    feed_forward_rows(feed_forward_of(in, 0, block(0)), rows, at.block[1]);
    project_latents(among, rows, at.attention[0]);
  });
  attend(among, rows, at.attention[0], member, at.block[2]);
  member.run([&] { feed_forward_rows(feed_forward_of(in, 1, block(2)), rows, at.block[3]); });
}

void retrieve(const LatentBlock& in, const BlockMemory& at, const Crew::Member& member) {
  const Rows rows = member.share(in.batch, in.latents);
  const auto latents = [&](int i) { return rows_of(in, at.latents[i]); };
  const AttentionLayer across = attention_of(in, 1, in.x, rows_of(in, at.block[3]));
  const AttentionLayer among = attention_of(in, 2, latents(1), {});
  member.run([&] {
    project_latents(across, rows, at.attention[1]);
    project_context(across, member.share(in.batch, in.block_latents), at.attention[1]);
  });
  attend(across, rows, at.attention[1], member, at.latents[0]);
  member.run([&] {
    feed_forward_rows(feed_forward_of(in, 2, latents(0)), rows, at.latents[1]);
    project_latents(among, rows, at.attention[2]);
  });
  attend(among, rows, at.attention[2], member, at.latents[2]);
  member.run([&] { feed_forward_rows(feed_forward_of(in, 3, latents(2)), rows, at.latents[3]); });
}

void latent_block_backward(const LatentBlock& in, const Matrix& dy, const BlockMemory& kept,
                           const LatentBlockGradients& gradients) {
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
