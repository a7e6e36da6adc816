// The forward kernel of bfloat16 attention, on an Engine of matrix products (DotEngine, TileEngine).
//
// Queries are in the lanes. A tile of 64 keys is processed against one or two vectors of queries, so that scores stay
// in the L1 cache: S = K Q', maximum and exponentials down the columns, then O' += V' P. Scores, sums and O stay
// float32; P is rounded to bfloat16 for the product.
#pragma once

#include "attention/bf16_operands.h"

namespace cmab::cpu {
namespace {

template <class Engine>
class Bf16Forward {
 public:
  static constexpr ForwardKernel kernel() {
    return {128, packed_bytes, state_bytes, scratch_bytes, pack, clear, attend, read};
  }

 private:
  static constexpr int kLanes = 16 * Engine::kVectors;  // queries processed at a time
  // Keys are padded to this many within a tile.
  static constexpr int kKeyStep = Engine::kRowStep > 2 * Engine::kPairStep ? Engine::kRowStep : 2 * Engine::kPairStep;

  static int64_t lanes_of(int rows) { return round_up(rows, 16); }
  static int64_t key_pairs(const Shape& shape) { return round_up((shape.key_width + 1) / 2, Engine::kPairStep); }
  static int64_t value_pairs(const Shape& shape) { return (shape.value_width + 1) / 2; }
  static int64_t value_rows(const Shape& shape) { return round_up(shape.value_width, Engine::kRowStep); }

  // A partial state: for each query the largest score, the sum of the weights, the sum of the weights as they were
  // rounded for the product, and O' as [value_rows][lanes].
  struct State {
    float *top, *sum, *rounded_sum, *acc;
    size_t bytes;

    State(const Shape& shape, int rows, const void* workspace) {
      Carver carver(workspace);
      const int64_t lanes = lanes_of(rows);
      top = carver.take<float>(lanes);
      sum = carver.take<float>(lanes);
      rounded_sum = carver.take<float>(lanes);
      acc = carver.take<float>(value_rows(shape) * lanes);
      bytes = carver.bytes();
    }
  };

  struct Scratch {
    Pair *key, *value, *value_transposed, *weights;
    float* scores;
    size_t bytes;

    Scratch(const Shape& shape, const void* workspace) {
      Carver carver(workspace);
      key = carver.take<Pair>(kTileKeys * key_pairs(shape) + kSlack);
      value = carver.take<Pair>(kTileKeys * value_pairs(shape) + kSlack);
      value_transposed = carver.take<Pair>(value_rows(shape) * (kTileKeys / 2));
      weights = carver.take<Pair>(kTileKeys / 2 * kLanes);
      scores = carver.take<float>(kTileKeys * kLanes);
      bytes = carver.bytes();
    }
  };

  static size_t packed_bytes(const Shape& shape, int rows) {
    return sizeof(Pair) *
           (2 * key_pairs(shape) * lanes_of(rows) + kSlack);  // the lane operand, and the rows from which it is made
  }
  static size_t state_bytes(const Shape& shape, int rows) { return State(shape, rows, nullptr).bytes; }
  static size_t scratch_bytes(const Shape& shape) { return Scratch(shape, nullptr).bytes; }

  static void pack(const Shape& shape, int rows, const Matrix& query, void* packed) {
    const int64_t pairs = key_pairs(shape), lanes = lanes_of(rows);
    Pair* by_pairs = static_cast<Pair*>(packed);
    Pair* by_rows = by_pairs + pairs * lanes;
    for (int64_t first = 0; first < lanes; first += 16) {
      const int64_t count = smaller(rows - first, 16);
      fetch(query, first, shape.key_width, (uint64_t{1} << count) - 1, 16, pairs, by_rows + first * pairs);
    }
    apply_sign(shape, lanes * pairs, by_rows);
    rows_to_lanes(by_rows, lanes, pairs, by_pairs);
  }

  static void clear(const Shape& shape, int rows, void* workspace) {
    const State state(shape, rows, workspace);
    const int64_t lanes = lanes_of(rows);
    for (int64_t i = 0; i < lanes; ++i) {
      state.top[i] = -__builtin_inff();
      state.sum[i] = state.rounded_sum[i] = 0.0f;
    }
    for (int64_t i = 0; i < value_rows(shape) * lanes; ++i) state.acc[i] = 0.0f;
  }

  static void attend(const Shape& shape, const QueryBlock* blocks, int count, const Keys& keys,
                     void* scratch_workspace) {
    const typename Engine::Session session;
    const Scratch scratch(shape, scratch_workspace);
    for (int64_t first = 0; first < keys.count; first += kTileKeys) {
      const uint64_t present = present_keys(keys, first);
      if (present == 0) continue;
      const int64_t tile = round_up(smaller(keys.count - first, kTileKeys), kKeyStep);
      load_tile(shape, keys, first, present, scratch);
      for (const QueryBlock* block = blocks; block < blocks + count; ++block)
        attend_tile(shape, *block, keys, first, tile, present, scratch);
    }
  }

  // One block of queries against the tile of keys in `scratch`.
  static void attend_tile(const Shape& shape, const QueryBlock& block, const Keys& keys, int64_t first, int64_t tile,
                          uint64_t present, const Scratch& scratch) {
    const State state(shape, block.rows, block.state);
    const Pair* query = static_cast<const Pair*>(block.packed);
    const int64_t lanes = lanes_of(block.rows), pairs = key_pairs(shape);
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const int64_t vectors = smaller(lanes - lane, kLanes) / 16;
      Engine::template multiply<false>(scratch.scores, kLanes, scratch.key, pairs, query + lane, lanes, tile, pairs,
                                       vectors);
      add_bias(shape, keys, first, tile, 16 * vectors, kLanes, scratch.scores);
      for (int64_t v = 0; v < vectors; ++v) {
        weigh(shape, scratch, 16 * v, tile, present, state, lane + 16 * v, lanes);
      }
      Engine::template multiply<true>(state.acc + lane, lanes, scratch.value_transposed, kTileKeys / 2, scratch.weights,
                                      kLanes, value_rows(shape), tile / 2, vectors);
    }
  }

  static void load_tile(const Shape& shape, const Keys& keys, int64_t first, uint64_t present, const Scratch& scratch) {
    const int64_t pairs = value_pairs(shape);
    fetch(keys.key, first, shape.key_width, present, kTileKeys, key_pairs(shape), scratch.key);
    fetch(keys.value, first, shape.value_width, present, kTileKeys, pairs, scratch.value);
    columns_to_rows(scratch.value, kTileKeys, pairs, value_rows(shape), scratch.value_transposed);
  }

  // Turns scores of 16 queries into weights relative to each query's largest score so far. Scores are subtracted before
  // the factor is applied: the difference is exactly 0 for the largest, and never positive.
  static void weigh(const Shape& shape, const Scratch& scratch, int64_t column, int64_t tile, uint64_t present,
                    const State& state, int64_t lane, int64_t lanes) {
    float* scores = scratch.scores + column;
    for (uint64_t absent = ~present; absent != 0; absent &= absent - 1) {
      _mm512_storeu_ps(scores + __builtin_ctzll(absent) * kLanes, _mm512_set1_ps(-__builtin_inff()));
    }
    const __m512 factor = _mm512_set1_ps(logit_unit(shape) * kLog2e);
    const __m512 reference = raise_top(largest(scores, tile), factor, state, lane, value_rows(shape), lanes);
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    __m512 sum = _mm512_setzero_ps(), rounded_sum = _mm512_setzero_ps();
    Pair* weights = scratch.weights + column;
    for (int64_t k = 0; k < tile; k += 2, scores += 2 * kLanes, weights += kLanes) {
      const __m512 even = exp2_lanes(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores), reference), factor));
      const __m512 odd = exp2_lanes(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + kLanes), reference), factor));
      const __m512i pair = pair_weights(even, odd);
      sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
      rounded_sum = _mm512_dpbf16_ps(rounded_sum, (__m512bh)pair, ones);
      _mm512_storeu_si512(weights, pair);
    }
    float *total = state.sum + lane, *rounded_total = state.rounded_sum + lane;
    _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), sum));
    _mm512_storeu_ps(rounded_total, _mm512_add_ps(_mm512_loadu_ps(rounded_total), rounded_sum));
  }

  // The largest score in each column of a tile of `rows` rows, a multiple of 4; NaN counts as -infinity.
  static __m512 largest(const float* scores, int64_t rows) {
    __m512 top[4];
    for (__m512& each : top) each = _mm512_set1_ps(-__builtin_inff());
    for (int64_t r = 0; r < rows; r += 4) {
      for (int i = 0; i < 4; ++i) top[i] = _mm512_max_ps(_mm512_loadu_ps(scores + (r + i) * kLanes), top[i]);
    }
    return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
  }

  // Raises each query's largest score to `top` and rescales its sums. Returns the score to subtract: 0 where every
  // score so far is -infinity, so that the weights there become 0 and not NaN.
  static __m512 raise_top(__m512 top, __m512 factor, const State& state, int64_t lane, int64_t rows, int64_t lanes) {
    const __m512 old = _mm512_loadu_ps(state.top + lane);
    top = _mm512_max_ps(top, old);
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
    const __m512 reference = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(top, nothing, _CMP_NEQ_UQ), top);
    const __mmask16 moved = _mm512_cmp_ps_mask(top, old, _CMP_NEQ_UQ);
    if (moved == 0) return reference;
    _mm512_storeu_ps(state.top + lane, top);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 shrink =
        _mm512_mask_mov_ps(one, moved, exp2_lanes(_mm512_mul_ps(_mm512_sub_ps(old, reference), factor)));
    scale_lanes(state.sum + lane, 1, lanes, shrink);
    scale_lanes(state.rounded_sum + lane, 1, lanes, shrink);
    scale_lanes(state.acc + lane, rows, lanes, shrink);
    return reference;
  }

  static void scale_lanes(float* first, int64_t rows, int64_t lanes, __m512 by) {
    for (int64_t r = 0; r < rows; ++r, first += lanes)
      _mm512_storeu_ps(first, _mm512_mul_ps(_mm512_loadu_ps(first), by));
  }

  // Rounds two rows of 16 weights to bfloat16 and interleaves them as 16 pairs of keys.
  static __m512i pair_weights(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), round_to_bf16(even, odd));
  }

  static void read(const Shape& shape, int rows, const void* workspace, double* reference, double* sum, double* acc) {
    const State state(shape, rows, workspace);
    const int64_t lanes = lanes_of(rows);
    const double factor = static_cast<double>(logit_unit(shape) * kLog2e);
    for (int row = 0; row < rows; ++row) {
      const bool empty = state.top[row] == -__builtin_inff();
      reference[row] = empty ? -__builtin_inf() : factor * state.top[row];
      sum[row] = state.sum[row];
      // acc was summed with rounded weights. It is rescaled so that acc / sum is their weighted mean, although sum has
      // the exact weights.
      const double correction = empty ? 0.0 : sum[row] / state.rounded_sum[row];
      for (int e = 0; e < shape.value_width; ++e)
        acc[row * shape.value_width + e] = correction * state.acc[e * lanes + row];
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
