// The kernels of attention_amx.cpp on tiles in software, for tests: far slower than any other, never chosen by itself.
#include "amx_engine.h"
#include "amx_tiles_emulated.h"
#include "bf16_backward.h"
#include "bf16_forward.h"

namespace cmab::cpu {
namespace {

constexpr ForwardKernel kForward = Bf16Forward<TileEngine<EmulatedTiles>>::kernel();
constexpr BackwardKernel kBackward = Bf16Backward<TileEngine<EmulatedTiles>>::kernel();

}  // namespace

extern const AttentionKernels attention_amx_emulated = {&kForward, &kBackward};

}  // namespace cmab::cpu
