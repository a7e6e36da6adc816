// When a step of continual attention does more than add and subtract: the same on the CPU and on a GPU.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace cmab {

// Tokens after which a row of sums is made afresh in any case, as in cmab_kernels/constants.py.
constexpr int kSchedule = CMAB_SCHEDULE;

// The length of the segment that ends with the token that makes the stream `position` tokens long; 0 if none does. The
// first n % m of the m segments of a window have one token more.
template <class Int>
static CMAB_HOST_DEVICE Int segment_ending(int64_t position, Int window, Int landmarks) {
  const Int size = window / landmarks, longer = window % landmarks;
  const Int phase = Int((position - 1) % window) + 1;
  const Int end_of_longer = longer * (size + 1);
  if (phase <= end_of_longer) return phase % (size + 1) == 0 ? size + 1 : 0;
  return (phase - end_of_longer) % size == 0 ? size : 0;
}

}  // namespace cmab
