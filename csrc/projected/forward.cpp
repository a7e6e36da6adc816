// The forward driver. It packs weights and queries. It loads, norms and projects the rows of each piece of the keys,
// one chunk at a time, lets all blocks and heads attend to the chunk, and merges the pieces.
#include <omp.h>

#include "attention/merge.h"
#include "projected/projection.h"

namespace cmab::cpu {
namespace {

// The number of pieces of the keys. Each piece keeps its own partial states until they are merged, so for many queries
// there are fewer pieces.
int64_t key_pieces(int64_t keys, int64_t queries) {
  return keys == 0 ? 0 : std::clamp<int64_t>(std::min(keys / 768, 2048 / queries), 1, 16);
}

class Forward {
 public:
  Forward(const ProjectedInputs& in, const Operand& state_out, const Operand& state_lse, void* out, double* lse)
      : in_(in),
        shape_(in.attention.shape),
        kernel_(forward_kernel(shape_.dtype)),
        projection_(in),
        merger_(kernel_, shape_, in.attention.heads, in.attention.queries, state_out, state_lse, out, lse, nullptr),
        threads_(useful_threads(multiplications(in), in.attention.threads)),
        chunk_bytes_(bytes_of<Chunk>(projection_.kernel(), in)),
        scratch_bytes_(chunk_bytes_ + align(std::max(kernel_.scratch_bytes(shape_), merger_.scratch_bytes()))) {}

  void run() {
    const int rows = int(std::min<int64_t>(kernel_.block, in_.attention.queries));
    Wave wave(in_, kernel_.block, kernel_.packed_bytes(shape_, rows), kernel_.state_bytes(shape_, rows));
    for (int64_t b = 0; b < in_.attention.batch;) {
      b = wave.fill(b, threads_ * scratch_bytes_,
                    [&](int64_t keys) { return key_pieces(keys, in_.attention.queries); });
      workspace_.reserve(wave.bytes);
      run_wave(wave);
    }
  }

 private:
  void run_wave(const Wave& wave) const {
#pragma omp parallel num_threads(threads_)
    {
      const FlushToZero flush;
      char* scratch = workspace_.at(omp_get_thread_num() * scratch_bytes_);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < wave.units.size(); ++i) pack(wave, wave.units[i]);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < wave.tasks.size(); ++i) attend(wave, wave.tasks[i], scratch);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < wave.units.size(); ++i) finish(wave, wave.units[i], scratch + chunk_bytes_);
    }
  }

  void pack(const Wave& wave, const Unit& unit) const {
    const Matrix query =
        rows_of(in_.attention, in_.attention.query, wave.batch_row(unit), unit.h, wave.first_row(unit.block));
    kernel_.pack(shape_, wave.rows_of_block(unit.block), query, workspace_.at(wave.packed(unit)));
    for (int64_t piece = 0; piece < wave.sets[unit.set].pieces; ++piece)
      kernel_.clear(shape_, wave.rows_of_block(unit.block), workspace_.at(wave.state(unit, piece)));
  }

  void attend(const Wave& wave, const Task& task, char* scratch) const {
    const Chunk chunk = placed<Chunk>(scratch, projection_.kernel(), in_);
    const KeySet& set = wave.sets[task.set].keys;
    std::vector<QueryBlock> blocks(wave.blocks());
    wave.for_each_chunk(task, [&](int64_t first, int count) {
      projection_.load(chunk, set, first, count);
      for (int64_t k = 0; k < in_.blocks; ++k) {
        projection_.project(chunk, k, count);
        for (int64_t h = 0; h < in_.attention.heads; ++h) {
          const Keys keys = projection_.keys(chunk, set, h, first, count);
          for (int64_t block = 0; block < wave.blocks(); ++block) {
            const Unit unit{task.set, k, h, block};
            blocks[block] = {wave.rows_of_block(block), workspace_.at(wave.packed(unit)),
                             workspace_.at(wave.state(unit, task.piece))};
          }
          kernel_.attend(shape_, blocks.data(), int(wave.blocks()), keys, scratch + chunk_bytes_);
        }
      }
    });
  }

  void finish(const Wave& wave, const Unit& unit, char* scratch) const {
    merger_.finish(
        wave.batch_row(unit), unit.h, wave.first_row(unit.block), wave.rows_of_block(unit.block),
        wave.sets[unit.set].pieces, [&](int64_t piece) { return workspace_.at(wave.state(unit, piece)); }, scratch);
  }

  const ProjectedInputs& in_;
  const Shape& shape_;
  const ForwardKernel& kernel_;
  const Projection projection_;
  const Merger merger_;
  const int threads_;
  const size_t chunk_bytes_, scratch_bytes_;
  Workspace workspace_;
};

}  // namespace

void projected_attention_forward(const ProjectedInputs& in, const Operand& state_out, const Operand& state_lse,
                                 void* out, double* lse) {
  if (in.blocks && in.attention.batch && in.attention.heads && in.attention.queries)
    Forward(in, state_out, state_lse, out, lse).run();
}

}  // namespace cmab::cpu
