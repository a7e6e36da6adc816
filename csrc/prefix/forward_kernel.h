// The forward kernel of prefixes: an online softmax that writes its state after every chunk. Scores have the queries in
// the lanes, as in attention/forward_kernel.h; sums of values have the columns in the lanes, as they are written.
#pragma once

#include "prefix/rows.h"

namespace cmab::cpu {
namespace {

// The states of a block of queries while keys pass by, relative to 2^reference. Sums are kept in two parts, over whole
// tiles and over the keys of this tile so far: sums of partial sums keep the rounding error over many keys small.
template <class T>
struct Passing {
  int rows, width;                // of the block, and of a row of sums: whole vectors
  T *reference, *base_sum, *sum;  // [rows]; the sums of weights, in two parts
  T *base, *acc;                  // [rows][width]: the sums of weighted values, in two parts
  T* weights;                     // [key of the tile][rows]: scores, then weights
  T* inverse;                     // [rows]: 1 / the sum of weights, for one state

  Passing(Arena& arena, int rows, int width) : rows(rows), width(width) {
    for (T** each : {&reference, &base_sum, &sum, &inverse}) *each = arena.take<T>(rows);
    base = arena.take<T>(rows * width);
    acc = arena.take<T>(rows * width);
    weights = arena.take<T>(kKeyTile * rows);
  }
};

// Raises the references of one vector of queries to `top` where it exceeds them by kSlack, and rescales what is
// relative to them: the sums, and the weights of keys `first` to `last`, which are not added yet.
template <class B, class T>
__attribute__((noinline)) void raise_references(const Passing<T>& state, int at, const T* top, int first, int last) {
  using V = typename B::V;
  alignas(64) T factors[lanes<V>()];
  const V old = load<V>(state.reference + at), seen = load<V>(top);
  const auto moved = seen > old + T(kSlack);
  const V next = moved ? seen : old;
  const V factor = moved ? exp2(old - next) : broadcast<V>(T(1));
  store(factors, factor);
  store(state.reference + at, next);
  for (T* sum : {state.base_sum, state.sum}) store(sum + at, load<V>(sum + at) * factor);
  for (int k = first; k < last; ++k) {
    T* weight = state.weights + k * B::kRows + at;
    store(weight, load<V>(weight) * factor);
  }
  for (int row = 0; row < lanes<V>(); ++row)
    if (factors[row] != T(1))
      for (T* sums : {state.base, state.acc})
        for (int e = 0; e < state.width; ++e) sums[(at + row) * state.width + e] *= factors[row];
}

// Turns the scores of a run into weights, and adds them up.
template <class B, class T>
inline void weigh_run(const Passing<T>& state, const Run& run) {
  using V = typename B::V;
  for (int at = 0; at < B::kRows; at += lanes<V>()) {
    V reference = load<V>(state.reference + at), sum{};
    for (int k = run.first; k < run.last; ++k) {
      T* weight = state.weights + k * B::kRows + at;
      const V score = load<V>(weight);
      if (__builtin_expect(any(score > reference + T(kSlack)), 0)) {
        alignas(64) T top[lanes<V>()];
        store(top, score);
        store<V>(state.sum + at, load<V>(state.sum + at) + sum);
        raise_references<B>(state, at, top, run.first, k);
        reference = load<V>(state.reference + at), sum = V{};
      }
      const V p = exp2(score - anchor(reference));
      sum += p;
      store(weight, p);
    }
    store<V>(state.sum + at, load<V>(state.sum + at) + sum);
  }
}

template <class T>
struct PrefixForwardKernel {
  static constexpr int kRows = kBlockVectors * kVectorLanes<T>;

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
    Run runs[kKeyTile];
    for (int64_t start = 0; start < in.keys.count; start += kKeyTile) {
      const Present present = present_keys(in.keys, start);
      const auto key =
          load_tile(shape.dtype, in.keys.key, start, present, shape.key_width, shape.key_width, scratch.key);
      const auto value = copy_tile(shape.dtype, in.keys.value, start, present, shape.value_width, scratch.value);
      score_keys<B>(scratch.queries, shape.key_width, key, present.count, state.weights);
      const int count = cut_tile(in.keys, present, start, in.every, runs);
      for (const Run* run = runs; run < runs + count; ++run) {
        weigh_run<B>(state, *run);
        add_products(state.acc, state.width, 0, B::kRows, state.weights + run->first * B::kRows, 1, B::kRows,
                     value.rows + run->first * value.stride, value.stride, run->last - run->first);
        if (run->ends) write(in, run->chunk * in.queries + first, rows, state);
      }
      for (int i = 0; i < B::kRows; ++i) state.base_sum[i] += state.sum[i], state.sum[i] = 0;
      for (int i = 0; i < B::kRows * state.width; ++i) state.base[i] += state.acc[i], state.acc[i] = 0;
    }
  }

  // The incoming state: its sum of weights is 1 as far as the reference, which is rounded, is its lse.
  static void begin(const PrefixForward& in, int64_t first, int rows, const Passing<T>& state) {
    for (int i = 0; i < state.rows * state.width; ++i) state.base[i] = state.acc[i] = 0;
    for (int row = 0; row < state.rows; ++row) {
      state.reference[row] = -kInfinity, state.base_sum[row] = state.sum[row] = 0;
      if (!in.state.lse || row >= rows) continue;
      const double lse = in.state.lse[(first + row) * in.state.lse_stride] * kLog2E;
      if (lse == -kInfinity) continue;
      state.reference[row] = T(lse);
      state.base_sum[row] = T(__builtin_exp2(lse - double(state.reference[row])));
      const T* out = static_cast<const T*>(in.state.out.data) + (first + row) * in.state.out.row_stride;
      for (int e = 0; e < in.shape.value_width; ++e)
        state.base[row * state.width + e] = state.base_sum[row] * out[e * in.state.out.col_stride];
    }
  }

  // Writes the state of the keys so far to rows `at` and on.
  static void write(const PrefixForward& in, int64_t at, int rows, const Passing<T>& state) {
    using V = Vector<T>;
    alignas(64) T logs[kRows];
    for (int row = 0; row < state.rows; row += lanes<V>()) {
      const V total = load<V>(state.base_sum + row) + load<V>(state.sum + row);
      store(logs + row, logarithm(total));
      store<V>(state.inverse + row, total == V{} ? V{} : T(1) / total);
    }
    for (int row = 0; row < rows; ++row)
      in.to.lse[at + row] = state.inverse[row] == 0 ? -kInfinity : state.reference[row] * kLn2 + logs[row];
    const int width = in.shape.value_width;
    T* to = static_cast<T*>(in.to.out) + at * width;
    for (int row = 0; row < rows; ++row, to += width)
      for (int e = 0; e < width; e += lanes<V>()) {
        const int i = row * state.width + e;
        store_first(to + e, (load<V>(state.base + i) + load<V>(state.acc + i)) * state.inverse[row],
                    least(width - e, lanes<V>()));
      }
  }
};

}  // namespace
}  // namespace cmab::cpu
