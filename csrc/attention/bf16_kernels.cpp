// The kernels of bfloat16 attention, compiled once for each CMAB_ENGINE: dot products of AVX512-BF16, the tiles of AMX,
// and tiles in software. The tiles in software are for tests: they are much slower, and never chosen by default.
#include "attention/amx_engine.h"
#include "attention/amx_tiles_emulated.h"
#include "attention/bf16_backward.h"
#include "attention/bf16_dot_engine.h"
#include "attention/bf16_forward.h"
#include "common/instance.h"

namespace cmab::cpu {
namespace {

constexpr ForwardKernel kForward = Bf16Forward<CMAB_ENGINE>::kernel();
constexpr BackwardKernel kBackward = Bf16Backward<CMAB_ENGINE>::kernel();

}  // namespace

extern const AttentionKernels CMAB_TABLE(attention) = {&kForward, &kBackward};

}  // namespace cmab::cpu
