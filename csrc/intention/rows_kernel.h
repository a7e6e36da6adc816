// Kernels of rows times small matrices: a solution applied to queries, and the gradient of the sums to keys, values and
// weights. A matrix is packed in panels of a few vectors of columns, so that a register tile reads it sequentially.
#pragma once

#include "intention/tile.h"

namespace cmab::cpu {
namespace {

constexpr int kBlockRows = 48;
constexpr int64_t kAnywhere = INT64_MAX;

// One term of a sum of products: rows, and the packed matrix that they multiply.
template <class T>
struct Factors {
  Tile<T> rows;
  const T* packed;
  int depth;
};

// to[row][:] = the sum over the terms of rows[row][:] times the packed matrix.
template <class V, int R, int C, class T>
inline void multiply_tile(const Factors<T>* terms, int count, int row, int column, T* to, ptrdiff_t to_stride) {
  V acc[R][C] = {};
  for (const Factors<T>* term = terms; term < terms + count; ++term)
    multiply_add<V, R, C>(acc, term->rows.rows + row * term->rows.stride, term->rows.stride, 1,
                          term->packed + ptrdiff_t(column) * term->depth, C * lanes<V>(), term->depth);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(to + (row + r) * to_stride + column + c * lanes<V>(), acc[r][c]);
}

// Prefetches the upcoming rows evenly during the `visits` of rows that are multiplied. In bursts, cache lines would be
// requested faster than memory can deliver them.
class Fetching {
 public:
  Fetching(const Upcoming& rows, int64_t visits) : rows_(rows), visits_(visits) {}

  CMAB_INLINE void visit(int visits) {
    constexpr int64_t kLine = 64;
    for (due_ += visits * rows_.rows; due_ >= visits_; due_ -= visits_, rows_.data += rows_.stride)
      for (int64_t i = 0; i < rows_.width; i += kLine) __builtin_prefetch(rows_.data + i, 0, 2);
  }

 private:
  Upcoming rows_;
  const int64_t visits_;
  int64_t due_ = 0;
};

// Multiplies `count` rows, for one or two terms. One compiled copy serves both cases.
template <class T>
__attribute__((noinline)) void multiply_rows(const Factors<T>* terms, int number, int count, int width, T* to,
                                             ptrdiff_t to_stride, Fetching (&ahead)[2]) {
  with_vector<T>(width, [&](auto vector) {
    using V = decltype(vector);
    for_each_panel<kPanelColumns<V>>(padded_width<T>(width) / lanes<V>(), [&](int first, auto columns) {
      constexpr int C = decltype(columns)::value;
      for_each_tile<tile_rows(C)>(0, count, [&](int row, auto rows) {
        if (first == 0)
          for (Fetching& fetching : ahead) fetching.visit(decltype(rows)::value);
        multiply_tile<V, decltype(rows)::value, C>(terms, number, row, first * lanes<V>(), to, to_stride);
      });
    });
  });
}

// The memory where results are computed: the output itself if type and alignment allow, else `buffer`.
template <class T>
struct Destination {
  T* rows;
  ptrdiff_t stride;
  bool final;

  Destination(DType dtype, void* out, int64_t row, int width, bool may_be_final, T* buffer)
      : rows(buffer), stride(padded_width<T>(width)), final(false) {
    if (dtype != (sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32)) return;
    T* there = static_cast<T*>(out) + row * width;
    final = may_be_final && aligned(there, width, width);
    if (final) rows = there;
  }
};

// Writes factor * from as row `row` of the output, in its type.
template <class T>
__attribute__((noinline)) void write_row(DType dtype, void* out, int64_t row, int width, const T* from, T factor) {
  with_type<T>(dtype, out, [&](auto* to) {
    to += row * width;
    for (int d = 0; d < width; ++d) narrow(from[d] * factor, to + d);
  });
}

inline void clear_row(DType dtype, void* out, int64_t row, int width) {
  const size_t bytes = size_t(width) * element_bytes(dtype);
  __builtin_memset(static_cast<char*>(out) + row * bytes, 0, bytes);
}

template <class T>
inline T dot(const T* a, const T* b, int width) {
  T sum = 0;
  with_vector<T>(width, [&](auto vector) {
    using V = decltype(vector);
    V sums{};
    for (int d = 0; d < width; d += lanes<V>()) sums += load<V>(a + d) * load<V>(b + d);
    for (int i = 0; i < lanes<V>(); ++i) sum += sums[i];
  });
  return sum;
}

template <class T>
struct Rows {
  static size_t packed_bytes(int depth, int width) { return sizeof(T) * size_t(depth) * padded_width<T>(width); }

  static void pack(const Coefficients& matrix, const Coefficients* addend, int depth, int width, void* packed) {
    T* to = static_cast<T*>(packed);
    with_vector<T>(width, [&](auto vector) {
      constexpr int kLanes = lanes<decltype(vector)>();
      for_each_panel<kPanelColumns<decltype(vector)>>(padded_width<T>(width) / kLanes, [&](int first, auto columns) {
        constexpr int kColumns = decltype(columns)::value * kLanes;
        for (int d = 0; d < depth; ++d, to += kColumns)
          pack_row(matrix, addend, d, first * kLanes, width - first * kLanes, kColumns, to);
      });
    });
  }

  static __attribute__((noinline)) void pack_row(const Coefficients& matrix, const Coefficients* addend, int row,
                                                 int column, int width, int padded, T* to) {
    const double* from = matrix.data + row * matrix.row_stride + column * matrix.col_stride;
    if (width > padded) width = padded;
    if (addend) {
      const double* other = addend->data + row * addend->row_stride + column * addend->col_stride;
      for (int c = 0; c < width; ++c) to[c] = T(from[c * matrix.col_stride] + other[c * addend->col_stride]);
    } else if (matrix.col_stride == 1) {
      for (int c = 0; c < width; ++c) to[c] = T(from[c]);
    } else {
      for (int c = 0; c < width; ++c) to[c] = T(from[c * matrix.col_stride]);
    }
    for (int c = width; c < padded; ++c) to[c] = 0;
  }

  struct ApplyScratch {
    T *query, *out;
    size_t bytes;

    ApplyScratch(int depth, int width, void* memory) {
      Arena arena(memory);
      query = arena.take<T>(size_t(kBlockRows) * padded_width<T>(depth));
      out = arena.take<T>(size_t(kBlockRows) * padded_width<T>(width));
      bytes = arena.used();
    }
  };
  static size_t apply_scratch_bytes(int depth, int width) { return ApplyScratch(depth, width, nullptr).bytes; }

  static void apply(DType dtype, const Matrix& query, int64_t count, int depth, int width, const void* packed,
                    void* out, const Upcoming& upcoming, void* memory) {
    const ApplyScratch scratch(depth, width, memory);
    Fetching ahead[] = {{upcoming, count}, {{}, 1}};
    for (int64_t first = 0; first < count; first += kBlockRows) {
      const int rows = int(count - first < kBlockRows ? count - first : kBlockRows);
      const PresentRows present(rows, nullptr, 0);
      const auto block = load_rows(dtype, from_row(dtype, query, first), present, depth, kAnywhere, scratch.query);
      const Destination<T> to(dtype, out, first, width, true, scratch.out);
      const Factors<T> product{block, static_cast<const T*>(packed), depth};
      multiply_rows(&product, 1, rows, width, to.rows, to.stride, ahead);
      if (!to.final)
        for (int k = 0; k < rows; ++k) write_row(dtype, out, first + k, width, to.rows + k * to.stride, T(1));
    }
  }

  struct Scratch {
    T *key, *value, *weight, *dkey, *dvalue;
    size_t bytes;

    Scratch(const GramShape& shape, void* memory) {
      Arena arena(memory);
      const size_t key_size = size_t(kBlockRows) * padded_width<T>(shape.key_width);
      const size_t value_size = size_t(kBlockRows) * padded_width<T>(shape.value_width);
      key = arena.take<T>(key_size);
      value = arena.take<T>(value_size);
      weight = arena.take<T>(kBlockRows);
      dkey = arena.take<T>(key_size);
      dvalue = arena.take<T>(value_size);
      bytes = arena.used();
    }
  };
  static size_t differentiate_scratch_bytes(const GramShape& shape) { return Scratch(shape, nullptr).bytes; }

  // Computes u = S k + dmoment v and y = dmoment' k, a block of rows at a time. Then dkey = w u, dvalue = w y and
  // dweight = (k.u + v.y) / 2.
  static void differentiate(const GramShape& shape, const GramKeys& all, const PackedSlopes& slopes,
                            const GramGradient& gradient, const Upcoming (&upcoming)[2], void* memory) {
    const Scratch scratch(shape, memory);
    const bool to_key = gradient.key || gradient.weight, to_value = gradient.value || gradient.weight;
    const int64_t visits = all.count * (to_key + to_value);
    Fetching ahead[] = {{upcoming[0], visits}, {upcoming[1], visits}};
    const int width = shape.key_width, value_width = shape.value_width;
    for (int64_t first = 0; first < all.count; first += kBlockRows) {
      const int rows = int(all.count - first < kBlockRows ? all.count - first : kBlockRows);
      const GramKeys keys = from_key(shape, all, first, rows);
      const PresentRows present(rows, keys.ignored, keys.ignored_stride);
      const auto key = load_rows(shape.dtype, keys.key, present, width, kAnywhere, scratch.key);
      const auto value = load_rows(shape.dtype, keys.value, present, value_width, kAnywhere, scratch.value);
      const T* weight = load_weights(shape.dtype, keys, present, scratch.weight);
      const bool as_is = present.all && !weight;
      const Destination<T> u(shape.dtype, gradient.key, first, width, as_is && gradient.key, scratch.dkey);
      const Destination<T> y(shape.dtype, gradient.value, first, value_width, as_is && gradient.value, scratch.dvalue);
      if (to_key) {
        const Factors<T> terms[] = {{key, static_cast<const T*>(slopes.gram), width},
                                    {value, static_cast<const T*>(slopes.moment_transposed), value_width}};
        multiply_rows(terms, 2, present.count, width, u.rows, u.stride, ahead);
      }
      if (to_value) {
        const Factors<T> term{key, static_cast<const T*>(slopes.moment), width};
        multiply_rows(&term, 1, present.count, value_width, y.rows, y.stride, ahead);
      }
      if (gradient.key && !u.final) scatter(shape.dtype, gradient.key, first, rows, width, present, u, weight);
      if (gradient.value && !y.final)
        scatter(shape.dtype, gradient.value, first, rows, value_width, present, y, weight);
      if (gradient.weight) differentiate_weights(shape, gradient.weight, first, rows, present, key, value, u, y);
    }
  }

  // Writes the rows of present keys, times their weights, to the places of these keys; zeros for absent keys.
  static void scatter(DType dtype, void* out, int64_t first, int rows, int width, const PresentRows& present,
                      const Destination<T>& from, const T* weight) {
    int taken = 0;
    for (int k = 0; k < rows; ++k)
      if (present.has(k, taken)) {
        write_row(dtype, out, first + k, width, from.rows + taken * from.stride, weight ? weight[taken] : T(1));
        ++taken;
      } else {
        clear_row(dtype, out, first + k, width);
      }
  }

  static void differentiate_weights(const GramShape& shape, void* out, int64_t first, int rows,
                                    const PresentRows& present, Tile<T> key, Tile<T> value, const Destination<T>& u,
                                    const Destination<T>& y) {
    int taken = 0;
    for (int k = 0; k < rows; ++k) {
      T sum = 0;
      if (present.has(k, taken)) {
        sum = dot(key.rows + taken * key.stride, u.rows + taken * u.stride, shape.key_width) +
              dot(value.rows + taken * value.stride, y.rows + taken * y.stride, shape.value_width);
        ++taken;
      }
      write_row(state_type(shape.dtype), out, first + k, 1, &sum, T(0.5));
    }
  }

  static constexpr RowsKernel kernel = {packed_bytes, pack, apply_scratch_bytes, apply, differentiate_scratch_bytes,
                                        differentiate};
};

}  // namespace
}  // namespace cmab::cpu
