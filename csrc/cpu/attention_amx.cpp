// bfloat16 attention on AMX: products on tiles, everything between them on AVX-512.
#include "amx_engine.h"
#include "bf16_backward.h"
#include "bf16_forward.h"

namespace cmab::cpu {
namespace {

constexpr ForwardKernel kForward = Bf16Forward<TileEngine<HardwareTiles>>::kernel();
constexpr BackwardKernel kBackward = Bf16Backward<TileEngine<HardwareTiles>>::kernel();

}  // namespace

extern const AttentionKernels attention_amx = {&kForward, &kBackward};

}  // namespace cmab::cpu
