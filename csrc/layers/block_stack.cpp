// A stack of Constant Memory Attention Blocks in one call, forward and backward. The first cross-attentions of all
// blocks share one pass over the inputs; then each block computes its other layers.
#include <cstring>

#include "layers/latent_block.h"
#include "layers/projection.h"
#include "projected/call.h"

namespace cmab::cpu {
namespace {

constexpr double kLittle = 1 << 20;  // with fewer multiplications, a second thread is not worthwhile

// The extents of the first cross-attentions: C columns of the inputs and of all heads, 2 C of keys and values.
struct Extents {
  int64_t depth, batch, latents, heads, width;  // K, B, M, H, C
  DType dtype, sums;

  explicit Extents(const BlockStack& in)
      : depth(int64_t(in.blocks.size())),
        batch(in.blocks[0].batch),
        latents(in.blocks[0].block_latents),
        heads(in.blocks[0].heads),
        width(in.blocks[0].width),
        dtype(in.blocks[0].dtype),
        sums(state_type(dtype)) {}

  int64_t set() const { return latents * width; }  // elements of the queries of one batch element
  int64_t block() const { return batch * set(); }
  // The copies of the queries in memory. An operand has one stride for blocks and batch together, so with several
  // blocks, each batch element needs a copy.
  int64_t copies() const { return depth == 1 ? 1 : batch; }
  int head_width() const { return int(width / heads); }
};

// Memory for `elements` in the type of sums, one after the other.
class Sums {
 public:
  Sums(DType dtype, void* memory) : arena_(memory), bytes_(element_bytes(dtype)) {}
  void* take(int64_t elements) { return arena_.take<char>(elements * bytes_); }
  size_t used() const { return arena_.used(); }

 private:
  Arena arena_;
  const size_t bytes_;
};

// The tensors that a pass over the inputs reads in addition to the inputs: the queries (K, copies, H, M, D), and the
// weights (K, 2 C, C) and biases (K, 2 C) of keys and values, into which the norm is folded.
struct Folded {
  void *query, *weight, *bias;

  Folded(Sums& take, const Extents& n)
      : query(take.take(n.depth * n.copies() * n.set())),
        weight(take.take(n.depth * 2 * n.width * n.width)),
        bias(take.take(n.depth * 2 * n.width)) {}
};

// The norm of the inputs in the compute type, and the sums of its gradient.
struct ContextNorm {
  void *scale, *shift, *dscale, *dshift;

  ContextNorm(Taker& take, int width)
      : scale(take.vector(width)), shift(take.vector(width)), dscale(take.vector(width)), dshift(take.vector(width)) {}
  void load(const LinearKernels& kernel, const Extents& n, const NormWeights& from) const {
    load_vector(kernel, n.dtype, from.weight, int(n.width), scale);
    load_vector(kernel, n.dtype, from.bias, int(n.width), shift);
    load_vector(kernel, n.dtype, nullptr, int(n.width), dscale);
    load_vector(kernel, n.dtype, nullptr, int(n.width), dshift);
  }
};

// Calls function(weight, gradient of it, first row among the 2 C) for keys and values.
template <class Function>
void for_each_projection(const Extents& n, const BlockReading& reading, const BlockReadingGradients& to,
                         Function function) {
  function(reading.key.weight, to.key.weight, int64_t(0));
  function(reading.value.weight, to.value.weight, n.width);
}

// The block latents of block k, from which its queries are made.
Source queries_of(const BlockStack& in, const Extents& n, int64_t k, void* query, const WeightGradients& gradient) {
  const BlockReading& reading = in.readings[k];
  const Matrix rows{in.blocks[k].block, n.width, 1};
  const Heads heads{query, int(n.heads), n.head_width(), n.latents};
  return {n.dtype,
          rows,
          0,
          n.latents,
          int(n.width),
          nullptr,
          &in.blocks[k].norm,
          {{&reading.query, int(n.width), heads, gradient}}};
}

// Fills the queries, weights and biases of block k.
void prepare(const LinearKernels& kernel, const BlockStack& in, const Extents& n, const Folded& folded, int64_t k) {
  Workspace workspace;
  workspace.reserve(bytes_of<ContextNorm>(kernel, int(n.width)));
  const auto norm = placed<ContextNorm>(workspace.at(0), kernel, int(n.width));
  const size_t set_bytes = n.set() * element_bytes(n.sums);
  char* const query = static_cast<char*>(offset(folded.query, k * n.copies() * n.set(), n.sums));
  project(kernel, queries_of(in, n, k, query, {}));
  for (int64_t b = 1; b < n.copies(); ++b) std::memcpy(query + b * set_bytes, query, set_bytes);
  norm.load(kernel, n, in.readings[k].context_norm);
  for_each_projection(n, in.readings[k], {}, [&](const Matrix& weight, void*, int64_t first) {
    const int64_t row = k * 2 * n.width + first;
    kernel.fold(n.dtype, weight, int(n.width), int(n.width), norm.scale, norm.shift,
                offset(folded.weight, row * n.width, n.sums), offset(folded.bias, row, n.sums));
  });
}

// Does the same for all blocks, divided among the threads.
void prepare(const LinearKernels& kernel, const BlockStack& in, const Extents& n, const Folded& folded) {
  const double products = double(n.depth) * n.width * n.width * (n.latents + 2);
  const int threads = int(std::min<int64_t>(n.depth, useful_threads(products, in.blocks[0].threads, kLittle)));
  Crew::run(threads, [&](const Crew::Member& member) {
    for (int64_t k = member.number; k < n.depth; k += member.threads)
      member.run([&] { prepare(kernel, in, n, folded, k); });
  });
}

// Heads (K B, H, M, D), whose sets are `set_stride` apart.
Operand heads_of(const Extents& n, const void* heads, int64_t set_stride) {
  return {const_cast<void*>(heads), {set_stride, n.latents * n.head_width(), n.head_width(), 1}};
}

ProjectedInputs pass_over(const BlockStack& in, const Extents& n, const Folded& folded) {
  ProjectedInputs call{};
  Inputs& attention = call.attention;
  attention.shape = {n.sums, n.head_width(), n.head_width(), in.blocks[0].scale};
  attention.batch = n.batch, attention.heads = n.heads, attention.queries = n.latents, attention.keys = in.rows;
  attention.query = heads_of(n, folded.query, n.copies() == n.batch ? n.set() : 0);
  attention.ignored = in.ignored;
  std::copy_n(in.ignored_stride, 2, attention.ignored_stride);
  attention.threads = in.blocks[0].threads;
  call.blocks = n.depth, call.dtype = n.dtype, call.inputs = in.inputs, call.columns = int(n.width);
  call.weight = folded.weight, call.bias = folded.bias;
  call.normed = true, call.eps = in.readings[0].context_norm.eps;
  return call;
}

int64_t latent_elements(const BlockStack& in, const Extents& n) { return n.batch * in.blocks[0].latents * n.width; }

// The memory of the latents after block k: y after the last block, else `between` if it is needed, else `otherwise`.
void* latents_after(const BlockStack& in, const Extents& n, int64_t k, void* otherwise, void* y) {
  if (k == n.depth - 1) return y;
  return in.between ? offset(in.between, k * latent_elements(in, n), n.dtype) : otherwise;
}

// The memory of all blocks; each block passes its result to the next, and the last block writes y.
struct StackMemory {
  std::vector<BlockMemory> blocks;
  size_t bytes;

  // Block k, which starts from the result of the block before.
  LatentBlock block(const BlockStack& in, const Extents& n, int64_t k, const void* out) const {
    LatentBlock block = in.blocks[k];
    block.x = k ? Matrix{blocks[k - 1].latents[3], n.width, 1} : in.x;
    block.attended = offset(out, k * n.block(), n.sums);
    return block;
  }
};

// The memory that the forward pass keeps for the backward pass.
struct Kept : StackMemory {
  Kept(const BlockStack& in, const Extents& n, void* y, void* memory) {
    Arena arena(memory);
    for (int64_t k = 0; k < n.depth; ++k) {
      void* const apart = arena.take<char>(latent_elements(in, n) * element_bytes(n.dtype));
      blocks.push_back(kept_memory(in.blocks[k], latents_after(in, n, k, apart, y), arena));
    }
    bytes = arena.used();
  }
};

// Memory that layers overwrite. Of each block, only the last block latents are kept. `first` is the memory of the first
// self-attention, one for each thread that computes whole blocks.
struct Passing : StackMemory {
  std::vector<AttentionKept> first;

  Passing(const BlockStack& in, const Extents& n, int threads, void* y, void* memory) {
    Arena arena(memory);
    const LatentBlock& any = in.blocks[0];
    const int64_t rows = n.batch * n.latents, latents = n.batch * any.latents;
    for (int64_t i = 0; i < std::min<int64_t>(threads, n.depth); ++i)
      first.push_back(attention_memory(any, rows, rows, arena));
    const AttentionKept across = attention_memory(any, latents, rows, arena);
    const AttentionKept among = attention_memory(any, latents, latents, arena);
    for (int64_t k = 0; k < n.depth; ++k) {
      void* const block = arena.take<char>(rows * n.width * element_bytes(n.dtype));
      void* const x = latents_after(in, n, k, y, y);
      blocks.push_back({{block, block, block, block}, {x, x, x, x}, {first[0], across, among}});
    }
    bytes = arena.used();
  }
};

double multiplications(const BlockStack& in, const Extents& n) {
  const double m = double(n.batch) * n.latents, l = double(n.batch) * in.blocks[0].latents;
  const double forward = 6.0 * in.blocks[0].inner, queries = 2.0 * n.width;
  const double of_block = m * (forward + 7 * n.width + 2 * n.latents);
  const double of_latents = l * (forward + 3 * queries + 2 * (n.latents + in.blocks[0].latents));
  return double(n.depth) * n.width * (of_block + of_latents);
}

// Computes the layers after the first cross-attentions. A thread has whole sets if they can be divided evenly, else
// some rows. The first halves of the blocks do not depend on each other: there a thread may have whole blocks instead
// of rows.
void after_reading(const BlockStack& in, const Extents& n, const StackMemory& memory,
                   const std::vector<AttentionKept>& first, int threads, const void* out) {
  Crew::run(threads, [&](const Crew::Member& member) {
    const bool has_blocks = !member.has_sets(n.batch) && n.depth % member.threads == 0;
    for (int64_t k = 0; k < n.depth; ++k) {
      if (has_blocks && k % member.threads != member.number) continue;
      BlockMemory mine = memory.blocks[k];
      if (has_blocks && !first.empty()) mine.attention[0] = first[member.number];
      compress(memory.block(in, n, k, out), mine, has_blocks ? member.alone() : member);
    }
    member.wait(n.batch);
    for (int64_t k = 0; k < n.depth; ++k) retrieve(memory.block(in, n, k, out), memory.blocks[k], member);
  });
}

// ---- the backward pass

struct BackwardMemory : Folded {
  void *dattended, *dquery, *dqueries, *dweight, *dbias;
  void *dblock, *dlatents;  // of one block, and of all blocks, summed over the batch

  BackwardMemory(Sums& take, const Extents& n)
      : Folded(take, n),
        dattended(take.take(n.depth * n.block())),
        dquery(take.take(n.depth * n.block())),
        dqueries(take.take(n.set())),
        dweight(take.take(n.depth * 2 * n.width * n.width)),
        dbias(take.take(n.depth * 2 * n.width)),
        dblock(take.take(n.block())),
        dlatents(take.take(n.depth * n.set())) {}
};

// Fills `to` (rows, C) with the sum of parts of that shape; all are contiguous and in the dtype of the inputs.
void sum_of(const LinearKernels& kernel, const Extents& n, const std::vector<const void*>& parts, int64_t rows,
            void* to) {
  struct Tiles {
    RowTile sum, part;
    Tiles(Taker& take, int width) : sum(take.tile(width)), part(take.tile(width)) {}
  };
  const int width = int(n.width);
  Workspace workspace;
  workspace.reserve(bytes_of<Tiles>(kernel, width));
  const auto tiles = placed<Tiles>(workspace.at(0), kernel, width);
  for (int64_t row = 0; row < rows; row += kRowTile) {
    const int count = int(std::min<int64_t>(kRowTile, rows - row));
    for (size_t i = 0; i < parts.size(); ++i) {
      const Matrix from{offset(parts[i], row * width, n.dtype), width, 1};
      kernel.load(n.dtype, from, count, width, nullptr, 0, i ? tiles.part : tiles.sum);
      if (i) kernel.add_tile(tiles.part, count, width, tiles.sum);
    }
    kernel.store(tiles.sum, count, width, n.dtype, offset(to, row * width, n.dtype), width);
  }
}

// Fills `to` (M, C) with the sum over the batch of parts (B, M, C).
void sum_over_batch(const LinearKernels& kernel, const Extents& n, const void* parts, void* to) {
  std::vector<const void*> of_batch;
  for (int64_t b = 0; b < n.batch; ++b) of_batch.push_back(offset(parts, b * n.set(), n.dtype));
  sum_of(kernel, n, of_batch, n.latents, to);
}

class Backward {
 public:
  Backward(const BlockStack& in, const BlockStackGradients& to) : in_(in), n_(in), to_(to) {
    Sums count(n_.sums, nullptr);
    BackwardMemory(count, n_);
    workspace_.reserve(count.used());
  }

  void run(const Matrix& dy, const void* dbetween, const void* out, const double* lse, void* kept) const {
    Sums take(n_.sums, workspace_.at(0));
    const BackwardMemory memory(take, n_);
    after_reading(memory, dy, dbetween, out, kept);
    if (in_.reads) reading(memory, out, lse);
    for (int64_t k = 0; k < n_.depth && has_latents_apart(); ++k) before_reading(memory, k);
  }

 private:
  // Whether the block latents need more than the gradient of the residual, because queries are made from them or
  // because they are normed.
  bool has_latents_apart() const { return in_.reads || in_.blocks[0].residual == Residual::kNormed; }

  void reading(const BackwardMemory& memory, const void* out, const double* lse) const {
    prepare(kernel_, in_, n_, memory);
    double no_dlse = 0;
    projected_attention_backward(pass_over(in_, n_, memory), heads_of(n_, memory.dattended, n_.set()), {&no_dlse, {}},
                                 out, lse, {memory.dquery, to_.inputs, memory.dweight, memory.dbias});
    for (int64_t k = 0; k < n_.depth; ++k) unfold(memory, k);
  }

  // Goes from the last block to the first. The gradient of the latents between blocks is stored in the memory of the
  // gradient of x.
  void after_reading(const BackwardMemory& memory, const Matrix& dy, const void* dbetween, const void* out,
                     void* kept_memory) const {
    const Kept kept(in_, n_, nullptr, kept_memory);
    const int64_t elements = latent_elements(in_, n_);
    for (int64_t k = n_.depth - 1; k >= 0; --k) {
      if (dbetween && k < n_.depth - 1)
        sum_of(kernel_, n_, {to_.x, offset(dbetween, k * elements, n_.dtype)}, elements / n_.width, to_.x);
      LatentBlockGradients gradients = to_.blocks[k];
      gradients.x = to_.x, gradients.block = memory.dblock;
      gradients.attended = offset(in_.reads ? memory.dattended : to_.attended, k * n_.block(), n_.sums);
      latent_block_backward(kept.block(in_, n_, k, out), k == n_.depth - 1 ? dy : Matrix{to_.x, n_.width, 1},
                            kept.blocks[k], gradients);
      void* const dlatents = has_latents_apart() ? summed(memory, k) : to_.blocks[k].block;
      if (dlatents) sum_over_batch(kernel_, n_, memory.dblock, dlatents);
    }
  }

  // Computes the gradients of the weights of keys and values, and of the norm before them.
  void unfold(const BackwardMemory& memory, int64_t k) const {
    Workspace workspace;
    const int width = int(n_.width);
    workspace.reserve(bytes_of<ContextNorm>(kernel_, width));
    const auto norm = placed<ContextNorm>(workspace.at(0), kernel_, width);
    const BlockReadingGradients& to = to_.readings[k];
    norm.load(kernel_, n_, in_.readings[k].context_norm);
    for_each_projection(n_, in_.readings[k], to, [&](const Matrix& weight, void* dweight, int64_t first) {
      const int64_t row = k * 2 * n_.width + first;
      kernel_.unfold(n_.dtype, weight, width, width, norm.scale, norm.shift,
                     offset(memory.dweight, row * n_.width, n_.sums), offset(memory.dbias, row, n_.sums), dweight,
                     norm.dscale, norm.dshift);
    });
    const auto write = [&](void* sums, void* out) {
      if (out) kernel_.store({sums, 0}, 1, width, n_.dtype, out, 0);
    };
    write(norm.dscale, to.context_norm.weight), write(norm.dshift, to.context_norm.bias);
  }

  // Computes the gradients of the block latents and of their norm and, if the blocks read inputs, of the layer that
  // makes queries.
  void before_reading(const BackwardMemory& memory, int64_t k) const {
    std::vector<Heads> dqueries;
    Source source = queries_of(in_, n_, k, nullptr, to_.readings[k].query);
    if (in_.reads) {
      kernel_.sum_parts(offset(memory.dquery, k * n_.block(), n_.sums), n_.set() * element_bytes(n_.sums),
                        int(n_.batch), n_.set(), n_.sums, memory.dqueries);
      dqueries.push_back({memory.dqueries, int(n_.heads), n_.head_width(), n_.latents});
    } else {
      source.branches.clear();
    }
    ProjectionBackward(kernel_, source, dqueries, in_.blocks[k].residual, {summed(memory, k), n_.width, 1},
                       to_.blocks[k].block, to_.blocks[k].norm)
        .run(in_.blocks[0].threads);
  }

  void* summed(const BackwardMemory& memory, int64_t k) const {
    return offset(memory.dlatents, k * n_.set(), n_.dtype);
  }

  const BlockStack& in_;
  const Extents n_;
  const BlockStackGradients& to_;
  const LinearKernels& kernel_ = linear_kernels(n_.dtype);
  Workspace workspace_;
};

}  // namespace

size_t block_stack_bytes(const BlockStack& in) { return Kept(in, Extents(in), nullptr, nullptr).bytes; }

void block_stack_read(const BlockStack& in, const Operand& state_out, const Operand& state_lse, void* out,
                      double* lse) {
  const Extents n(in);
  Workspace workspace;
  Sums count(n.sums, nullptr);
  Folded(count, n);
  workspace.reserve(count.used());
  Sums take(n.sums, workspace.at(0));
  const Folded folded(take, n);
  prepare(linear_kernels(n.dtype), in, n, folded);
  projected_attention_forward(pass_over(in, n, folded), state_out, state_lse, out, lse);
}

void block_stack(const BlockStack& in, const Operand& state_out, const Operand& state_lse, void* out, double* lse,
                 void* y, void* memory) {
  const Extents n(in);
  if (in.reads) block_stack_read(in, state_out, state_lse, out, lse);
  const int threads = useful_threads(multiplications(in, n), in.blocks[0].threads, kLittle);
  if (memory) {
    const Kept kept(in, n, y, memory);
    prefer_huge_pages(memory, int64_t(kept.bytes));
    return after_reading(in, n, kept, {}, threads, out);
  }
  Workspace workspace;
  workspace.reserve(Passing(in, n, threads, y, nullptr).bytes);
  const Passing passing(in, n, threads, y, workspace.at(0));
  after_reading(in, n, passing, passing.first, threads, out);
}

void block_stack_backward(const BlockStack& in, const Matrix& dy, const void* dbetween, const void* out,
                          const double* lse, void* kept, const BlockStackGradients& gradients) {
  Backward(in, gradients).run(dy, dbetween, out, lse, kept);
}

}  // namespace cmab::cpu
