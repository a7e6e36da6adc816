// The kernel of the sums over keys, K'WK and K'WV. Every register tile of the two matrices makes one pass over the run:
// the run is read from the L2 cache, and sums are stored only when complete.
#pragma once

#include "intention/tile.h"

namespace cmab::cpu {
namespace {

// The present keys of a run.
template <class T>
struct Run {
  Tile<T> key, value;
  Tile<T> left;     // keys times their weights
  const T* weight;  // null: all are 1
  int count;
};

// The largest distance between rows, in elements, at which they are read in place. If rows are further apart, they
// compete for a few sets of the caches and are copied, unless a row fits in one cache line: such a row is read about
// twice, so a copy would take as long.
template <class T>
constexpr int64_t in_place(int width) {
  return size_t(width) * sizeof(T) <= 64 ? INT64_MAX : 2 * width;
}

// Whether rows that are far apart can be copied unchanged while the run before them is summed.
template <class T>
inline bool copied_ahead(DType dtype, const Matrix& matrix, const uint8_t* ignored, int width) {
  return dtype == (sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32) && !ignored && matrix.col_stride == 1 &&
         matrix.row_stride > in_place<T>(width) && width == padded_width<T>(width);
}

// The rows of the next run, which are prefetched a share at a time. Rows that are far apart are copied, too.
template <class T>
class NextRows {
 public:
  NextRows() = default;
  NextRows(DType dtype, const Matrix& matrix, const uint8_t* ignored, int64_t count, int width, int64_t shares, T* copy)
      : at_(reinterpret_cast<uintptr_t>(matrix.data)),
        stride_(matrix.row_stride * element_bytes(dtype)),
        bytes_(width * element_bytes(dtype)),
        left_(width ? count : 0),
        copy_(copied_ahead<T>(dtype, matrix, ignored, width) ? reinterpret_cast<char*>(copy) : nullptr) {
    if (stride_ == bytes_) left_ = (left_ * bytes_ + kLine - 1) / kLine, stride_ = bytes_ = kLine;
    share_ = left_ / shares, rest_ = left_ % shares, shares_ = shares;
  }

  void fetch() {
    int64_t rows = share_;
    if ((due_ += rest_) >= shares_) due_ -= shares_, ++rows;
    take(rows < left_ ? rows : left_);
  }
  void finish() {
    if (copy_) take(left_);
  }

 private:
  static constexpr int64_t kLine = 64, kAhead = 32;  // the number of rows between prefetching and copying

  void take(int64_t rows) {
    left_ -= rows;
    for (; rows > 0; --rows, at_ += stride_) {
      const uintptr_t to_come = at_ + (copy_ ? kAhead * stride_ : 0);  // may be past the end, which a prefetch ignores
      for (int64_t i = 0; i < bytes_; i += kLine) __builtin_prefetch(reinterpret_cast<const void*>(to_come + i), 0, 2);
      if (copy_) copy_ = copy_row(copy_);
    }
  }

  char* copy_row(char* to) const {
    constexpr int64_t kPart = sizeof(NarrowVector<T>);
    for (int64_t i = 0; i < bytes_; i += kPart) __builtin_memcpy(to + i, reinterpret_cast<const char*>(at_) + i, kPart);
    return to + bytes_;
  }

  uintptr_t at_ = 0;
  int64_t stride_ = 0, bytes_ = 0, left_ = 0, shares_ = 1, share_ = 0, rest_ = 0, due_ = 0;
  char* copy_ = nullptr;
};

// The next run. All passes over this run prefetch a share of it every kFetchKeys keys. In a single pass, or in a few
// bursts, cache lines would be requested faster than memory can deliver them.
constexpr int kFetchKeys = 64;
template <class T>
struct Ahead {
  NextRows<T> key, value;

  void fetch() {
    key.fetch();
    value.fetch();
  }
  void finish() {
    key.finish();
    value.finish();
  }
};

// One of the two sums, left' right, a (rows, width) matrix.
template <class T>
struct Target {
  Tile<T> right;
  int width;
  double* to;
  bool first;  // whether there is no sum yet
};

// Adds a tile of sums, `rows` rows of kColumns, to the target; columns past the last are left out. One compiled copy
// serves tiles of any number of rows.
template <int kColumns, class S, class T>
__attribute__((noinline)) void add_sums(const S* sums, int rows, const Target<T>& target, int row, int column) {
  const ptrdiff_t width = target.width;
  const auto add = [&](auto columns) {  // usually a compile-time constant
    double* to = target.to + row * width + column;
    for (const S *from = sums, *end = sums + rows * kColumns; from < end; from += kColumns, to += width) {
      if (target.first)
        for (int c = 0; c < columns; ++c) to[c] = from[c];
      else
        for (int c = 0; c < columns; ++c) to[c] += from[c];
    }
  };
  if (target.width - column < kColumns)
    add(target.width - column);
  else
    add(Constant<kColumns>());
}

inline bool all_finite(const float* sums, int count) {
  constexpr int32_t kExponent = 0x7f800000;
  int32_t overflow = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t bits = int32_t(bits_from_float(sums[i]));
    overflow |= (bits & kExponent) == kExponent;
  }
  return !overflow;
}

// Recomputes in float64 a tile of `rows` rows whose float32 sums overflowed.
template <int kColumns>
__attribute__((noinline)) void add_in_double(const Run<float>& run, int rows, const Target<float>& target, int row,
                                             int column) {
  double sums[kNarrow][kColumns] = {};
  for (int i = 0; i < run.count; ++i) {
    const float* key = run.key.rows + i * run.key.stride + row;
    const float* right = target.right.rows + i * target.right.stride + column;
    for (int r = 0; r < rows; ++r) {
      const double left = double(run.weight ? run.weight[i] : 1.0f) * key[r];
      for (int c = 0; c < kColumns; ++c) sums[r][c] += left * right[c];
    }
  }
  add_sums<kColumns>(sums[0], rows, target, row, column);
}

// sums (R rows, C vectors) += left' right over a few keys. The function is not inlined, because otherwise the compiler
// would keep both accumulators and addends in registers, and spill.
template <class V, int R, int C, class T>
__attribute__((noinline)) void add_products(const T* left, ptrdiff_t left_stride, const T* right,
                                            ptrdiff_t right_stride, int keys, Ahead<T>& ahead, T* sums) {
  V acc[R][C] = {};
  for (int i = 0; i < keys; i += kFetchKeys) {
    ahead.fetch();
    multiply_add<V, R, C>(acc, left + i * left_stride, 1, left_stride, right + i * right_stride, right_stride,
                          keys - i < kFetchKeys ? keys - i : kFetchKeys);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c, sums += lanes<V>()) store<V>(sums, load<V>(sums) + acc[r][c]);
}

// The number of keys of a partial sum, which starts from zero and is then added to the sum of the run. If all terms
// round to one side, this has a smaller error than a single sum of 512 keys.
constexpr int kStepKeys = 128;

template <class V, int R, int C, class T>
inline void add_tile(const Run<T>& run, const Target<T>& target, int row, int column, Ahead<T>& ahead) {
  constexpr int kColumns = C * lanes<V>();
  const T* left = run.left.rows + row;
  const T* right = target.right.rows + column;
  alignas(64) T sums[R][kColumns] = {};
  for (int first = 0; first < run.count; first += kStepKeys) {
    const int keys = run.count - first < kStepKeys ? run.count - first : kStepKeys;
    add_products<V, R, C>(left + first * run.left.stride, run.left.stride, right + first * target.right.stride,
                          target.right.stride, keys, ahead, sums[0]);
  }
  if constexpr (sizeof(T) == 4)
    if (!all_finite(sums[0], R * kColumns)) return add_in_double<kColumns>(run, R, target, row, column);
  add_sums<kColumns>(sums[0], R, target, row, column);
}

template <class V, int C, class T>
inline void add_rows(const Run<T>& run, const Target<T>& target, int first, int end, int column, Ahead<T>& ahead) {
  for_each_tile<tile_rows(C)>(
      first, end, [&](int row, auto rows) { add_tile<V, decltype(rows)::value, C>(run, target, row, column, ahead); });
}

template <class V, class T>
inline void add_moment(const Run<T>& run, const Target<T>& moment, int width, Ahead<T>& ahead) {
  for_each_panel<kPanelColumns<V>>(padded_width<T>(moment.width) / lanes<V>(), [&](int first, auto columns) {
    add_rows<V, decltype(columns)::value>(run, moment, 0, width, first * lanes<V>(), ahead);
  });
}

// Adds K'WK on and above the diagonal, in steps of kNarrow rows. If kNarrow is half a vector, every second diagonal
// block uses narrow vectors, so that fewer sums are computed twice.
template <class V, class T>
inline void add_gram(const Run<T>& run, const Target<T>& gram, Ahead<T>& ahead) {
  for (int row = 0; row < gram.width; row += kNarrow) {
    const int end = gram.width - row < kNarrow ? gram.width : row + kNarrow;
    int column = row;
    if (row % lanes<V>() != 0) {
      add_rows<NarrowVector<T>, 1>(run, gram, row, end, column, ahead);
      column += kNarrow;
    }
    for_each_panel<kPanelColumns<V>>((padded_width<T>(gram.width) - column) / lanes<V>(), [&](int first, auto columns) {
      add_rows<V, decltype(columns)::value>(run, gram, row, end, column + first * lanes<V>(), ahead);
    });
  }
}

// The register tiles of a (rows, columns) matrix; columns are whole vectors.
template <class V>
inline int tiles(int rows, int columns) {
  int count = 0;
  for_each_panel<kPanelColumns<V>>(columns / lanes<V>(), [&](int, auto vectors) {
    for_each_tile<tile_rows(decltype(vectors)::value)>(0, rows, [&](int, auto) { ++count; });
  });
  return count;
}

// The register tiles of both sums, each of which makes one pass over the run.
template <class V, class T>
inline int gram_tiles(int width) {
  int count = 0;
  for (int row = 0; row < width; row += kNarrow) {
    const bool narrow = row % lanes<V>() != 0;
    const int rows = width - row < kNarrow ? width - row : kNarrow;
    if (narrow) count += tiles<NarrowVector<T>>(rows, kNarrow);
    count += tiles<V>(rows, padded_width<T>(width) - row - (narrow ? kNarrow : 0));
  }
  return count;
}

template <class T>
struct GramSums {
  struct Scratch {
    T *key[2], *value[2];  // of this run and the next
    T *left, *weight;
    size_t bytes;

    Scratch(const GramShape& shape, int keys, void* memory) {
      Arena arena(memory);
      for (T*& rows : key) rows = arena.take<T>(size_t(keys) * padded_width<T>(shape.key_width));
      for (T*& rows : value) rows = arena.take<T>(size_t(keys) * padded_width<T>(shape.value_width));
      left = arena.take<T>(size_t(keys) * padded_width<T>(shape.key_width));
      weight = arena.take<T>(keys);
      bytes = arena.used();
    }
  };
  static size_t scratch_bytes(const GramShape& shape, int keys) { return Scratch(shape, keys, nullptr).bytes; }

  static int passes(int width, int value_width) {
    int count = 0;
    with_vector<T>(value_width,
                   [&](auto vector) { count += tiles<decltype(vector)>(width, padded_width<T>(value_width)); });
    with_vector<T>(width, [&](auto vector) { count += gram_tiles<decltype(vector), T>(width); });
    return count;
  }

  static Tile<T> weigh(const Run<T>& run, int width, T* to) {
    const int padded = padded_width<T>(width);
    for (int k = 0; k < run.count; ++k)
      for (int d = 0; d < padded; ++d)
        to[ptrdiff_t(k) * padded + d] = run.weight[k] * run.key.rows[k * run.key.stride + d];
    return {to, padded};
  }

  static Tile<T> load(const GramShape& shape, const Matrix& matrix, const GramKeys& keys, const PresentRows& present,
                      int width, bool copied, T* copy) {
    if (copied && copied_ahead<T>(shape.dtype, matrix, keys.ignored, width)) return {copy, width};
    return load_rows(shape.dtype, matrix, present, width, in_place<T>(width), copy);
  }

  static void add_run(const GramShape& shape, const GramRun& of, bool first, double* gram, double* moment,
                      void* memory) {
    const int width = shape.key_width, value_width = moment ? shape.value_width : 0, here = of.index % 2;
    const bool copied = of.index > 0;
    const GramKeys &keys = of.keys, *next = of.next;
    const Scratch scratch(shape, of.most, memory);
    const PresentRows present(int(keys.count), keys.ignored, keys.ignored_stride);
    Run<T> run;
    run.count = present.count;
    run.key = run.left = load(shape, keys.key, keys, present, width, copied, scratch.key[here]);
    run.weight = load_weights(shape.dtype, keys, present, scratch.weight);
    if (run.weight) run.left = weigh(run, width, scratch.left);
    Ahead<T> ahead;
    if (next) {
      // A run of no keys has one share per pass.
      const int64_t shares = passes(width, value_width) * (1 + (keys.count - 1) / kFetchKeys);
      const auto upcoming = [&](const Matrix& rows, int columns, T* const(&copy)[2]) {
        return NextRows<T>(shape.dtype, rows, next->ignored, next->count, columns, shares, copy[1 - here]);
      };
      ahead = {upcoming(next->key, width, scratch.key), upcoming(next->value, value_width, scratch.value)};
    }
    if (value_width > 0) {
      run.value = load(shape, keys.value, keys, present, value_width, copied, scratch.value[here]);
      const Target<T> target{run.value, value_width, moment, first};
      with_vector<T>(value_width, [&](auto vector) { add_moment<decltype(vector)>(run, target, width, ahead); });
    }
    if (gram) {
      const Target<T> target{run.key, width, gram, first};
      with_vector<T>(width, [&](auto vector) { add_gram<decltype(vector)>(run, target, ahead); });
    }
    ahead.finish();
  }

  static constexpr GramKernel kernel = {scratch_bytes, add_run};
};

}  // namespace
}  // namespace cmab::cpu
