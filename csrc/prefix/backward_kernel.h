// The backward kernel of prefixes: chunks in reverse order, each with attention's own gradient for what the states of
// its own prefix and of all longer ones send back (A and c of reference.py).
#pragma once

#include "prefix/rows.h"

namespace cmab::cpu {
namespace {

// The logarithm of a ratio of sums of exponentials that is at most 1, from those of the sums: a difference below the
// resolution of a double is none.
CMAB_INLINE double log_share(double lse, double of) {
  const double x = lse - of;
  return x > -0x1p-51 * __builtin_fabs(of) ? 0.0 : x;
}

// A block of queries, and what is sent back to it by the prefixes so far.
template <class T>
struct Returned {
  int rows, first;                // rows of the block, padded; its first query
  T *query_columns, *query_rows;  // [D][row], times scale * log2(e); [row][padded D], times scale
  T *rows_of_a, *columns_of_a;    // A as [row][padded E] and as [padded E][row]
  T *c, *lse, *lse_low;           // [row]; lse of the latest prefix in base 2, in two parts
  double *exact_c, *latest;       // [row]; lse of the latest prefix
  T* dquery;                      // [row][padded D]

  Returned(Arena& arena, const Shape& shape, int rows, int64_t first) : rows(rows), first(int(first)) {
    const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
    query_columns = arena.take<T>(rows * shape.key_width);
    query_rows = arena.take<T>(rows * d);
    rows_of_a = arena.take<T>(rows * e);
    columns_of_a = arena.take<T>(rows * e);
    for (T** each : {&c, &lse, &lse_low}) *each = arena.take<T>(rows);
    for (double** each : {&exact_c, &latest}) *each = arena.take<double>(rows);
    dquery = arena.take<T>(rows * d);
  }
};

// columns[e][row] = rows[row][e]; both extents are whole vectors.
template <class T>
inline void turn(const T* rows, int count, int width, T* columns) {
  using V = Vector<T>;
  constexpr int kLanes = lanes<V>();
  for (int row = 0; row < count; row += kLanes)
    for (int e = 0; e < width; e += kLanes) {
      V square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load<V>(rows + (row + i) * width + e);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(columns + (e + i) * count + row, square[i]);
    }
}

template <class T>
struct PrefixBackwardKernel {
  using V = Vector<T>;
  static constexpr int kRows = kBlockVectors * kVectorLanes<T>;

  struct Scratch {
    T *key, *value, *weights, *dscores, *dkey, *dvalue, *row;
    T *products, *turned;  // [rows][lane] and [lane][rows]: parts of dout * out
    double* shares;        // [rows]
    Arena rest;

    Scratch(const Shape& shape, Arena arena) : rest(nullptr) {
      const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
      key = arena.take<T>(kKeyTile * d);
      value = arena.take<T>(kKeyTile * e);
      weights = arena.take<T>(kKeyTile * kRows);
      dscores = arena.take<T>(kKeyTile * kRows);
      dkey = arena.take<T>(kKeyTile * d);
      dvalue = arena.take<T>(kKeyTile * e);
      row = arena.take<T>(e);
      products = arena.take<T>(kRows * kVectorLanes<T>);
      turned = arena.take<T>(kRows * kVectorLanes<T>);
      shares = arena.take<double>(kRows);
      rest = arena;
    }
  };

  static int64_t blocks_of(int64_t queries) { return (queries + kRows - 1) / kRows; }
  static int rows_of(int64_t queries, int64_t block) { return int(least(kRows, queries - block * kRows)); }

  static size_t bytes(const Shape& shape, int64_t queries) {
    Arena arena = Scratch(shape, Arena(nullptr)).rest;
    for (int64_t block = 0; block < blocks_of(queries); ++block) Returned<T>(arena, shape, kRows, 0);
    return arena.used();
  }

  static Returned<T> block_of(const PrefixBackward& in, const Arena& rest, int64_t block) {
    Arena arena = rest;
    for (int64_t before = 0; before < block; ++before) Returned<T>(arena, in.shape, kRows, 0);
    return Returned<T>(arena, in.shape, padded_rows<T>(rows_of(in.queries, block)), block * kRows);
  }

  static void run(const PrefixBackward& in, void* memory) {
    const Shape& shape = in.shape;
    const Scratch scratch(shape, Arena(memory));
    const int64_t blocks = blocks_of(in.queries);
    for (int64_t block = 0; block < blocks; ++block) begin(in, block_of(in, scratch.rest, block));
    const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
    Run runs[kKeyTile];
    for (int64_t start = (in.keys.count - 1) / kKeyTile * kKeyTile; start >= 0; start -= kKeyTile) {
      const Present present = present_keys(in.keys, start);
      const auto key = copy_tile(shape.dtype, in.keys.key, start, present, shape.key_width, scratch.key);
      const auto value = copy_tile(shape.dtype, in.keys.value, start, present, shape.value_width, scratch.value);
      __builtin_memset(scratch.dkey, 0, sizeof(T) * kKeyTile * d);
      __builtin_memset(scratch.dvalue, 0, sizeof(T) * kKeyTile * e);
      const int count = cut_tile(in.keys, present, start, in.every, runs);
      for (int64_t block = 0; block < blocks; ++block) {
        const Returned<T> returned = block_of(in, scratch.rest, block);
        with_block<T>(rows_of(in.queries, block), [&](auto kind) {
          run_tile<decltype(kind)>(in, returned, rows_of(in.queries, block), key, value, present.count, runs, count,
                                   scratch);
        });
      }
      const int rows = int(least(in.keys.count - start, kKeyTile));
      Backward<T>::write_gradient(in.dkeys.type, in.dkeys.dkey, start, rows, shape.key_width, present, scratch.dkey, d);
      Backward<T>::write_gradient(in.dkeys.type, in.dkeys.dvalue, start, rows, shape.value_width, present,
                                  scratch.dvalue, e);
    }
    for (int64_t block = 0; block < blocks; ++block)
      finish(in, block_of(in, scratch.rest, block), rows_of(in.queries, block));
  }

  static void begin(const PrefixBackward& in, const Returned<T>& to) {
    const Shape& shape = in.shape;
    const int rows = int(least(kRows, in.queries - to.first));
    const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
    Matrix query = in.query;
    query.data = static_cast<const char*>(query.data) + to.first * query.row_stride * element_bytes(shape.dtype);
    pack_columns(shape.dtype, query, rows, shape.key_width, shape.scale * kLog2E, to.query_columns);
    with_elements<T>(shape.dtype, query, [&](const auto* from) {
      for (int row = 0; row < rows; ++row)
        copy_row(from + row * query.row_stride, query.col_stride, shape.key_width, d, to.query_rows + row * d);
    });
    for (int i = 0; i < rows * d; ++i) to.query_rows[i] = T(to.query_rows[i] * shape.scale);
    for (int i = 0; i < to.rows * d; ++i) to.dquery[i] = 0;
    for (int i = 0; i < to.rows * e; ++i) to.rows_of_a[i] = 0;
    for (int row = 0; row < to.rows; ++row) {
      to.exact_c[row] = 0, to.latest[row] = kInfinity;  // no prefix yet: whatever follows has no share in it
      to.c[row] = to.lse_low[row] = 0, to.lse[row] = kInfinity;
    }
  }

  // Takes the gradient of prefix `chunk` into A and c. Of an empty prefix not even a NaN may reach them.
  static void take_prefix(const PrefixBackward& in, const Returned<T>& to, int rows, int64_t chunk,
                          const Scratch& scratch) {
    const int width = in.shape.value_width, padded = whole_vectors<T>(width);
    const int64_t first = chunk * in.queries + to.first;
    const double* lse = in.states.lse + first;
    share_latest(to, lse, rows, scratch.shares);
    for (int row = 0; row < rows; ++row) {
      T* a = to.rows_of_a + row * padded;
      const T share = T(scratch.shares[row]);
      const T* dout = contiguous_row(static_cast<const T*>(in.dout.data) + (first + row) * in.dout.row_stride,
                                     in.dout.col_stride, width, scratch.row);
      const T* out = static_cast<const T*>(in.states.out) + (first + row) * width;
      V product{};
      for (int e = 0; e < width; e += lanes<V>()) {
        const int64_t count = lse[row] == -kInfinity ? 0 : least(width - e, lanes<V>());
        const V slope = count ? load_first<V>(dout + e, count) : V{};
        if (count) product += slope * load_first<V>(out + e, count);
        store<V>(a + e, slope + share * load<V>(a + e));
      }
      store(scratch.products + row * lanes<V>(), product);
    }
    turn(to.rows_of_a, to.rows, padded, to.columns_of_a);
    turn(scratch.products, to.rows, lanes<V>(), scratch.turned);
    for (int lane = 1; lane < lanes<V>(); ++lane)
      for (int row = 0; row < to.rows; ++row) scratch.turned[row] += scratch.turned[lane * to.rows + row];
    for (int row = 0; row < rows; ++row) {
      const double slope = lse[row] == -kInfinity ? 0.0 : in.dlse[(first + row) * in.dlse_stride] - scratch.turned[row];
      to.exact_c[row] = slope + scratch.shares[row] * to.exact_c[row];
      to.c[row] = T(to.exact_c[row]);
    }
  }

  // The share that a prefix has in the one after it, and its lse as the latest; 0 and +inf for an empty prefix.
  static void share_latest(const Returned<T>& to, const double* lse, int rows, double* shares) {
    using Wide = Vector<double>;
    for (int row = 0; row < rows; ++row) {
      const bool empty = lse[row] == -kInfinity;
      shares[row] = empty ? -kInfinity : log_share(lse[row], to.latest[row]) * kLog2E;
      const double base2 = empty ? double(kInfinity) : lse[row] * kLog2E;
      to.latest[row] = empty ? double(kInfinity) : lse[row];
      to.lse[row] = T(base2);
      to.lse_low[row] = empty ? T(0) : T(Backward<T>::lse_remainder(base2, to.lse[row]));
    }
    for (int row = 0; row < to.rows; row += lanes<Wide>()) store(shares + row, exp2(load<Wide>(shares + row)));
  }

  // One tile of keys against one block of queries, chunk by chunk in reverse.
  template <class B>
  static void run_tile(const PrefixBackward& in, const Returned<T>& to, int rows, Tile<T> key, Tile<T> value, int keys,
                       const Run* runs, int count, const Scratch& scratch) {
    const int d = whole_vectors<T>(in.shape.key_width), e = whole_vectors<T>(in.shape.value_width);
    score_keys<B>(to.query_columns, in.shape.key_width, key, keys, scratch.weights);
    for (const Run* run = runs + count - 1; run >= runs; --run) {
      if (run->ends) take_prefix(in, to, rows, run->chunk, scratch);
      weigh_and_differentiate<B>(to, in.shape.value_width, value, *run, scratch);
      if (in.dkeys.dvalue)
        add_products(scratch.dvalue, e, run->first, run->last, scratch.weights, B::kRows, 1, to.rows_of_a, e, rows);
    }
    if (in.dkeys.dkey) add_products(scratch.dkey, d, 0, keys, scratch.dscores, B::kRows, 1, to.query_rows, d, rows);
    if (in.dquery) add_products(to.dquery, d, 0, B::kRows, scratch.dscores, 1, B::kRows, key.rows, key.stride, keys);
  }

  // Of the keys of a run: scores into weights P, and dscores = P * (A v' + c).
  template <class B>
  static void weigh_and_differentiate(const Returned<T>& from, int depth, Tile<T> value, const Run& run,
                                      const Scratch& scratch) {
    for (int at = 0; at < B::kRows; at += B::kColumns * lanes<V>())
      in_steps<B::kKeys>(run.first, run.last, [&](auto many, int k) {
        V slope[many][B::kColumns] = {};
        multiply_add<V, many, B::kColumns>(slope, value.rows + k * value.stride, value.stride, 1,
                                           from.columns_of_a + at, B::kRows, depth);
        for (int column = 0; column < B::kColumns; ++column) {
          const int row = at + column * lanes<V>();
          const V high = load<V>(from.lse + row), low = load<V>(from.lse_low + row), c = load<V>(from.c + row);
          for (int r = 0; r < many; ++r) {
            const int i = (k + r) * B::kRows + row;
            const V p = exp2(log_weight(load<V>(scratch.weights + i), high, low));
            store(scratch.weights + i, p);
            store<V>(scratch.dscores + i, p * (slope[r][column] + c));
          }
        }
      });
  }

  // Writes the gradients of the queries, and of the incoming state: a key before the first, with score lse.
  static void finish(const PrefixBackward& in, const Returned<T>& from, int rows) {
    const int d = in.shape.key_width, e = in.shape.value_width;
    for (int row = 0; in.dquery && row < rows; ++row)
      for (int i = 0; i < d; ++i)
        narrow_to(in.shape.dtype, T(in.shape.scale * from.dquery[row * whole_vectors<T>(d) + i]), in.dquery,
                  (from.first + row) * int64_t(d) + i);
    for (int row = 0; in.dstate_out && row < rows; ++row) {
      const int64_t at = from.first + row;
      const double lse = in.state.lse[at * in.state.lse_stride];
      const bool apart = lse == -kInfinity || from.latest[row] == kInfinity;  // no key in it, or no prefix
      const double share = apart ? 0.0 : __builtin_exp(log_share(lse, from.latest[row]));
      const T* out = static_cast<const T*>(in.state.out.data) + at * in.state.out.row_stride;
      double slope = from.exact_c[row];
      for (int i = 0; i < e; ++i) {
        const T a = from.rows_of_a[row * whole_vectors<T>(e) + i];
        slope += double(a) * (apart ? 0.0 : double(out[i * in.state.out.col_stride]));
        static_cast<T*>(in.dstate_out)[at * e + i] = T(share * a);
      }
      in.dstate_lse[at] = share * slope;
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
