// The table of continual kernels for the instruction set that this file is compiled for.
#include "common/instance.h"
#include "continual/backward_kernel.h"
#include "continual/kernel.h"

namespace cmab::cpu {
namespace {

template <class T>
constexpr ContinualKernel kContinualKernel = {
    finite_tokens,           NystromHead<T>::bytes,       NystromHead<T>::run,
    AttentionHead<T>::bytes, AttentionHead<T>::run,       NystromBackward<T>::bytes,
    NystromBackward<T>::run, AttentionBackward<T>::bytes, AttentionBackward<T>::run};

}  // namespace

extern const ContinualKernel CMAB_TABLE(continual)[2] = {kContinualKernel<double>, kContinualKernel<float>};

}  // namespace cmab::cpu
