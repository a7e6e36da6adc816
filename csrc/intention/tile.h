// Helpers shared by the kernels of regularised least squares: rows in the compute type. Internal linkage, as in simd.h.
#pragma once

#include "common/panels.h"
#include "common/tile.h"
#include "intention/gram.h"

namespace cmab::cpu {
namespace {

// Rows of up to kNarrow columns use vectors of at most kNarrow lanes; wider rows use whole vectors.
constexpr int kNarrow = 8;

template <class T>
using NarrowVector = Vector<T, (kVectorLanes<T> > kNarrow ? kNarrow * int(sizeof(T)) : CMAB_VECTOR_BYTES)>;

template <class T>
constexpr int padded_width(int width) {
  return round_up(width, width <= kNarrow ? lanes<NarrowVector<T>>() : kVectorLanes<T>);
}

// Calls `function` with a zero vector of the type that fits rows of `width` columns.
template <class T, class Function>
CMAB_INLINE void with_vector(int width, Function function) {
  if (width <= kNarrow)
    function(NarrowVector<T>{});
  else
    function(Vector<T>{});
}

// The most vectors of a panel. A row of vectors narrower than the widest is one such vector.
template <class V>
constexpr int kPanelColumns = sizeof(V) < CMAB_VECTOR_BYTES ? 1 : kMaxColumns;

// A register tile is R rows of C vectors: 16 to 24 accumulators of 32 registers with AVX-512, 12 of 16 elsewhere.
constexpr int tile_rows(int columns) { return columns == kMaxColumns ? 6 : 8; }

// Calls `function` with `data` as a pointer to elements of `dtype`, const or not. T is the compute type.
template <class T, class Void, class Function>
CMAB_INLINE auto with_type(DType dtype, Void* data, Function function) {
  const auto typed = [&](auto element) {
    using Element = decltype(element);
    return function(static_cast<std::conditional_t<std::is_const_v<Void>, const Element, Element>*>(data));
  };
  if constexpr (sizeof(T) == 8)
    if (dtype == DType::kFloat64) return typed(double());
  if (dtype == DType::kFloat32) return typed(float());
  if (dtype == DType::kBFloat16) return typed(BFloat16());
  return typed(Float16());
}

inline Matrix from_row(DType dtype, const Matrix& matrix, int64_t row) {
  return {static_cast<const char*>(matrix.data) + row * matrix.row_stride * element_bytes(dtype), matrix.row_stride,
          matrix.col_stride};
}

// The `count` keys from `first` on.
inline GramKeys from_key(const GramShape& shape, GramKeys keys, int64_t first, int64_t count) {
  keys.key = from_row(shape.dtype, keys.key, first);
  keys.value = from_row(shape.dtype, keys.value, first);
  if (keys.weight)
    keys.weight =
        static_cast<const char*>(keys.weight) + first * keys.weight_stride * element_bytes(state_type(shape.dtype));
  if (keys.ignored) keys.ignored += first * keys.ignored_stride;
  keys.count = count;
  return keys;
}

// The rows of a run that are present, in ascending order.
struct PresentRows {
  int count = 0;
  bool all;
  uint16_t row[kMaxRunKeys];

  PresentRows(int rows, const uint8_t* ignored, int64_t stride) {
    for (int k = 0; k < rows; ++k) {
      row[count] = uint16_t(k);
      count += !ignored || !ignored[k * stride];
    }
    all = count == rows;
  }

  // Whether row k is present, given that `taken` present rows precede it.
  bool has(int k, int taken) const { return taken < count && row[taken] == k; }
};

// Whether rows can be accessed as whole, aligned vectors.
template <class T>
inline bool aligned(const T* rows, int64_t stride, int width) {
  const size_t bytes = width <= kNarrow ? sizeof(NarrowVector<T>) : sizeof(Vector<T>);
  return width == padded_width<T>(width) &&
         (reinterpret_cast<uintptr_t>(rows) | size_t(stride) * sizeof(T)) % bytes == 0;
}

// The present rows: in place if aligned vectors can read them and they are at most `apart` elements apart, else in
// `copy`, zero-padded to padded_width.
template <class T>
inline Tile<T> load_rows(DType dtype, const Matrix& matrix, const PresentRows& present, int width, int64_t apart,
                         T* copy) {
  const int padded = padded_width<T>(width);
  return with_type<T>(dtype, matrix.data, [&](const auto* from) -> Tile<T> {
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (present.all && matrix.col_stride == 1 && matrix.row_stride <= apart &&
          aligned(from, matrix.row_stride, width))
        return {from, matrix.row_stride};
    if constexpr (std::is_same_v<decltype(from), const T*>)
      if (matrix.col_stride == 1 && width == padded) {
        copy_rows(from, matrix.row_stride, present.row, present.count, width, copy);
        return {copy, padded};
      }
    for (int k = 0; k < present.count; ++k)
      copy_row(from + present.row[k] * matrix.row_stride, matrix.col_stride, width, padded,
               copy + ptrdiff_t(k) * padded);
    return {copy, padded};
  });
}

// The weights of the present rows; null if all weights are 1.
template <class T>
inline const T* load_weights(DType dtype, const GramKeys& keys, const PresentRows& present, T* copy) {
  if (!keys.weight) return nullptr;
  const auto load = [&](const auto* from) {
    for (int k = 0; k < present.count; ++k) copy[k] = T(from[present.row[k] * keys.weight_stride]);
  };
  if (dtype == DType::kFloat64)
    load(static_cast<const double*>(keys.weight));
  else
    load(static_cast<const float*>(keys.weight));
  return copy;
}

}  // namespace
}  // namespace cmab::cpu
