// The table of prefix kernels for the instruction set for which this file is compiled.
#include "common/instance.h"
#include "prefix/backward_kernel.h"
#include "prefix/forward_kernel.h"

namespace cmab::cpu {
namespace {

template <class T>
constexpr PrefixKernels kernels = {PrefixForwardKernel<T>::kRows, PrefixForwardKernel<T>::bytes,
                                   PrefixForwardKernel<T>::run, PrefixBackwardKernel<T>::bytes,
                                   PrefixBackwardKernel<T>::run};

}  // namespace

extern const PrefixKernels CMAB_TABLE(prefix)[2] = {kernels<double>, kernels<float>};

}  // namespace cmab::cpu
