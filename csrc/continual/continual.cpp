// The CPU driver of continual steps: divides heads among threads. First it moves the window and landmarks of a head to
// the memory that the step writes, if they are elsewhere.
#include <omp.h>

#include <atomic>
#include <cstring>
#include <limits>

#include "common/instruction_sets.h"
#include "common/plan.h"
#include "continual/call.h"

namespace cmab::cpu {
namespace {

// Copies the rows of `count` tokens from `first` on, of one head, from a ring to a ring.
void move_rows(int64_t first, int64_t count, int64_t bytes, const char* from, int64_t capacity, char* to,
               int64_t to_capacity, int64_t to_first) {
  for (int64_t i = 0; i < count;) {
    const int64_t at = (first + i) % capacity, to_at = (to_first + i) % to_capacity;
    const int64_t rows = std::min({count - i, capacity - at, to_capacity - to_at});
    std::memcpy(to + to_at * bytes, from + at * bytes, rows * bytes);
    i += rows;
  }
}

// Copies the window's rows of one head from a ring of `capacity` rows to one of shape.capacity rows.
void move_rows(const Stream& stream, int64_t head, const void* from, int64_t capacity, void* to, int width) {
  const StreamShape& shape = stream.shape;
  const int64_t first = stream.positions[head] - shape.window, bytes = width * element_bytes(shape.dtype);
  move_rows(first, shape.window, bytes, static_cast<const char*>(from) + head * capacity * bytes, capacity,
            static_cast<char*>(to) + head * shape.capacity * bytes, shape.capacity, first);
}

void move_window(const Stream& stream, const OldRings& old, int64_t head) {
  if (!old.queries) return;
  const StreamShape& shape = stream.shape;
  move_rows(stream, head, old.queries, old.capacity, stream.queries, shape.key_width);
  move_rows(stream, head, old.keys, old.capacity, stream.keys, shape.key_width);
  move_rows(stream, head, old.values, old.capacity, stream.values, shape.value_width);
}

void move_landmarks(const NystromStream& stream, const OldLandmarks& old, int64_t head) {
  if (!old.queries) return;
  const int64_t element = element_bytes(state_type(stream.shape.dtype));
  const auto move = [&](const void* from, void* to, int64_t elements) {
    const int64_t bytes = elements * element;
    std::memcpy(static_cast<char*>(to) + head * bytes, static_cast<const char*>(from) + head * bytes, bytes);
  };
  move(old.queries, stream.landmark_queries, stream.landmarks * stream.shape.key_width);
  move(old.keys, stream.landmark_keys, stream.landmarks * stream.shape.key_width);
  move(old.inverse, stream.inverse, stream.landmarks * stream.landmarks);
}

// Leaves the state of a head unchanged, and copies its `rows` rows of sums to the memory of the new sums.
void keep(const Stream& stream, int64_t head, int64_t rows) {
  const StreamShape& shape = stream.shape;
  const int64_t bytes = rows * (shape.value_width + kExtraSums) * element_bytes(state_type(shape.dtype));
  if (bytes)
    std::memcpy(static_cast<char*>(stream.new_sums) + head * bytes,
                static_cast<const char*>(stream.sums) + head * bytes, bytes);
  const int64_t elements = (shape.retroactive ? shape.window : shape.tokens) * shape.value_width;
  for (int64_t i = 0; i < elements; ++i)
    narrow_to(shape.dtype, std::numeric_limits<double>::quiet_NaN(), stream.out, head * elements + i);
}

// Calls step(head, scratch) for every head. Small scratch is on the stack, because an allocation would take too long.
template <class Step>
void for_each_head(int64_t heads, size_t scratch_bytes, int threads, const Step& step) {
  constexpr size_t kOnStack = 64 << 10;
  const size_t bytes = align(scratch_bytes);
  const int team = int(std::min<int64_t>(threads, heads));
  if (team <= 1 && bytes <= kOnStack) {
    alignas(64) char scratch[kOnStack];
    const FlushToZero flush;
    for (int64_t head = 0; head < heads; ++head) step(head, scratch);
    return;
  }
  Workspace workspace;
  workspace.reserve(std::max(team, 1) * bytes);
#pragma omp parallel for num_threads(team) if (team > 1)
  for (int64_t head = 0; head < heads; ++head) {
    const FlushToZero flush;
    step(head, workspace.at(omp_get_thread_num() * bytes));
  }
}

}  // namespace

const ContinualKernel& continual_kernel(DType dtype) {
  const int table = dtype == DType::kFloat64 ? 0 : 1;
#if defined(__x86_64__)
  return widest(continual_portable[table], continual_avx2[table], continual_avx512[table]);
#else
  return continual_portable[table];
#endif
}

bool replaces_landmark(const NystromStream& stream) {
  if (stream.fixed) return false;
  const StreamShape& shape = stream.shape;
  const auto replaces = [&](int64_t position) {
    for (int64_t i = 1; i <= shape.tokens; ++i)
      if (segment_ending(position + i, shape.window, stream.landmarks)) return true;
    return false;
  };
  for (int64_t head = 0; head < shape.batch * shape.heads; ++head)  // usually all heads have the same position
    if ((stream.absent || head == 0 || stream.positions[head] != stream.positions[head - 1]) &&
        stream.has_tokens(head) && replaces(stream.positions[head]))
      return true;
  return false;
}

double multiplications(const NystromStream& stream) {
  const StreamShape& shape = stream.shape;
  const double widths = shape.key_width + shape.value_width, m = stream.landmarks;
  const double each = m * (2 * widths + m),
               replaced = stream.fixed ? 0 : m / shape.window * 4 * stream.iterations * m * m * m;
  return double(shape.batch) * shape.heads *
         (shape.tokens * (each + replaced) + (shape.retroactive ? shape.window * m * widths : 0));
}

double multiplications(const AttentionStream& stream) {
  const StreamShape& shape = stream.shape;
  const double widths = shape.key_width + shape.value_width, rows = stream.shape.window;
  const double first = shape.retroactive && !stream.sums ? rows * rows * widths : 0;
  return double(shape.batch) * shape.heads * (shape.tokens * rows * (shape.retroactive ? 3 : 1) * widths + first);
}

bool finite(const ContinualKernel& kernel, const Stream& stream, int threads) {
  std::atomic<bool> all{true};
  for_each_head(stream.shape.batch * stream.shape.heads, 0, threads, [&](int64_t head, char*) {
    if (stream.has_tokens(head) && !kernel.finite(stream, head)) all.store(false, std::memory_order_relaxed);
  });
  return all;
}

void continual_nystrom(const ContinualKernel& kernel, const NystromStream& stream, const OldRings& rings,
                       const OldLandmarks& landmarks, int threads) {
  for_each_head(stream.shape.batch * stream.shape.heads, kernel.nystrom_bytes(stream), threads,
                [&](int64_t head, char* scratch) {
                  move_window(stream, rings, head);
                  move_landmarks(stream, landmarks, head);
                  if (stream.has_tokens(head))
                    kernel.nystrom(stream, head, scratch);
                  else
                    keep(stream, head, stream.landmarks);
                });
}

void continual_attention(const ContinualKernel& kernel, const AttentionStream& stream, const OldRings& rings,
                         int threads) {
  for_each_head(stream.shape.batch * stream.shape.heads, kernel.attention_bytes(stream), threads,
                [&](int64_t head, char* scratch) {
                  move_window(stream, rings, head);
                  if (stream.has_tokens(head))
                    kernel.attention(stream, head, scratch);
                  else
                    keep(stream, head, stream.shape.retroactive ? stream.shape.window : 0);
                });
}

bool recomputes(const Stream& stream, int64_t count) {
  const StreamShape& shape = stream.shape;
  const int64_t rows = shape.batch * shape.heads * shape.tokens * count;
  const int64_t columns = history_columns(shape.retroactive, shape.value_width);
  const auto any = [&](const auto* history) {
    for (int64_t row = 1; row <= rows; ++row)
      if (history[row * columns - 1] != 0) return true;
    return false;
  };
  return state_type(shape.dtype) == DType::kFloat64 ? any(static_cast<const double*>(stream.history))
                                                    : any(static_cast<const float*>(stream.history));
}

void record_tokens(const Stream& stream, const void* ring, int width, int64_t rows, void* to) {
  const StreamShape& shape = stream.shape;
  const int64_t bytes = width * element_bytes(shape.dtype), before = rows - shape.tokens;
  for (int64_t head = 0; head < shape.batch * shape.heads; ++head) {
    const int64_t position = stream.positions[head];
    const char* from = static_cast<const char*>(ring) + head * shape.capacity * bytes;
    char* out = static_cast<char*>(to) + head * rows * bytes;
    move_rows(position - shape.window, before, bytes, from, shape.capacity, out, rows, 0);
    move_rows(position, shape.tokens, bytes, from, shape.capacity, out, rows, before);
  }
}

void continual_nystrom_backward(const NystromGradient& step, int threads) {
  const ContinualKernel& kernel = continual_kernel(step.dtype);
  for_each_head(step.batch * step.heads, kernel.nystrom_backward_bytes(step), threads,
                [&](int64_t head, char* scratch) { kernel.nystrom_backward(step, head, scratch); });
}

void continual_attention_backward(const AttentionGradient& step, int threads) {
  const ContinualKernel& kernel = continual_kernel(step.dtype);
  for_each_head(step.batch * step.heads, kernel.attention_backward_bytes(step), threads,
                [&](int64_t head, char* scratch) { kernel.attention_backward(step, head, scratch); });
}

}  // namespace cmab::cpu
