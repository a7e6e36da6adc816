// The table of kernels of linear layers for the instruction set for which this file is compiled.
#include "common/instance.h"
#include "linear/activation.h"
#include "linear/fold.h"
#include "linear/norm.h"
#include "linear/products.h"

namespace cmab::cpu {
namespace {

template <class T>
constexpr LinearKernels table() {
  return {Tiles<T>::stride,   Tiles<T>::bytes,          Products<T>::packed_bytes, Normaliser<T>::stats_bytes,
          Products<T>::pack,  Tiles<T>::load,           Tiles<T>::load_heads,      Tiles<T>::store_heads,
          Tiles<T>::store,    Products<T>::multiply,    Products<T>::add_products, Tiles<T>::add_rows,
          Tiles<T>::add_tile, Normaliser<T>::normalise, Normaliser<T>::backward,   Folding<T>::fold,
          Folding<T>::unfold, Activations<T>::activate, Activations<T>::backward,  Tiles<T>::sum_parts};
}

}  // namespace

extern const LinearKernels CMAB_TABLE(linear)[2] = {table<double>(), table<float>()};

}  // namespace cmab::cpu
