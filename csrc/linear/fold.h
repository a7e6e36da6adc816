// A norm that is folded into the linear layer after it: with x^ the normed row,
//
//   (x^ * scale + shift) W' = x^ (W * scale)' + W shift
//
// and the gradients of W, scale and shift. Internal linkage, as in simd.h.
#pragma once

#include "linear/tiles.h"

namespace cmab::cpu {
namespace {

template <class T>
struct Folding {
  static void fold(DType dtype, const Matrix& weight, int rows, int width, const void* scale, const void* shift,
                   void* folded, void* bias) {
    const T *by = static_cast<const T*>(scale), *plus = static_cast<const T*>(shift);
    with_elements<T>(dtype, weight, [&](const auto* from) {
      for (int row = 0; row < rows; ++row) {
        T* to = static_cast<T*>(folded) + ptrdiff_t(row) * width;
        T sum = 0;
        for (int c = 0; c < width; ++c) {
          const T each = widen(from[row * weight.row_stride + c * weight.col_stride]);
          to[c] = each * by[c];
          sum += each * plus[c];
        }
        static_cast<T*>(bias)[row] = sum;
      }
    });
  }

  static void unfold(DType dtype, const Matrix& weight, int rows, int width, const void* scale, const void* shift,
                     const void* dfolded, const void* dbias, void* dweight, void* dscale, void* dshift) {
    const T *by = static_cast<const T*>(scale), *plus = static_cast<const T*>(shift);
    T *of_scale = static_cast<T*>(dscale), *of_shift = static_cast<T*>(dshift);
    with_elements<T>(dtype, weight, [&](const auto* from) {
      for (int row = 0; row < rows; ++row) {
        const T* d = static_cast<const T*>(dfolded) + ptrdiff_t(row) * width;
        const T of_bias = static_cast<const T*>(dbias)[row];
        for (int c = 0; c < width; ++c) {
          const T each = widen(from[row * weight.row_stride + c * weight.col_stride]);
          of_scale[c] += d[c] * each;
          of_shift[c] += of_bias * each;
        }
      }
    });
    if (dweight)
      with_pointer<T>(dtype, dweight, [&](auto* to) {
        for (int row = 0; row < rows; ++row) {
          const T* d = static_cast<const T*>(dfolded) + ptrdiff_t(row) * width;
          const T of_bias = static_cast<const T*>(dbias)[row];
          for (int c = 0; c < width; ++c) narrow(d[c] * by[c] + of_bias * plus[c], to + ptrdiff_t(row) * width + c);
        }
      });
  }
};

}  // namespace
}  // namespace cmab::cpu
