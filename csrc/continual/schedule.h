// The schedule of continual attention, shared by CPU and GPU: when sums are recomputed, and when a landmark's segment
// ends.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace cmab {

// The columns of a row of sums beside those of the values: phi, the log-scale, the peak of phi, the size of the values,
// and its peak.
constexpr int kExtraSums = 5;

// The largest position that a state may have; sums of positions and lengths then fit in 64 bits.
constexpr int64_t kLastPosition = int64_t(1) << 62;

// After this many tokens a row of sums is recomputed in any case; from cmab_kernels/runtime/constants.py.
constexpr int kSchedule = CMAB_SCHEDULE;

// The largest log-scale at which a subtraction reliably removes what was added. The token that leaves may have been
// added by other code, which may have rounded its logit to a neighbouring number. Above this log-scale, the weight of
// such a logit is completely different.
template <class T>
constexpr T kLargestSure = sizeof(T) == 4 ? T(0x1p18) : T(0x1p47);

// The amount by which a logit must exceed the log-scale of a row to replace it. Each change rounds all sums of the row
// to one side, but not the weight of the token that leaves. If slowly rising logits changed the log-scale at every
// token, such errors would add up.
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
