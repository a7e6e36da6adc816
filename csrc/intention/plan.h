// Helpers shared by the drivers of regularised least squares.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "common/instruction_sets.h"
#include "common/plan.h"
#include "intention/call.h"

namespace cmab::cpu {

inline const GramKernels& gram_kernels(bool in_double) {
  const int table = in_double ? 0 : 1;
#if defined(__x86_64__)
  return widest(gram_portable[table], gram_avx2[table], gram_avx512[table]);
#else
  return gram_portable[table];
#endif
}

inline Matrix rows_of(DType dtype, const Operand& x, int64_t b, int64_t h, int64_t row) {
  const int64_t offset = b * x.stride[0] + h * x.stride[1] + row * x.stride[2];
  return {static_cast<const char*>(x.data) + offset * element_bytes(dtype), x.stride[2], x.stride[3]};
}

inline GramKeys keys_of(const GramInputs& in, int64_t b, int64_t h, int64_t first, int64_t count) {
  const DType dtype = in.shape.dtype;
  GramKeys keys{};
  keys.key = rows_of(dtype, in.key, b, h, first);
  keys.value = rows_of(dtype, in.value, b, h, first);
  keys.weight = in.weight.data ? rows_of(state_type(dtype), in.weight, b, h, first).data : nullptr;
  keys.weight_stride = in.weight.stride[2];
  keys.ignored = in.ignored ? in.ignored + b * in.ignored_stride[0] + first * in.ignored_stride[1] : nullptr;
  keys.ignored_stride = in.ignored_stride[1];
  keys.count = count;
  return keys;
}

// Whether heads are interleaved in memory, as in (B, N, H, D).
inline bool interleaved(const Operand& x) { return std::abs(x.stride[1]) < std::abs(x.stride[2]); }

// The number of interleaved heads that take turns: heads that share memory pages, but so few that each thread has some
// tasks. `tasks` is the number of tasks if no heads take turns.
inline int64_t heads_together(int64_t row_bytes, int64_t heads, int64_t tasks, int threads) {
  constexpr int64_t kPage = 4096;
  return std::clamp<int64_t>(std::min(kPage / row_bytes, tasks / (4 * threads)), 1, std::max<int64_t>(heads, 1));
}

constexpr double kLittleGram = 1 << 20;  // with fewer multiplications, a second thread is not worthwhile

}  // namespace cmab::cpu
