// The forward kernel of prefixes: an online softmax that writes its state after every chunk, blocked over time. As in
// attention/forward_kernel.h, the scores of a tile of keys are products with the queries in the lanes, and become
// weights there. In the next step, the lanes hold columns of values, as in the states that are written: a few rows of
// sums stay in registers for all keys of the tile.
#pragma once

#include "prefix/rows.h"

namespace cmab::cpu {
namespace {

// A stretch is a group of keys of one tile, for one vector of queries. Sums are rescaled before it, and a state is
// written after it.
template <class T>
struct Stretch {
  int first, last;
  const T* factors;  // [lane]; null: the sums do not change
  const T* inverse;  // [lane]: 1 / the sum of weights; null: no state is written
  int64_t chunk;
};

// The states of a block of queries during the pass over the keys, relative to 2^reference, and scratch for one tile.
// The sums over the keys of a tile are separate until the tile ends, because sums of partial sums have smaller rounding
// errors over many keys.
template <class T>
struct Passing {
  int rows, width;       // of the block, and of a row of sums: whole vectors
  T* reference;          // [rows]
  T *sum, *tile_sum;     // [rows]: of weights, before this tile and over it
  T *sums, *tile_sums;   // [rows][width]: of weighted values
  T* weights;            // [key of the tile][rows]: scores, then weights
  T *factors, *inverse;  // [stretch][lane]
  Stretch<T>* stretches;
  T* bias;                // [key of the tile]
  double *fade, *offset;  // [run of the tile]: see Fading

  Passing(Arena& arena, int rows, int width) : rows(rows), width(width) {
    for (T** each : {&reference, &sum, &tile_sum}) *each = arena.take<T>(rows);
    for (T** each : {&sums, &tile_sums}) *each = arena.take<T>(rows * width);
    weights = arena.take<T>(kKeyTile * rows);
    for (T** each : {&factors, &inverse}) *each = arena.take<T>(2 * kKeyTile * kVectorLanes<T>);
    stretches = arena.take<Stretch<T>>(2 * kKeyTile);
    bias = arena.take<T>(kKeyTile);
    for (double** each : {&fade, &offset}) *each = arena.take<double>(kKeyTile);
  }
};

// The sums of a block have the unit 2^(reference + offset). A decay changes this unit, and not the
// sums. References change by whole numbers. The rest of the decay goes to the offset, which is the
// same for all rows. So small decays are not lost when a large reference is rounded, and the sum of
// all decays is a double. Scores do not depend on the offset, so the backward pass rounds them in
// the same way.
class Fading {
 public:
  explicit Fading(const Decay& decay) : decay_(decay) {}

  // Writes by how much references change before each run of a tile, and the offset of each.
  void begin_tile(const Run* runs, int count, double* fade, double* offset) {
    for (int i = 0; i < count; ++i) {
      const Run& run = runs[i];
      if (run.begins) offset_ += decay_.before(run.chunk) * kLog2E;
      fade[i] = run.begins ? __builtin_rint(offset_) : 0.0;
      offset_ -= fade[i];
      offset[i] = offset_;
    }
  }

 private:
  Decay decay_;
  double offset_ = 0;
};

// The sums of a row with decay stay within 2^-kSumsReach .. 2^kSumsReach of 1, even if this drops a
// decay that is smaller than the rounding errors of the row's scores.
constexpr int kSumsReach = 60;

// Turns the scores of some runs of a tile into weights for the vector of queries `at`, writes lse where chunks end, and
// cuts the runs into stretches; returns their number. A reference follows its scores only if they exceed it by kSlack.
// Other lanes are multiplied by 1: the bits of a lane do not depend on its neighbours. With decay, references are whole
// numbers, so that a change rounds nothing. If a reference is too large for this, the exponent of
// the sums is added to the change, and the sums are multiplied by the rest.
template <class B, class T>
inline int weigh(const PrefixForward& in, int64_t first, int rows, const Passing<T>& state, int at, const Run* runs,
                 int from, int to) {
  using V = typename B::V;
  V reference = load<V>(state.reference + at), before = load<V>(state.sum + at), sum = load<V>(state.tile_sum + at);
  T *factors = state.factors, *inverse = state.inverse;
  Stretch<T>* stretch = state.stretches;
  const bool fades = in.decay.log != nullptr;
  for (int i = from; i < to; ++i, ++stretch) {
    const Run* const run = runs + i;
    *stretch = {run->first, run->last, nullptr, nullptr, run->chunk};
    const V offset = broadcast<V>(fades ? T(state.offset[i]) : T(0));
    if (fades && state.fade[i] != 0) {
      const V fade = broadcast<V>(T(state.fade[i])), bound = broadcast<V>(T(kSumsReach));
      V next = reference + fade;
      const auto rounded = next - reference != fade && reference != -kInfinity;
      if (__builtin_expect(any(rounded), 0)) {
        const V total = before + sum, power = total > V{} ? whole(logarithm(total) * T(kLog2E)) : V{};
        next = rounded ? reference + (fade + power) : next;
        const V rest = fade - (next - reference) + power, kept = rest > -bound ? rest : -bound;
        const V factor = rounded ? power_of_two((kept < bound ? kept : bound) - power) : broadcast<V>(T(1));
        before *= factor, sum *= factor;
        store(factors, factor);
        stretch->factors = factors;
        factors += lanes<V>();
      }
      reference = next;
    }
    for (int k = run->first; k < run->last; ++k) {
      T* weight = state.weights + k * B::kRows + at;
      const V score = load<V>(weight);
      const auto moved = score > reference + T(kSlack);
      if (__builtin_expect(any(moved), 0)) {
        const V next = moved ? (fades ? whole(score) : score) : reference;
        const V factor = moved ? exp2(reference - next) : broadcast<V>(T(1));
        reference = next, before *= factor, sum *= factor;
        if (k > stretch->first || stretch->factors) {
          stretch->last = k;
          *++stretch = {k, run->last, nullptr, nullptr, run->chunk};
        }
        store(factors, factor);
        stretch->factors = factors;
        factors += lanes<V>();
      }
      const V p = exp2(score - anchor(reference) - offset);
      sum += p;
      store(weight, p);
    }
    if (!run->ends) continue;
    const V total = before + sum;
    store<V>(inverse, total == V{} ? V{} : T(1) / total);
    stretch->inverse = inverse;
    inverse += lanes<V>();
    store_lse(in.to.lse + run->chunk * in.queries + first + at, reference, logarithm(total),
              fades ? state.offset[i] * kLn2 : 0.0, least(rows - at, lanes<V>()));
  }
  store(state.reference + at, reference), store(state.sum + at, before), store(state.tile_sum + at, sum);
  return int(stretch - state.stretches);
}

// Adds the weighted values of the stretches to R rows of the tile's sums, from `row` on, in C vectors of columns from
// `e` on, and writes states where chunks end. kWhole: all these columns exist.
template <int R, int C, bool kWhole, class T>
inline void add_values(const PrefixForward& in, int64_t first, const Passing<T>& state, int stretches, Tile<T> value,
                       int row, int e) {
  using V = Vector<T>;
  const int width = in.shape.value_width, lane = row % lanes<V>();
  T* const before = state.sums + row * state.width + e;
  T* const sums = state.tile_sums + row * state.width + e;
  T* const out = static_cast<T*>(in.to.out) + (first + row) * width + e;
  V acc[R][C];
  const auto each = [&](auto function) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) function(acc[r][c], r, c * lanes<V>());
  };
  each([&](V& x, int r, int c) { x = load<V>(sums + r * state.width + c); });
  for (const Stretch<T>* stretch = state.stretches; stretch < state.stretches + stretches; ++stretch) {
    if (__builtin_expect(stretch->factors != nullptr, 0))
      each([&](V& x, int r, int c) {
        T* const rescaled = before + r * state.width + c;
        x *= stretch->factors[lane + r];
        store<V>(rescaled, load<V>(rescaled) * stretch->factors[lane + r]);
      });
    multiply_add<V, R, C>(acc, state.weights + stretch->first * state.rows + row, 1, state.rows,
                          value.rows + stretch->first * value.stride + e, value.stride, stretch->last - stretch->first);
    if (!stretch->inverse) continue;
    T* const written = out + stretch->chunk * in.queries * width;
    each([&](V& x, int r, int c) {
      const V state_out = (load<V>(before + r * state.width + c) + x) * stretch->inverse[lane + r];
      if constexpr (kWhole)
        __builtin_memcpy(written + r * width + c, &state_out, sizeof(V));
      else
        store_first(written + r * width + c, state_out, width - e);
    });
  }
  each([&](V& x, int r, int c) { store(sums + r * state.width + c, x); });
}

template <class T>
struct PrefixForwardKernel {
  static constexpr int kRows = kBlockVectors * kVectorLanes<T>;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kRuns = 8;

  struct Scratch {
    T *queries, *key, *value;
    Passing<T> state;
    size_t bytes;

    Scratch(const Shape& shape, int rows, Arena arena)
        : queries(arena.take<T>(rows * shape.key_width)),
          key(arena.take<T>(kKeyTile * shape.key_width)),
          value(arena.take<T>(kKeyTile * whole_vectors<T>(shape.value_width))),
          state(arena, rows, whole_vectors<T>(shape.value_width)),
          bytes(arena.used()) {}
  };
  static size_t bytes(const Shape& shape) { return Scratch(shape, kRows, Arena(nullptr)).bytes; }

  static void run(const PrefixForward& in, int64_t first, int rows, void* scratch) {
    with_block<T>(rows, [&](auto block) { run_block<decltype(block)>(in, first, rows, scratch); });
  }

  template <class B>
  static void run_block(const PrefixForward& in, int64_t first, int rows, void* memory) {
    const Shape& shape = in.shape;
    const Scratch scratch(shape, B::kRows, Arena(memory));
    const Passing<T>& state = scratch.state;
    Matrix query = in.query;
    query.data = static_cast<const char*>(query.data) + first * query.row_stride * element_bytes(shape.dtype);
    pack_columns(shape.dtype, query, rows, shape.key_width, shape.scale * kLog2E, scratch.queries);
    begin(in, first, rows, state);
    Fading fading(in.decay);
    Run runs[kKeyTile];
    for (int64_t start = 0; start < in.keys.count; start += kKeyTile) {
      const Present present = keys_present<T>(in.keys, start);
      const auto key =
          load_tile(shape.dtype, in.keys.key, start, present, shape.key_width, shape.key_width, INT64_MAX, scratch.key);
      const auto value = copy_tile(shape.dtype, in.keys.value, start, present, shape.value_width, scratch.value);
      const int count = cut_tile(in.keys, present, start, in.every, runs);
      if (in.decay.log) fading.begin_tile(runs, count, state.fade, state.offset);
      const T* bias = in.keys.bias ? load_bias(in.keys, start, present, state.bias) : nullptr;
      score_keys<B>(scratch.queries, shape.key_width, key, present.count, bias, state.weights);
      for (int run = 0; run < count; run += kRuns)
        for (int at = 0; at < rows; at += kLanes) {
          const int end = int(least(count, run + kRuns));
          add_stretches(in, first, rows, state, at, weigh<B>(in, first, rows, state, at, runs, run, end), value);
        }
      for (int i = 0; i < B::kRows; ++i) state.sum[i] += state.tile_sum[i], state.tile_sum[i] = 0;
      for (int i = 0; i < B::kRows * state.width; ++i) state.sums[i] += state.tile_sums[i], state.tile_sums[i] = 0;
    }
  }

  static void add_stretches(const PrefixForward& in, int64_t first, int rows, const Passing<T>& state, int at,
                            int stretches, Tile<T> value) {
    const int whole = in.shape.value_width / kLanes, last = at + int(least(rows - at, kLanes));
    in_pieces<kMaxColumns>(0, whole, [&](auto columns, int column) {
      in_pieces<kAccumulators / columns>(at, last, [&](auto these, int row) {
        add_values<these, columns, true>(in, first, state, stretches, value, row, column * kLanes);
      });
    });
    if (whole * kLanes < in.shape.value_width)
      in_pieces<kAccumulators>(at, last, [&](auto these, int row) {
        add_values<these, 1, false>(in, first, state, stretches, value, row, whole * kLanes);
      });
  }

  // Starts from the incoming state. Its sum of weights is 1, up to the rounding of lse to the reference.
  static void begin(const PrefixForward& in, int64_t first, int rows, const Passing<T>& state) {
    for (int i = 0; i < state.rows * state.width; ++i) state.sums[i] = state.tile_sums[i] = 0;
    for (int row = 0; row < state.rows; ++row) {
      state.reference[row] = -kInfinity, state.sum[row] = state.tile_sum[row] = 0;
      if (!in.state.lse || row >= rows) continue;
      const double lse = in.state.lse[(first + row) * in.state.lse_stride] * kLog2E;
      if (lse == -kInfinity) continue;
      state.reference[row] = T(in.decay.log ? __builtin_rint(lse) : lse);
      state.sum[row] = T(__builtin_exp2(lse - double(state.reference[row])));
      const T* out = static_cast<const T*>(in.state.out.data) + (first + row) * in.state.out.row_stride;
      for (int e = 0; e < in.shape.value_width; ++e)
        state.sums[row * state.width + e] = state.sum[row] * out[e * in.state.out.col_stride];
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
