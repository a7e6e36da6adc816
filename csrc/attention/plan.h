// How the forward and backward drivers divide the work. The cuts that determine the order of additions depend only on
// the numbers of keys and queries of one head. A result therefore has the same bits for any number of threads, and for
// a batch element alone or within a batch. The assignment to threads is free.
#pragma once

#include <vector>

#include "attention/call.h"
#include "common/plan.h"

namespace cmab::cpu {

// The keys of one batch element: `count` keys from `first` on, in batch element `batch` of key and value.
struct KeySet {
  int64_t batch, first, count;
};

inline KeySet key_set(const Inputs& in, int64_t b) {
  if (!in.cu_seqlens) return {b, 0, in.keys};
  const auto offset = [&](int64_t i) {
    const int64_t at = in.cu_seqlens_wide ? static_cast<const int64_t*>(in.cu_seqlens)[i]
                                          : static_cast<const int32_t*>(in.cu_seqlens)[i];
    return std::clamp<int64_t>(at, 0, in.keys);
  };
  const int64_t first = offset(b);
  return {0, first, std::max<int64_t>(offset(b + 1) - first, 0)};
}

inline Matrix rows_of(const Inputs& in, const Operand& operand, int64_t b, int64_t h, int64_t row) {
  const int64_t offset = b * operand.stride[0] + h * operand.stride[1] + row * operand.stride[2];
  return {static_cast<const char*>(operand.data) + offset * element_bytes(in.shape.dtype), operand.stride[2],
          operand.stride[3]};
}

// The sum of a[e a_step] b[e], in double. Four partial sums hide the latency of additions.
template <class T>
inline double dot(const T* a, int64_t a_step, const T* b, int width) {
  double parts[4] = {};
  int e = 0;
  for (; e + 4 <= width; e += 4)
    for (int i = 0; i < 4; ++i) parts[i] += double(a[(e + i) * a_step]) * b[e + i];
  for (int i = 0; e < width; ++e, ++i) parts[i] += double(a[e * a_step]) * b[e];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

inline const void* bias_from(const Inputs& in, int64_t b, int64_t h, int64_t row) {
  if (!in.key_bias.data) return nullptr;
  if (in.shape.dtype == DType::kFloat64) return in.key_bias.at<double>(b, h, row);
  return in.key_bias.at<float>(b, h, row);
}

inline Keys keys_of(const Inputs& in, const KeySet& set, int64_t h, int64_t first, int64_t count) {
  const int64_t row = set.first + first;
  const uint8_t* ignored =
      in.ignored ? in.ignored + set.batch * in.ignored_stride[0] + row * in.ignored_stride[1] : nullptr;
  return {rows_of(in, in.key, set.batch, h, row),
          rows_of(in, in.value, set.batch, h, row),
          ignored,
          in.ignored_stride[1],
          count,
          bias_from(in, set.batch, h, row),
          in.key_bias.stride[2]};
}

// The number of heads that one task processes together, one chunk of keys after the other, because heads that are
// interleaved in memory share cache lines. Every thread keeps at least a few tasks.
inline int64_t heads_together(const Inputs& in, int64_t tasks_per_head) {
  const auto interleaved = [](const Operand& x) { return std::abs(x.stride[1]) < std::abs(x.stride[2]); };
  if (!interleaved(in.key) && !interleaved(in.value)) return 1;
  constexpr int64_t kRowBytes = 512;
  const int64_t width = std::max(in.shape.key_width, in.shape.value_width) * element_bytes(in.shape.dtype);
  const int64_t spare = in.batch * in.heads * tasks_per_head / (4 * in.threads);
  return std::clamp<int64_t>(std::min(kRowBytes / width, spare), 1, in.heads);
}

// The number of keys of a chunk, a multiple of kKeyTile, if heads take turns. A chunk and its values stay in the L2
// cache during these turns.
inline int64_t chunk_keys(const Inputs& in, int64_t heads) {
  constexpr int64_t kBytes = 512 << 10;
  const int64_t row = heads * (in.shape.key_width + in.shape.value_width) * element_bytes(in.shape.dtype);
  return std::clamp<int64_t>(kBytes / row / kKeyTile, 1, 16) * kKeyTile;
}

inline int useful_threads(const Inputs& in) {
  const double keys = double(in.batch) * in.heads * in.queries * in.keys;
  return useful_threads(keys * (in.shape.key_width + in.shape.value_width), in.threads);
}

// Heads are processed in groups, called waves, which limits the workspace.
constexpr size_t kWaveBytes = 768 << 10;
constexpr size_t kWaveHeads = 1024;

}  // namespace cmab::cpu
