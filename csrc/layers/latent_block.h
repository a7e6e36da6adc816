// The layers after the first cross-attention of a Constant Memory Attention Block, in steps for the threads of a crew.
#pragma once

#include "common/arena.h"
#include "layers/crew.h"

namespace cmab::cpu {

// The memory that the layers of a block write, contiguous. If nothing is kept for a backward pass, layers may overwrite
// their input: all addresses in `block` are then the same, and so are all in `latents`.
struct BlockMemory {
  void* block[4];    // (batch * block_latents, width): the input of each layer, and the last result
  void* latents[4];  // (batch * latents, width): the result of each layer
  AttentionKept attention[3];
};

namespace {

inline AttentionKept attention_memory(const LatentBlock& in, int64_t queries, int64_t keys, Arena& arena) {
  const DType sums = state_type(in.dtype);
  const auto rows = [&](int64_t count) -> void* { return arena.take<char>(count * in.width * element_bytes(sums)); };
  return {rows(queries), rows(keys), rows(keys), rows(queries), arena.take<double>(queries * in.heads)};
}

// Memory for a backward pass: all results are kept separately, and the last result is y.
inline BlockMemory kept_memory(const LatentBlock& in, void* y, Arena& arena) {
  const int64_t m = in.batch * in.block_latents, n = in.batch * in.latents;
  const auto rows = [&](int64_t count) -> void* {
    return arena.take<char>(count * in.width * element_bytes(in.dtype));
  };
  BlockMemory memory{};
  for (void*& block : memory.block) block = rows(m);
  for (int i = 0; i < 3; ++i) memory.latents[i] = rows(n);
  memory.latents[3] = y;
  memory.attention[0] = attention_memory(in, m, m, arena);
  memory.attention[1] = attention_memory(in, n, m, arena);
  memory.attention[2] = attention_memory(in, n, n, arena);
  return memory;
}

}  // namespace

// Fills the member's rows of block[3], from `attended`.
void compress(const LatentBlock&, const BlockMemory&, const Crew::Member&);
// Fills the member's rows of latents[3], from x and block[3].
void retrieve(const LatentBlock&, const BlockMemory&, const Crew::Member&);

// dy is (batch * latents, width); it may be the memory of the gradient of x.
void latent_block_backward(const LatentBlock&, const Matrix& dy, const BlockMemory& kept, const LatentBlockGradients&);

}  // namespace cmab::cpu
