// The backward kernel for float32 and float64 sums, one pass over the keys. Scores are laid out as in the forward
// kernel, with queries in the lanes; dK and dV have the columns of a row in the lanes and take the weights as scalars.
#pragma once

#include "attention/forward_kernel.h"

namespace cmab::cpu {
namespace {

// The vector size in bytes for rows of `width`. Rows are padded to whole vectors; narrow rows use narrower vectors if
// available.
template <class T>
constexpr int row_bytes(int width) {
  const int bytes = width * int(sizeof(T));
  return bytes <= 16 ? 16 : bytes <= 32 && CMAB_VECTOR_BYTES >= 32 ? 32 : CMAB_VECTOR_BYTES;
}

template <class T>
constexpr int padded_width(int width) {
  return round_up(width, row_bytes<T>(width) / int(sizeof(T)));
}

// to[row][d] = factor * matrix[row][d], in rows of padded_width<T>(width).
template <class T>
inline void pack_rows(DType dtype, const Matrix& matrix, int rows, int width, double factor, T* to) {
  const int padded = padded_width<T>(width);
  with_elements<T>(dtype, matrix, [&](const auto* from) {
    for (int row = 0; row < rows; ++row)
      copy_row(from + row * matrix.row_stride, matrix.col_stride, width, padded, to + row * padded);
  });
  if (factor == 1) return;
  for (int i = 0; i < rows * padded; ++i) to[i] = T(to[i] * factor);
}

// The arrays of a packed block of queries.
template <class T>
struct PackedRows {
  T *query_columns, *dout_columns;  // [width][row]; the query times scale * log2(e)
  T *query_rows, *dout_rows;        // [row][padded width]; the query times scale
  T *lse, *lse_low, *delta;         // [row]; lse in base 2, in two parts

  PackedRows(const Shape& shape, int rows, const void* memory) {
    Arena arena(const_cast<void*>(memory));
    const int lanes = padded_rows<T>(rows);
    query_columns = arena.take<T>(size_t(shape.key_width) * lanes);
    dout_columns = arena.take<T>(size_t(shape.value_width) * lanes);
    query_rows = arena.take<T>(size_t(rows) * padded_width<T>(shape.key_width));
    dout_rows = arena.take<T>(size_t(rows) * padded_width<T>(shape.value_width));
    lse = arena.take<T>(lanes);
    lse_low = arena.take<T>(lanes);
    delta = arena.take<T>(lanes);
    bytes = arena.used();
  }
  size_t bytes;
};

// out[k][:] += sum over rows of weights[k][row] * rows_of[row][:], for kColumns vectors of columns; `keys` is a
// multiple of 16. The block is a template parameter, so that the distance between rows of weights is constant, and one
// address register reaches all rows.
template <class B, int kColumns, class V, class T>
__attribute__((noinline)) void accumulate_keys(T* out, int stride, int keys, const T* weights, const T* rows_of,
                                               int rows) {
  for_each_step<kTileRows<kColumns>>(keys, [&](int k, auto many) {
    accumulate<V, many, kColumns>(out + k * stride, stride, weights + k * B::kRows, B::kRows, 1, rows_of, stride, rows);
  });
}

template <class B, class V, class T>
inline void accumulate_key_gradient(T* out, int stride, int keys, const T* weights, const T* rows_of, int rows) {
  constexpr int kStep = lanes<V>();
  int d = 0;
  if constexpr (sizeof(V) == CMAB_VECTOR_BYTES) {  // a row of narrower vectors is one vector
    for (; d + kMaxColumns * kStep <= stride; d += kMaxColumns * kStep)
      accumulate_keys<B, kMaxColumns, V>(out + d, stride, keys, weights, rows_of + d, rows);
    if constexpr (kMaxColumns == 4)
      for (; d + 2 * kStep <= stride; d += 2 * kStep)
        accumulate_keys<B, 2, V>(out + d, stride, keys, weights, rows_of + d, rows);
  }
  for (; d < stride; d += kStep) accumulate_keys<B, 1, V>(out + d, stride, keys, weights, rows_of + d, rows);
}

template <class B, class T>
inline void add_key_gradient(int width, T* out, int keys, const T* weights, const T* rows_of, int rows) {
  const int stride = padded_width<T>(width);
  switch (row_bytes<T>(width)) {
    case 16:
      return accumulate_key_gradient<B, Vector<T, 16>>(out, stride, keys, weights, rows_of, rows);
#if CMAB_VECTOR_BYTES > 32
    case 32:
      return accumulate_key_gradient<B, Vector<T, 32>>(out, stride, keys, weights, rows_of, rows);
#endif
    default:
      return accumulate_key_gradient<B, Vector<T>>(out, stride, keys, weights, rows_of, rows);
  }
}

// log2 of P. A float64 lse has no low part, so a difference below its resolution counts as 0, and so does a positive
// difference: with a single huge logit, P is then 1.
template <class V>
CMAB_INLINE V log_weight(V logit, V lse, V lse_low) {
  const V x = logit - lse - lse_low;
  if constexpr (sizeof(x[0]) == sizeof(double)) {
    const V size = lse < V{} ? -lse : lse;
    return x > -0x1p-51 * size ? V{} : x;
  }
  return x;
}

// weights[key][row] = P = exp2(logit - lse) for one register tile of columns; `keys` is a multiple of 16, and weights
// past `count` are 0.
template <class B, class T>
__attribute__((noinline)) void recompute_weights(const PackedRows<T>& packed, int depth, Tile<T> key, int count,
                                                 int keys, int column, T* weights, const T* bias) {
  using V = typename B::V;
  constexpr int kColumns = B::kColumns;
  const int at = column * lanes<V>();
  for_each_step<B::kKeys>(keys, [&](int k, auto keys_of_step) {
    constexpr int kKeys = keys_of_step;
    V s[kKeys][kColumns] = {};
    multiply_add<V, kKeys, kColumns>(s, key.rows + k * key.stride, key.stride, 1, packed.query_columns + at, B::kRows,
                                     depth);
    if (bias)
#pragma GCC unroll 16
      for (int r = 0; r < kKeys; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) s[r][c] += broadcast<V>(bias[k + r]);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const V high = load<V>(packed.lse + at + c * lanes<V>()), low = load<V>(packed.lse_low + at + c * lanes<V>());
#pragma GCC unroll 16
      for (int r = 0; r < kKeys; ++r) {
        const V p = exp2(log_weight(s[r][c], high, low));
        store(weights + (k + r) * B::kRows + at + c * lanes<V>(), k + r < count ? p : V{});
      }
    }
  });
}

// dscores[key][row] = P * (dout value' - delta).
template <class B, class T>
__attribute__((noinline)) void differentiate_scores(const PackedRows<T>& packed, int depth, Tile<T> value, int keys,
                                                    int column, const T* weights, T* dscores) {
  using V = typename B::V;
  constexpr int kColumns = B::kColumns;
  const int at = column * lanes<V>();
  for_each_step<B::kKeys>(keys, [&](int k, auto keys_of_step) {
    constexpr int kKeys = keys_of_step;
    V dp[kKeys][kColumns] = {};
    multiply_add<V, kKeys, kColumns>(dp, value.rows + k * value.stride, value.stride, 1, packed.dout_columns + at,
                                     B::kRows, depth);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const V delta = load<V>(packed.delta + at + c * lanes<V>());
#pragma GCC unroll 16
      for (int r = 0; r < kKeys; ++r) {
        const ptrdiff_t i = (k + r) * B::kRows + at + c * lanes<V>();
        store(dscores + i, load<V>(weights + i) * (dp[r][c] - delta));
      }
    }
  });
}

// sums[key] += the sum of dscores[key][row] over the rows.
template <class B, class T>
__attribute__((noinline)) void add_bias_gradient(T* sums, int keys, const T* dscores, int rows) {
  using V = typename B::V;
  for (int k = 0; k < keys; ++k) {
    V total{};
    for (int row = 0; row < rows; row += lanes<V>()) {
      const V slopes = load<V>(dscores + k * B::kRows + row);
      total += lane_numbers<V>() < T(rows - row) ? slopes : V{};
    }
    sums[k] += sum_lanes(total);
  }
}

template <class T>
struct Backward {
  static constexpr DType kSums = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

  static size_t packed_bytes(const Shape& shape, int rows) { return PackedRows<T>(shape, rows, nullptr).bytes; }
  static size_t state_bytes(const Shape& shape, int rows) {
    return sizeof(T) * size_t(padded_rows<T>(rows)) * round_up(shape.key_width, 4);
  }

  struct Scratch {
    T *key, *value, *weights, *dscores, *dkey, *dvalue, *bias, *dbias;
    size_t bytes;

    Scratch(const Shape& shape, void* memory) {
      Arena arena(memory);
      const int block = kBlockVectors * kVectorLanes<T>;
      key = arena.take<T>(kKeyTile * round_up(shape.key_width, 4));
      value = arena.take<T>(kKeyTile * round_up(shape.value_width, 4));
      weights = arena.take<T>(kKeyTile * block);
      dscores = arena.take<T>(kKeyTile * block);
      dkey = arena.take<T>(kKeyTile * padded_width<T>(shape.key_width));
      dvalue = arena.take<T>(kKeyTile * padded_width<T>(shape.value_width));
      bias = arena.take<T>(kKeyTile);
      dbias = arena.take<T>(kKeyTile);
      bytes = arena.used();
    }
  };
  static size_t scratch_bytes(const Shape& shape) { return Scratch(shape, nullptr).bytes; }

  static void pack(const Shape& shape, int rows, const QueryRows& from, void* memory) {
    const PackedRows<T> packed(shape, rows, memory);
    const Matrix dout{from.dout, from.dout_row_stride, from.dout_col_stride};
    pack_columns(shape.dtype, from.query, rows, shape.key_width, shape.scale * kLog2E, packed.query_columns);
    pack_rows(shape.dtype, from.query, rows, shape.key_width, shape.scale, packed.query_rows);
    pack_columns(kSums, dout, rows, shape.value_width, 1.0, packed.dout_columns);
    pack_rows(kSums, dout, rows, shape.value_width, 1.0, packed.dout_rows);
    for (int row = 0; row < padded_rows<T>(rows); ++row) {
      const bool empty = row >= rows || from.lse[row] == -kInfinity;
      const double lse = empty ? kInfinity : from.lse[row] * kLog2E;
      packed.lse[row] = T(lse);
      packed.lse_low[row] = empty ? T(0) : T(lse_remainder(lse, packed.lse[row]));
      packed.delta[row] = empty ? T(0) : T(from.delta[row]);
      if (empty && row < rows) forget_dout(shape, rows, packed, row);
    }
  }

  // The part of the double `lse` that is missing in `high`, its float32 value; 0 if the part is below the resolution of
  // a double.
  static double lse_remainder(double lse, double high) {
    const double low = lse - high, resolution = 0x1p-51 * __builtin_fabs(lse);
    return __builtin_fabs(low) > resolution ? low : 0.0;
  }

  // Sets the dout of a row without a key to zero, because not even a NaN in it may reach dV.
  static void forget_dout(const Shape& shape, int rows, const PackedRows<T>& packed, int row) {
    for (int e = 0; e < shape.value_width; ++e) {
      packed.dout_columns[e * padded_rows<T>(rows) + row] = 0;
      packed.dout_rows[row * padded_width<T>(shape.value_width) + e] = 0;
    }
  }

  static void clear(const Shape& shape, int rows, void* state) { __builtin_memset(state, 0, state_bytes(shape, rows)); }

  static void attend(const Shape& shape, const Needs& needs, const QueryBlock* blocks, int count, const Keys& keys,
                     const KeyGradient& gradient, void* memory) {
    const Scratch scratch(shape, memory);
    const int dkey_width = padded_width<T>(shape.key_width), dvalue_width = padded_width<T>(shape.value_width);
    const int64_t apart = in_place<T>(shape, blocks, count);
    for (int64_t first = 0; first < keys.count; first += kKeyTile) {
      Present present = present_keys(keys, first);
      if (keys.bias) leave_out_excluded<T>(keys, first, present);
      const auto key = load_tile(shape.dtype, keys.key, first, present, shape.key_width, round_up(shape.key_width, 4),
                                 apart, scratch.key);
      const auto value = load_tile(shape.dtype, keys.value, first, present, shape.value_width,
                                   round_up(shape.value_width, 4), apart, scratch.value);
      const T* bias = keys.bias ? load_bias(keys, first, present, scratch.bias) : nullptr;
      if (bias) __builtin_memset(scratch.dbias, 0, sizeof(T) * kKeyTile);
      __builtin_memset(scratch.dkey, 0, sizeof(T) * kKeyTile * dkey_width);
      __builtin_memset(scratch.dvalue, 0, sizeof(T) * kKeyTile * dvalue_width);
      if (present.count > 0)
        for (const QueryBlock* block = blocks; block < blocks + count; ++block)
          with_block<T>(block->rows, [&](auto kind) {
            attend_block<decltype(kind)>(shape, needs, *block, key, value, present.count, bias, scratch);
          });
      const int rows = int(keys.count - first < kKeyTile ? keys.count - first : kKeyTile);
      write_gradient(gradient.type, gradient.dkey, first, rows, shape.key_width, present, scratch.dkey, dkey_width);
      write_gradient(gradient.type, gradient.dvalue, first, rows, shape.value_width, present, scratch.dvalue,
                     dvalue_width);
      write_gradient(kSums, gradient.dbias, first, rows, 1, present, scratch.dbias, 1);
    }
  }

  template <class B>
  static void attend_block(const Shape& shape, const Needs& needs, const QueryBlock& block, Tile<T> key, Tile<T> value,
                           int count, const T* bias, const Scratch& scratch) {
    const PackedRows<T> packed(shape, block.rows, block.packed);
    const int keys = round_up(count, kKeyStep);
    constexpr int kVectors = B::kRows / kVectorLanes<T>;
    for (int c = 0; c < kVectors; c += B::kColumns)
      recompute_weights<B>(packed, shape.key_width, key, count, keys, c, scratch.weights, bias);
    if (needs.value)
      add_key_gradient<B>(shape.value_width, scratch.dvalue, keys, scratch.weights, packed.dout_rows, block.rows);
    if (!needs.query && !needs.key && !needs.bias) return;
    for (int c = 0; c < kVectors; c += B::kColumns)
      differentiate_scores<B>(packed, shape.value_width, value, keys, c, scratch.weights, scratch.dscores);
    if (needs.key)
      add_key_gradient<B>(shape.key_width, scratch.dkey, keys, scratch.dscores, packed.query_rows, block.rows);
    if (needs.bias) add_bias_gradient<B>(scratch.dbias, count, scratch.dscores, block.rows);
    if (needs.query)
      for (int c = 0; c < kVectors; c += B::kColumns)
        accumulate_rows<B>(static_cast<T*>(block.state) + c * kVectorLanes<T>, round_up(shape.key_width, 4), key,
                           scratch.dscores + c * kVectorLanes<T>, count);
  }

  static void write_gradient(DType type, void* gradient, int64_t first, int rows, int width, const Present& present,
                             const T* from, int stride) {
    if (!gradient) return;
    const int64_t at = first * width;
    if constexpr (sizeof(T) == 8)
      return scatter(static_cast<double*>(gradient) + at, rows, width, present, from, stride);
    else if (type == DType::kFloat32)
      scatter(static_cast<float*>(gradient) + at, rows, width, present, from, stride);
    else if (type == DType::kBFloat16)
      scatter(static_cast<BFloat16*>(gradient) + at, rows, width, present, from, stride);
    else
      scatter(static_cast<Float16*>(gradient) + at, rows, width, present, from, stride);
  }

  // Copies the rows of present keys to their places, and writes zeros for absent keys.
  template <class To>
  static void scatter(To* to, int rows, int width, const Present& present, const T* from, int stride) {
    const T* row = from;
    for (int k = 0; k < rows; ++k, to += width) {
      const int taken = int((row - from) / stride);
      if (taken < present.count && present.row[taken] == k) {
        for (int d = 0; d < width; ++d) narrow(row[d], to + d);
        row += stride;
      } else {
        for (int d = 0; d < width; ++d) narrow(T(0), to + d);
      }
    }
  }

  static void read(const Shape& shape, int rows, const void* state, double* dquery) {
    const T* columns = static_cast<const T*>(state);
    for (int row = 0; row < rows; ++row)
      for (int d = 0; d < shape.key_width; ++d)
        dquery[row * shape.key_width + d] = columns[d * padded_rows<T>(rows) + row];
  }

  static constexpr BackwardKernel kernel = {
      kBlockVectors * kVectorLanes<T>, packed_bytes, state_bytes, scratch_bytes, pack, clear, attend, read, false};
};

}  // namespace
}  // namespace cmab::cpu
