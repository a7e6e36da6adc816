// The backward kernel of bfloat16 attention, on an Engine of matrix products (DotEngine, TileEngine).
//
// A tile of 64 keys is processed against up to 64 queries at a time, with queries in the lanes. P = exp(S - lse)
// follows from S = K Q', and dS = P * (dP - delta) from dP = V dO', all in float32. P and dS are then rounded to
// bfloat16: in pairs along the queries for dV = P dO and dK = dS Q, and dS also in pairs of keys for dQ' += K' dS.
// Accumulators stay float32.
#pragma once

#include "attention/bf16_operands.h"

namespace cmab::cpu {
namespace {

template <class Engine>
class Bf16Backward {
 public:
  static constexpr BackwardKernel kernel() {
    return {128, packed_bytes, state_bytes, scratch_bytes, pack, clear, attend, read, true};
  }

 private:
  static constexpr int kLanes = 64;
  // Keys are padded to this many within a tile.
  static constexpr int kKeyStep = Engine::kRowStep > 2 * Engine::kPairStep ? Engine::kRowStep : 2 * Engine::kPairStep;

  static int64_t lanes_of(int rows) { return round_up(rows, 32); }  // to whole vectors of pairs of queries
  static int64_t pairs_of(int width) { return round_up((width + 1) / 2, Engine::kPairStep); }
  static int64_t columns_of(int width) { return round_up(width, 16); }
  static int64_t key_rows(const Shape& shape) { return round_up(shape.key_width, Engine::kRowStep); }

  // A packed block of queries: query and dout as lane operands, with queries as lanes (for S and dP) and as the
  // contraction (for dK and dV). log2 of P is score * factor - high - low.
  struct Packed {
    Pair *query, *dout, *query_rows, *dout_rows, *tile;
    float *high, *low, *delta;
    size_t bytes;

    Packed(const Shape& shape, int rows, const void* workspace) {
      Carver carver(workspace);
      const int64_t lanes = lanes_of(rows), pairs_d = pairs_of(shape.key_width), pairs_e = pairs_of(shape.value_width);
      query = carver.take<Pair>(pairs_d * lanes);
      dout = carver.take<Pair>(pairs_e * lanes);
      query_rows = carver.take<Pair>(lanes / 2 * columns_of(shape.key_width));
      dout_rows = carver.take<Pair>(lanes / 2 * columns_of(shape.value_width));
      tile = carver.take<Pair>(lanes * (pairs_d > pairs_e ? pairs_d : pairs_e) + kSlack);
      high = carver.take<float>(lanes);
      low = carver.take<float>(lanes);
      delta = carver.take<float>(lanes);
      bytes = carver.bytes();
    }
  };

  struct Scratch {
    Pair *key, *value, *key_transposed, *weights, *dscores, *dscore_pairs;
    float *scores, *dweights, *dkey, *dvalue, *dbias;
    size_t bytes;

    Scratch(const Shape& shape, const void* workspace) {
      Carver carver(workspace);
      key = carver.take<Pair>(kTileKeys * pairs_of(shape.key_width) + kSlack);
      value = carver.take<Pair>(kTileKeys * pairs_of(shape.value_width) + kSlack);
      key_transposed = carver.take<Pair>(key_rows(shape) * kTileKeys / 2);
      weights = carver.take<Pair>(kTileKeys * kLanes / 2);
      dscores = carver.take<Pair>(kTileKeys * kLanes / 2);
      dscore_pairs = carver.take<Pair>(kTileKeys / 2 * kLanes);
      scores = carver.take<float>(kTileKeys * kLanes);
      dweights = carver.take<float>(kTileKeys * kLanes);
      dkey = carver.take<float>(kTileKeys * columns_of(shape.key_width));
      dvalue = carver.take<float>(kTileKeys * columns_of(shape.value_width));
      dbias = carver.take<float>(kTileKeys);
      bytes = carver.bytes();
    }
  };

  static size_t packed_bytes(const Shape& shape, int rows) { return Packed(shape, rows, nullptr).bytes; }
  static size_t state_bytes(const Shape& shape, int rows) { return sizeof(float) * key_rows(shape) * lanes_of(rows); }
  static size_t scratch_bytes(const Shape& shape) { return Scratch(shape, nullptr).bytes; }

  static void pack(const Shape& shape, int rows, const QueryRows& from, void* workspace) {
    const Packed packed(shape, rows, workspace);
    const int64_t lanes = lanes_of(rows), pairs = pairs_of(shape.key_width);
    for (int64_t first = 0; first < lanes; first += 32) {
      const int64_t count = smaller(rows - first, 32);
      fetch(from.query, first, shape.key_width, (uint64_t{1} << count) - 1, 32, pairs, packed.tile + first * pairs);
    }
    apply_sign(shape, lanes * pairs, packed.tile);
    arrange(packed.tile, lanes, pairs, columns_of(shape.key_width), packed.query, packed.query_rows);
    round_dout(shape, rows, from, packed.tile);
    arrange(packed.tile, lanes, pairs_of(shape.value_width), columns_of(shape.value_width), packed.dout,
            packed.dout_rows);
    for (int64_t i = 0; i < lanes; ++i) {
      const bool empty = i >= rows || from.lse[i] == -__builtin_inf();
      const double logarithm = empty ? __builtin_inf() : from.lse[i] * kLog2e64;
      packed.high[i] = static_cast<float>(logarithm);
      packed.low[i] = empty ? 0.0f : static_cast<float>(logarithm - packed.high[i]);
      packed.delta[i] = empty ? 0.0f : static_cast<float>(from.delta[i]);
    }
  }

  // Arranges tile[lanes][pairs] as both lane operands: `across` with rows as lanes, `along` with rows as the
  // contraction.
  static void arrange(const Pair* tile, int64_t lanes, int64_t pairs, int64_t columns, Pair* across, Pair* along) {
    rows_to_lanes(tile, lanes, pairs, across);
    for (int64_t i = 0; i < lanes / 2; ++i) {
      for (int64_t c = 0; c < columns; c += 16) {
        _mm512_storeu_si512(along + i * columns + c, pair_columns(tile, pairs, i, c));
      }
    }
  }

  // Rounds dout (float32) to bfloat16. Rows without a key become zeros, whatever their dout contains.
  static void round_dout(const Shape& shape, int rows, const QueryRows& from, Pair* tile) {
    const int64_t lanes = lanes_of(rows), pairs = pairs_of(shape.value_width);
    for (int64_t r = 0; r < lanes; ++r, tile += pairs) {
      const bool kept = r < rows && from.lse[r] != -__builtin_inf();
      const float* row = static_cast<const float*>(from.dout) + r * from.dout_row_stride;
      for (int64_t p = 0; p < pairs; p += 16) {
        alignas(64) float entries[32];
        for (int64_t i = 0; i < 32; ++i) {
          const int64_t c = 2 * p + i;
          entries[i] = kept && c < shape.value_width ? row[c * from.dout_col_stride] : 0.0f;
        }
        _mm512_storeu_si512(tile + p, round_to_bf16(_mm512_load_ps(entries), _mm512_load_ps(entries + 16)));
      }
    }
  }

  static void clear(const Shape& shape, int rows, void* state) {
    float* dquery = static_cast<float*>(state);
    for (int64_t i = 0; i < key_rows(shape) * lanes_of(rows); ++i) dquery[i] = 0.0f;
  }

  static void attend(const Shape& shape, const Needs& needs, const QueryBlock* blocks, int count, const Keys& keys,
                     const KeyGradient& gradient, void* scratch_workspace) {
    const typename Engine::Session session;
    const Scratch scratch(shape, scratch_workspace);
    for (int64_t first = 0; first < keys.count; first += kTileKeys) {
      Tile tile = {first, smaller(keys.count - first, kTileKeys), present_keys(keys, first)};
      load_tile(shape, needs, keys, tile, scratch);
      if (needs.bias) __builtin_memset(scratch.dbias, 0, sizeof(float) * kTileKeys);
      bool begun = false;
      for (int b = 0; b < count && tile.present != 0; ++b) {
        const Packed packed(shape, blocks[b].rows, blocks[b].packed);
        const int64_t lanes = lanes_of(blocks[b].rows);
        for (int64_t lane = 0; lane < lanes; lane += kLanes, begun = true) {
          const Lanes some = {lane, smaller(lanes - lane, kLanes) / 16, lanes};
          weigh(shape, needs, packed, some, keys, tile, scratch);
          if (begun) {
            add_products<true>(shape, needs, packed, some, tile, gradient, scratch, blocks[b].state);
          } else {
            add_products<false>(shape, needs, packed, some, tile, gradient, scratch, blocks[b].state);
          }
        }
      }
      if (!begun) tile.present = 0;  // nothing was accumulated: write zeros
      const float factor = score_factor(shape);
      if (gradient.dkey) write(scratch.dkey, shape.key_width, factor, tile, gradient.type, gradient.dkey);
      if (gradient.dvalue) write(scratch.dvalue, shape.value_width, 1.0f, tile, gradient.type, gradient.dvalue);
      if (gradient.dbias)
        for (int64_t r = 0; r < tile.count; ++r)
          static_cast<float*>(gradient.dbias)[first + r] = (tile.present >> r & 1) != 0 ? scratch.dbias[r] : 0.0f;
    }
  }

  // Keys `first` to first + count - 1; bit i of `present` is set if key first + i takes part.
  struct Tile {
    int64_t first, count;
    uint64_t present;
    int64_t padded() const { return round_up(count, kKeyStep); }
  };

  // 16 * vectors lanes, from `first` on, of a lane operand with this leading dimension.
  struct Lanes {
    int64_t first, vectors, leading;
  };

  static void load_tile(const Shape& shape, const Needs& needs, const Keys& keys, const Tile& tile,
                        const Scratch& scratch) {
    const int64_t pairs = pairs_of(shape.key_width);
    fetch(keys.key, tile.first, shape.key_width, tile.present, kTileKeys, pairs, scratch.key);
    fetch(keys.value, tile.first, shape.value_width, tile.present, kTileKeys, pairs_of(shape.value_width),
          scratch.value);
    if (needs.query) columns_to_rows(scratch.key, kTileKeys, pairs, key_rows(shape), scratch.key_transposed);
  }

  // Computes P and dS of a tile of keys and up to 64 queries, as operands of the products that follow.
  static void weigh(const Shape& shape, const Needs& needs, const Packed& packed, const Lanes& lanes, const Keys& keys,
                    const Tile& tile, const Scratch& scratch) {
    const int64_t pairs_d = pairs_of(shape.key_width), pairs_e = pairs_of(shape.value_width);
    Engine::template multiply<false>(scratch.scores, kLanes, scratch.key, pairs_d, packed.query + lanes.first,
                                     lanes.leading, tile.padded(), pairs_d, lanes.vectors);
    Engine::template multiply<false>(scratch.dweights, kLanes, scratch.value, pairs_e, packed.dout + lanes.first,
                                     lanes.leading, tile.padded(), pairs_e, lanes.vectors);
    add_bias(shape, keys, tile.first, tile.count, 16 * lanes.vectors, kLanes, scratch.scores);
    for (uint64_t absent = ~tile.present; absent != 0; absent &= absent - 1) {
      float* row = scratch.scores + __builtin_ctzll(absent) * kLanes;
      for (int i = 0; i < kLanes; i += 16) _mm512_storeu_ps(row + i, _mm512_set1_ps(-__builtin_inff()));
    }
    const __m512 factor = _mm512_set1_ps(logit_unit(shape) * kLog2e);
    for (int64_t lane = 0; lane < 16 * lanes.vectors; lane += 32) {
      const Queries low(packed, lanes.first + lane), high(packed, lanes.first + lane + 16);
      for (int64_t k = 0; k < tile.padded(); k += 2) {
        __m512i dscores[2];
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t at = (k + i) * kLanes + lane;
          const __m512 p_low = low.weight(scratch.scores + at, factor);
          const __m512 p_high = high.weight(scratch.scores + at + 16, factor);
          const __m512 ds_low = low.dscore(p_low, scratch.dweights + at);
          const __m512 ds_high = high.dscore(p_high, scratch.dweights + at + 16);
          dscores[i] = round_to_bf16(ds_low, ds_high);
          if (needs.bias) scratch.dbias[k + i] += low.sum(ds_low) + high.sum(ds_high);
          _mm512_storeu_si512(scratch.weights + at / 2, round_to_bf16(p_low, p_high));
          _mm512_storeu_si512(scratch.dscores + at / 2, dscores[i]);
        }
        Pair* pairs = scratch.dscore_pairs + k / 2 * kLanes + lane;
        _mm512_storeu_si512(pairs, pair_rows<0>(dscores[0], dscores[1]));
        _mm512_storeu_si512(pairs + 16, pair_rows<1>(dscores[0], dscores[1]));
      }
    }
  }

  // P and dS of 16 queries, one per lane. P is clamped to at most 1, because the rounding of logits as large as 1e20
  // could make it larger. P is 0 in lanes without a key or a query: the score of a query of zeros may be 0 * inf, a
  // NaN.
  struct Queries {
    __m512 high, low, delta;
    __mmask16 seeing;

    Queries(const Packed& packed, int64_t lane)
        : high(_mm512_loadu_ps(packed.high + lane)),
          low(_mm512_loadu_ps(packed.low + lane)),
          delta(_mm512_loadu_ps(packed.delta + lane)),
          seeing(_mm512_cmp_ps_mask(high, _mm512_set1_ps(__builtin_inff()), _CMP_NEQ_UQ)) {}

    __m512 weight(const float* score, __m512 factor) const {
      const __m512 logarithm = _mm512_sub_ps(_mm512_fmsub_ps(_mm512_loadu_ps(score), factor, high), low);
      const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
      return exp2_lanes(_mm512_mask_min_ps(nothing, seeing, _mm512_setzero_ps(), logarithm));  // keeps a NaN
    }
    __m512 dscore(__m512 weight, const float* dweight) const {
      return _mm512_mul_ps(weight, _mm512_sub_ps(_mm512_loadu_ps(dweight), delta));
    }
    float sum(__m512 dscores) const { return _mm512_mask_reduce_add_ps(seeing, dscores); }
  };

  template <bool kAccumulate>
  static void add_products(const Shape& shape, const Needs& needs, const Packed& packed, const Lanes& lanes,
                           const Tile& tile, const KeyGradient& gradient, const Scratch& scratch, void* state) {
    const int64_t query_pairs = 8 * lanes.vectors;
    if (gradient.dvalue) {
      const int64_t columns = columns_of(shape.value_width);
      Engine::template multiply<kAccumulate>(scratch.dvalue, columns, scratch.weights, kLanes / 2,
                                             packed.dout_rows + lanes.first / 2 * columns, columns, tile.padded(),
                                             query_pairs, columns / 16);
    }
    if (gradient.dkey) {
      const int64_t columns = columns_of(shape.key_width);
      Engine::template multiply<kAccumulate>(scratch.dkey, columns, scratch.dscores, kLanes / 2,
                                             packed.query_rows + lanes.first / 2 * columns, columns, tile.padded(),
                                             query_pairs, columns / 16);
    }
    if (needs.query) {
      Engine::template multiply<true>(static_cast<float*>(state) + lanes.first, lanes.leading, scratch.key_transposed,
                                      kTileKeys / 2, scratch.dscore_pairs, kLanes, key_rows(shape), tile.padded() / 2,
                                      lanes.vectors);
    }
  }

  // Writes rows of a gradient, times `factor`; zeros for absent keys.
  static void write(const float* rows, int width, float factor, const Tile& tile, DType type, void* out) {
    for (int64_t r = 0; r < tile.count; ++r) {
      const float* row = rows + r * columns_of(width);
      const bool kept = (tile.present >> r & 1) != 0;
      for (int64_t c = 0; c < width; c += 16) {
        const __mmask16 mask = first16(width - c);
        const __m512 entries = _mm512_maskz_loadu_ps(kept ? mask : 0, row + c);
        const __m512 scaled = _mm512_mul_ps(entries, _mm512_set1_ps(factor));
        const int64_t at = (tile.first + r) * width + c;
        if (type == DType::kFloat32) {
          _mm512_mask_storeu_ps(static_cast<float*>(out) + at, mask, scaled);
        } else {
          _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + at, mask, (__m256i)_mm512_cvtneps_pbh(scaled));
        }
      }
    }
  }

  static void read(const Shape& shape, int rows, const void* state, double* dquery) {
    const float* sums = static_cast<const float*>(state);
    const int64_t lanes = lanes_of(rows);
    for (int row = 0; row < rows; ++row) {
      for (int d = 0; d < shape.key_width; ++d) dquery[row * shape.key_width + d] = sums[d * lanes + row];
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
