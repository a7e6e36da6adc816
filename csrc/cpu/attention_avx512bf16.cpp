// bfloat16 attention on AVX512-BF16.
#include "bf16_backward.h"
#include "bf16_dot_engine.h"
#include "bf16_forward.h"

namespace cmab::cpu {
namespace {

constexpr ForwardKernel kForward = Bf16Forward<DotEngine>::kernel();
constexpr BackwardKernel kBackward = Bf16Backward<DotEngine>::kernel();

}  // namespace

extern const AttentionKernels attention_avx512bf16 = {&kForward, &kBackward};

}  // namespace cmab::cpu
