// The backward kernel of prefixes. Chunks are processed in reverse order. Each chunk has the gradient of ordinary
// attention with respect to the values that the states of its own prefix and of all longer prefixes send back (A and c
// in reference.py). The scan is divided into blocks over time: the lanes of lse hold queries, and rows of A stay in
// registers for a few chunks.
#pragma once

#include "prefix/rows.h"

namespace cmab::cpu {
namespace {

// The logarithm of the ratio of two sums of exponentials, computed from the logarithms of the sums. The ratio never
// exceeds 1. A difference below the resolution of a double is treated as no difference.
template <class V>
CMAB_INLINE V log_share(V lse, V of) {
  const V x = lse - of;
  return x > magnitude(of) * -0x1p-51 ? V{} : x;
}

// A block of queries, and the values that the prefixes so far send back to it.
template <class T>
struct Returned {
  int rows, first;                // rows of the block, padded; the first query of the block
  T *query_columns, *query_rows;  // [D][row], times scale * log2(e); [row][padded D], times scale
  T* a;                           // [row][padded E]
  double *c, *latest;             // [row]; lse of the latest prefix
  T* dquery;                      // [row][padded D]

  Returned(Arena& arena, const Shape& shape, int rows, int64_t first) : rows(rows), first(int(first)) {
    const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
    query_columns = arena.take<T>(rows * shape.key_width);
    query_rows = arena.take<T>(rows * d);
    a = arena.take<T>(rows * e);
    for (double** each : {&c, &latest}) *each = arena.take<double>(rows);
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

// The runs (keys of one tile between two ends of chunks) that are processed together.
constexpr int kGroup = 4;

// The rows of A that stay in registers.
constexpr int kScanned = 4;

// For a run with fewer keys, the gradients `slopes` are computed by sums over lanes.
constexpr int kFewKeys = 4;

// The values that are sent back to the keys of each run of a group. Arrays of rows have the rows of a block.
template <class T>
struct Sent {
  T* a;                  // [run][row][padded E]
  T *c, *lse, *lse_low;  // [run][row]; lse in base 2, in two parts
  T *share, *dots;       // [run][row], and [run][row][lane]: parts of dout * out
  double* exact_share;   // [run][row]
  bool empty[kGroup];    // the prefix has rows without a key

  Sent(Arena& arena, int rows, int width) {
    a = arena.take<T>(kGroup * rows * width);
    for (T** each : {&c, &lse, &lse_low, &share}) *each = arena.take<T>(kGroup * rows);
    dots = arena.take<T>(kGroup * rows * kVectorLanes<T>);
    exact_share = arena.take<double>(kGroup * rows);
  }
};

template <class T>
struct PrefixBackwardKernel {
  using V = Vector<T>;
  using Wide = Vector<double>;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kRows = kBlockVectors * kLanes;

  struct Scratch {
    T *key, *value, *bias, *weights, *dscores, *dkey, *dvalue, *dbias, *dout, *columns_of_a;
    Sent<T> sent;
    Arena rest;

    Scratch(const Shape& shape, Arena arena) : sent(arena, kRows, whole_vectors<T>(shape.value_width)), rest(nullptr) {
      const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
      for (T** each : {&key, &dkey}) *each = arena.take<T>(kKeyTile * d);
      for (T** each : {&value, &dvalue}) *each = arena.take<T>(kKeyTile * e);
      for (T** each : {&bias, &dbias}) *each = arena.take<T>(kKeyTile);
      for (T** each : {&weights, &dscores}) *each = arena.take<T>(kKeyTile * kRows);
      dout = arena.take<T>(kGroup * kRows * e);
      columns_of_a = arena.take<T>(kRows * e);
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
    Scratch scratch(shape, Arena(memory));
    const int64_t blocks = blocks_of(in.queries);
    for (int64_t block = 0; block < blocks; ++block) begin(in, block_of(in, scratch.rest, block));
    const int d = whole_vectors<T>(shape.key_width), e = whole_vectors<T>(shape.value_width);
    if (in.dlog_decay) __builtin_memset(in.dlog_decay, 0, sizeof(double) * chunks_of(in));
    Run runs[kKeyTile];
    for (int64_t start = (in.keys.count - 1) / kKeyTile * kKeyTile; start >= 0; start -= kKeyTile) {
      const Present present = keys_present<T>(in.keys, start);
      const auto key = copy_tile(shape.dtype, in.keys.key, start, present, shape.key_width, scratch.key);
      const auto value = copy_tile(shape.dtype, in.keys.value, start, present, shape.value_width, scratch.value);
      __builtin_memset(scratch.dkey, 0, sizeof(T) * kKeyTile * d);
      const T* bias = in.keys.bias ? load_bias(in.keys, start, present, scratch.bias) : nullptr;
      __builtin_memset(scratch.dvalue, 0, sizeof(T) * kKeyTile * e);
      __builtin_memset(scratch.dbias, 0, sizeof(T) * kKeyTile);
      const int count = cut_tile(in.keys, present, start, in.every, runs);
      for (int64_t block = 0; block < blocks; ++block) {
        const Returned<T> returned = block_of(in, scratch.rest, block);
        with_block<T>(rows_of(in.queries, block), [&](auto kind) {
          run_tile<decltype(kind)>(in, returned, rows_of(in.queries, block), key, value, bias, present.count, runs,
                                   count, scratch);
        });
      }
      const int rows = int(least(in.keys.count - start, kKeyTile));
      Backward<T>::write_gradient(in.dkeys.type, in.dkeys.dkey, start, rows, shape.key_width, present, scratch.dkey, d);
      Backward<T>::write_gradient(in.dkeys.type, in.dkeys.dvalue, start, rows, shape.value_width, present,
                                  scratch.dvalue, e);
      Backward<T>::write_gradient(Backward<T>::kSums, in.dkeys.dbias, start, rows, 1, present, scratch.dbias, 1);
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
    for (int i = 0; i < to.rows * e; ++i) to.a[i] = 0;
    for (int row = 0; row < to.rows; ++row)
      to.c[row] = 0, to.latest[row] = kInfinity;  // no prefix has been read yet: shares in it are 0
  }

  // One tile of keys against one block of queries, in groups of runs in reverse.
  template <class B>
  static void run_tile(const PrefixBackward& in, const Returned<T>& to, int rows, Tile<T> key, Tile<T> value,
                       const T* bias, int keys, const Run* runs, int count, Scratch& scratch) {
    const int d = whole_vectors<T>(in.shape.key_width), e = whole_vectors<T>(in.shape.value_width);
    score_keys<B>(to.query_columns, in.shape.key_width, key, keys, bias, scratch.weights);
    for (int last = count; last > 0; last -= kGroup) {
      const int first = last > kGroup ? last - kGroup : 0;
      send_back(in, to, rows, runs + first, last - first, scratch);
      for (int i = last - first - 1; i >= 0; --i) {
        const Run& run = runs[first + i];
        const T* a = scratch.sent.a + i * to.rows * e;
        if (run.last - run.first < kFewKeys)
          differentiate_few<B>(rows, e, value, run, i, scratch);
        else
          differentiate<B>(e, value, run, i, scratch);
        if (in.dkeys.dvalue)
          add_products(scratch.dvalue, e, run.first, run.last, scratch.weights, B::kRows, 1, a, e, rows);
      }
    }
    if (in.dkeys.dbias) add_bias_gradient<B>(scratch.dbias, keys, scratch.dscores, rows);
    if (in.dkeys.dkey) add_products(scratch.dkey, d, 0, keys, scratch.dscores, B::kRows, 1, to.query_rows, d, rows);
    if (in.dquery) add_products(to.dquery, d, 0, B::kRows, scratch.dscores, 1, B::kRows, key.rows, key.stride, keys);
  }

  // Adds the gradients of the prefixes that end with `count` runs to A and c, and keeps A and c for each run.
  static void send_back(const PrefixBackward& in, const Returned<T>& to, int rows, const Run* runs, int count,
                        Scratch& scratch) {
    Sent<T>& sent = scratch.sent;
    const int width = in.shape.value_width, padded = whole_vectors<T>(width), whole = width / kLanes;
    for (int i = count - 1; i >= 0; --i) share_latest(in, to, rows, runs[i], i, sent);
    const bool copied = in.dout.col_stride != 1;
    for (int i = 0; copied && i < count; ++i)
      for (int row = 0; runs[i].ends && row < rows; ++row)
        copy_row(dout_of(in, to, runs[i]) + row * in.dout.row_stride, in.dout.col_stride, width, padded,
                 scratch.dout + (i * kRows + row) * padded);
    in_pieces<kScanned>(0, rows, [&](auto these, int row) {
      const auto scan = [&](auto columns, auto is_whole, int e) {
        scan_rows<these, columns, is_whole>(in, to, runs, count, copied ? scratch.dout : nullptr, row, e, sent);
      };
      in_pieces<kMaxColumns>(0, whole, [&](auto columns, int i) { scan(columns, std::true_type{}, i * kLanes); });
      if (whole * kLanes < width) scan(std::integral_constant<int, 1>{}, std::false_type{}, whole * kLanes);
    });
    for (int i = count - 1; i >= 0; --i)
      for (int at = 0; at < rows; at += kLanes) add_dots(in, to, rows, runs[i], i, at, sent);
    for (int i = count - 1; in.dlog_decay && i >= 0; --i)
      if (runs[i].begins) send_to_decay(in, to, rows, runs[i].chunk, i, scratch);
  }

  static int64_t chunks_of(const PrefixBackward& in) { return (in.keys.count + in.every - 1) / in.every; }

  // The share of the keys before chunk `chunk`, whose lse is `lse`, in the prefix that ends with
  // the chunk.
  CMAB_INLINE static Wide share_in(const PrefixBackward& in, int64_t chunk, Wide lse, Wide of) {
    return exp2(log_share(lse + in.decay.before(chunk), of) * kLog2E);
  }

  // Adds the rows of a block to the gradient of the decay before a chunk that begins with run i.
  // All keys before the chunk together act like one key with this decay as its bias.
  static void send_to_decay(const PrefixBackward& in, const Returned<T>& to, int rows, int64_t chunk, int i,
                            Scratch& scratch) {
    const int width = in.shape.value_width, padded = whole_vectors<T>(width);
    if (chunk == 0 && !in.state.lse) return;
    for (int row = 0; row < rows; ++row) {
      const int64_t at = to.first + row, before = (chunk - 1) * in.queries + at;
      const double lse = chunk ? in.states.lse[before] : in.state.lse[at * in.state.lse_stride];
      if (lse == -kInfinity) continue;
      const T* out = chunk ? static_cast<const T*>(in.states.out) + before * width
                           : contiguous_row(static_cast<const T*>(in.state.out.data) + at * in.state.out.row_stride,
                                            in.state.out.col_stride, width, scratch.columns_of_a);
      const T* a = scratch.sent.a + (i * to.rows + row) * padded;
      V products{};
      for (int e = 0; e < width; e += kLanes)
        products += load<V>(a + e) * load_first<V>(out + e, least(width - e, kLanes));
      const double slope = double(sum_lanes(products)) + double(scratch.sent.c[i * to.rows + row]);
      const double of = in.states.lse[chunk * in.queries + at];
      in.dlog_decay[chunk] += share_in(in, chunk, broadcast<Wide>(lse), broadcast<Wide>(of))[0] * slope;
    }
  }

  static const T* dout_of(const PrefixBackward& in, const Returned<T>& to, const Run& run) {
    return static_cast<const T*>(in.dout.data) + (run.chunk * in.queries + to.first) * in.dout.row_stride;
  }

  // Takes the prefix that ends with a run, and computes the share of its sums in the sums of the latest prefix. After
  // that, the new prefix is the latest. A run that is not the end of its chunk belongs to the latest prefix. Rows that
  // do not exist are treated as empty.
  static void share_latest(const PrefixBackward& in, const Returned<T>& to, int rows, const Run& run, int i,
                           Sent<T>& sent) {
    const int64_t later = least(run.chunk + 1, chunks_of(in) - 1);  // the last prefix has a share in none
    typedef T Part __attribute__((vector_size(lanes<Wide>() * sizeof(T))));
    const double* lse = in.states.lse + run.chunk * in.queries + to.first;
    const Wide none = broadcast<Wide>(-double(kInfinity));
    sent.empty[i] = false;
    for (int row = 0; row < to.rows; row += lanes<Wide>()) {
      const Wide latest = load<Wide>(to.latest + row);
      Wide now = latest, share = broadcast<Wide>(1.0);
      if (run.ends) {
        const int64_t count = least(rows - row, lanes<Wide>());
        const auto exists = lane_numbers<Wide>() < double(count);
        now = count > 0 ? load_first<Wide>(lse + row, count) : none;
        now = exists ? now : none;
        sent.empty[i] |= any(now == none && exists);
        share = share_in(in, later, now, latest);
        now = now == none ? -none : now;
        store(to.latest + row, now);
      }
      const Wide base2 = now * kLog2E;
      const Part high = __builtin_convertvector(base2, Part);
      const Wide low = base2 - __builtin_convertvector(high, Wide);
      const int to_row = i * to.rows + row;
      store(sent.exact_share + to_row, share);
      store(sent.share + to_row, __builtin_convertvector(share, Part));
      store(sent.lse + to_row, high);
      store(sent.lse_low + to_row,
            __builtin_convertvector(magnitude(low) > magnitude(base2) * 0x1p-51 ? low : Wide{}, Part));
    }
  }

  // Prefetches R rows of both into the L2 cache. They are read backwards, which the hardware prefetcher does not
  // predict.
  template <int R>
  CMAB_INLINE static void fetch_rows(const T* dout, int64_t stride, const T* out, int width) {
    for (int r = 0; r < R; ++r)
      for (int e = 0; e < width; e += 64 / int(sizeof(T))) {
        __builtin_prefetch(dout + r * stride + e, 0, 2);
        __builtin_prefetch(out + r * width + e, 0, 2);
      }
  }

  // Computes A of R rows from `row` on, in C vectors of columns from `e` on, through `count` runs in reverse. No part
  // of an empty prefix, not even a NaN, may reach A. kWhole: all these columns exist. `copied`: a contiguous copy of
  // rows of dout.
  template <int R, int C, bool kWhole>
  static void scan_rows(const PrefixBackward& in, const Returned<T>& to, const Run* runs, int count, const T* copied,
                        int row, int e, const Sent<T>& sent) {
    const int width = in.shape.value_width, padded = whole_vectors<T>(width);
    const int64_t stride = copied ? padded : in.dout.row_stride;
    const auto read = [&](const T* from) {
      if constexpr (!kWhole) return load_first<V>(from, width - e);
      V x;
      __builtin_memcpy(&x, from, sizeof(V));
      return x;
    };
    V a[R][C];
    T* const latest = to.a + row * padded + e;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) a[r][c] = load<V>(latest + r * padded + c * kLanes);
    for (int i = count - 1; i >= 0; --i) {
      const Run& run = runs[i];
      const T* const dout = (copied ? copied + i * kRows * padded : dout_of(in, to, run)) + row * stride + e;
      const int64_t first = run.chunk * in.queries + to.first + row;
      const T* const out = static_cast<const T*>(in.states.out) + first * width + e;
      T* const kept = sent.a + (i * to.rows + row) * padded + e;
      if (e == 0 && first >= kGroup * in.queries)
        fetch_rows<R>(dout - kGroup * in.queries * stride, stride, out - kGroup * in.queries * width, width);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const int to_row = i * to.rows + row + r;
        if (run.ends) {
          V dot = e == 0 ? V{} : load<V>(sent.dots + to_row * kLanes);
          const bool empty = sent.empty[i] && in.states.lse[first + r] == -kInfinity;
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            const V slope = empty ? V{} : read(dout + r * stride + c * kLanes);
            dot += slope * read(out + r * width + c * kLanes);
            a[r][c] = slope + sent.share[to_row] * a[r][c];
          }
          store(sent.dots + to_row * kLanes, dot);
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(kept + r * padded + c * kLanes, a[r][c]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(latest + r * padded + c * kLanes, a[r][c]);
  }

  // Computes c (see reference.py) for a run and the vector of rows `at`.
  static void add_dots(const PrefixBackward& in, const Returned<T>& to, int rows, const Run& run, int i, int at,
                       const Sent<T>& sent) {
    alignas(64) T dots[kLanes];
    const int to_row = i * to.rows + at;
    if (run.ends) {
      V products[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) products[r] = load<V>(sent.dots + (to_row + r) * kLanes);
      store(dots, sum_lanes(products));
    }
    const int64_t first = run.chunk * in.queries + to.first + at;
    for (int row = 0; row < kLanes; ++row) {
      double& c = to.c[at + row];
      if (run.ends && at + row < rows) {
        const bool empty = in.states.lse[first + row] == -kInfinity;
        const double slope = empty ? 0.0 : in.dlse[(first + row) * in.dlse_stride] - dots[row];
        c = slope + sent.exact_share[to_row + row] * c;
      }
      sent.c[to_row + row] = T(c);
    }
  }

  // Turns the score of key k, of run i, into its weight P, and sets dscores = P * (A v' + c), for the vector of rows
  // `row`; `slope` is A v'.
  template <class B>
  CMAB_INLINE static void weigh(const Scratch& scratch, int i, int k, int row, V slope) {
    const Sent<T>& sent = scratch.sent;
    const int from = i * B::kRows + row, at = k * B::kRows + row;
    const V score = load<V>(scratch.weights + at);
    const V p = exp2(log_weight(score, load<V>(sent.lse + from), load<V>(sent.lse_low + from)));
    store(scratch.weights + at, p);
    store<V>(scratch.dscores + at, p * (slope + load<V>(sent.c + from)));
  }

  // Computes the slopes of a long run by products, with the rows in the lanes.
  template <class B>
  static void differentiate(int width, Tile<T> value, const Run& run, int i, const Scratch& scratch) {
    turn(scratch.sent.a + i * B::kRows * width, B::kRows, width, scratch.columns_of_a);
    for (int at = 0; at < B::kRows; at += B::kColumns * kLanes)
      in_steps<B::kKeys>(run.first, run.last, [&](auto many, int k) {
        V slope[many][B::kColumns] = {};
        multiply_add<V, many, B::kColumns>(slope, value.rows + k * value.stride, value.stride, 1,
                                           scratch.columns_of_a + at, B::kRows, width);
        for (int column = 0; column < B::kColumns; ++column)
          for (int r = 0; r < many; ++r) weigh<B>(scratch, i, k + r, at + column * kLanes, slope[r][column]);
      });
  }

  // Computes the slopes of a short run by sums over the lanes, so that A need not be transposed.
  template <class B>
  static void differentiate_few(int rows, int width, Tile<T> value, const Run& run, int i, const Scratch& scratch) {
    for (int at = 0; at < rows; at += kLanes)
      for (int k = run.first; k < run.last; ++k) {
        const T* a = scratch.sent.a + (i * B::kRows + at) * width;
        V products[kLanes] = {};
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r)
          if (at + r < rows)
            for (int e = 0; e < width; e += kLanes)
              products[r] += load<V>(a + r * width + e) * load<V>(value.rows + k * value.stride + e);
        weigh<B>(scratch, i, k, at, sum_lanes(products));
      }
  }

  // Writes the gradients of the queries and of the incoming state. This state acts as a key before the first key, with
  // score lse.
  static void finish(const PrefixBackward& in, const Returned<T>& from, int rows) {
    const int d = in.shape.key_width, e = in.shape.value_width;
    for (int row = 0; in.dquery && row < rows; ++row)
      for (int i = 0; i < d; ++i)
        narrow_to(in.shape.dtype, T(in.shape.scale * from.dquery[row * whole_vectors<T>(d) + i]), in.dquery,
                  (from.first + row) * int64_t(d) + i);
    for (int row = 0; in.dstate_out && row < rows; ++row) {
      const int64_t at = from.first + row;
      const double lse = in.state.lse[at * in.state.lse_stride];
      const bool apart = lse == -kInfinity || from.latest[row] == kInfinity;  // a state without keys, or no prefix
      const double share = apart ? 0.0 : share_in(in, 0, broadcast<Wide>(lse), broadcast<Wide>(from.latest[row]))[0];
      const T* out = static_cast<const T*>(in.state.out.data) + at * in.state.out.row_stride;
      double slope = from.c[row];
      for (int i = 0; i < e; ++i) {
        const T a = from.a[row * whole_vectors<T>(e) + i];
        slope += double(a) * (apart ? 0.0 : double(out[i * in.state.out.col_stride]));
        static_cast<T*>(in.dstate_out)[at * e + i] = apart ? T(0) : T(share * a);
      }
      in.dstate_lse[at] = apart ? 0.0 : share * slope;
    }
  }
};

}  // namespace
}  // namespace cmab::cpu
