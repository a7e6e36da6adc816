// A step of exact continual attention on a GPU, for one head, by one block.
#pragma once

#include "common/stream.h"
#include "continual/sliding_rows.cuh"

namespace cmab::cuda {

// Single outputs: for each new token, its row of softmax(scale q K') V over the window that ends with it.
template <class T>
CMAB_DEVICE void step_newest(const Block& block, const StepCall& call, int64_t head, Window<T>& window) {
  WindowSums<T> sums(block, call, window);
  T* out = static_cast<T*>(call.out) + head * call.tokens * call.value_width;
  for (int t = 0; t < call.tokens; ++t) {
    window.admit(t);
    sums.sum(window.query(call.window - 1));
    each_index(block, call.value_width,
               [&](int e) { round_to(sums.total(e) / sums.phi(), out + int64_t(t) * call.value_width + e); });
  }
}

// Retroactive output: the rows of all queries of the window, after the last new token.
template <class T>
CMAB_DEVICE void step_all(const Block& block, const StepCall& call, int64_t head, Window<T>& window) {
  SlidingRows<T> rows(block, call, window, head, call.window);
  for (int t = 0; t < call.tokens; ++t) {
    const bool spoilt = window.admit(t), known = t > 0 || call.sums_known;
    rows.slide(
        known ? 1 : call.window, [&](int i) { return window.query(i); },
        [&](int i) { return spoilt || (call.window - i) % kSchedule == 0; });
  }
  T* out = static_cast<T*>(call.out) + head * call.window * call.value_width;
  block.each_thread([&](int thread) {
    for (int i = thread / kWarp; i < call.window; i += block.threads / kWarp)
      for (int e = thread % kWarp; e < call.value_width; e += kWarp)
        round_to(rows.row(i)[e] / rows.phi(i), out + int64_t(i) * call.value_width + e);
  });
}

template <class T>
CMAB_DEVICE void step_head(const Block& block, const StepCall& call, int64_t head) {
  Window<T> window(block, call, head);
  window.move();
  if (call.retroactive)
    step_all(block, call, head, window);
  else
    step_newest(block, call, head, window);
  window.put_position();
}

// Launches the step asynchronously; allocates nothing.
void attention_step(const StepCall& call, Stream on);

}  // namespace cmab::cuda
