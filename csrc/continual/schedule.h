// The schedule of continual attention, shared by CPU and GPU: when sums are recomputed, and when a landmark's segment
// ends.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace cmab {

// The columns of a row of sums beside those of the values: phi, the log-scale, the peak of phi, the size of the values,
// and its peak.
constexpr int kExtraSums = 5;

// The most tokens that a state's position may count: sums of positions and lengths then stay within 64 bits.
constexpr int64_t kLastPosition = int64_t(1) << 62;

// After this many tokens a row of sums is recomputed in any case; from cmab_kernels/runtime/constants.py.
constexpr int kSchedule = CMAB_SCHEDULE;

// The largest log-scale at which a subtraction surely removes what was added. Other code may have added the token that
// leaves, and may have rounded its logit to a neighbour of ours. Above this log-scale, such a logit has another weight
// altogether.
template <class T>
constexpr T kLargestSure = sizeof(T) == 4 ? T(0x1p18) : T(0x1p47);

// How far a logit must exceed a row's log-scale to replace it. Each change rounds all sums of the row to one side, but
// not the weight of the token that leaves. If every token of slowly rising logits changed the log-scale, such errors
// would add up.
constexpr int kHeadroom = 1;

// The length of the segment that ends when the stream is `position` tokens long; 0 if none ends there. The first window
// % landmarks segments of a window have one token more.
template <class Int>
static CMAB_HOST_DEVICE Int segment_ending(int64_t position, Int window, Int landmarks) {
  const Int size = window / landmarks, longer = window % landmarks;
  const Int phase = Int((position - 1) % window) + 1;
  const Int end_of_longer = longer * (size + 1);
  if (phase <= end_of_longer) return phase % (size + 1) == 0 ? size + 1 : 0;
  return (phase - end_of_longer) % size == 0 ? size : 0;
}

}  // namespace cmab
