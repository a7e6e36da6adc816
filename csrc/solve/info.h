// What a system turned out to be, the same on the CPU and on a GPU.
#pragma once

#include <cstdint>
#include <limits>

namespace cmab {

enum Info : int32_t { kSound = 0, kNotPositiveDefinite = 1, kIllConditioned = 2 };

// A system whose condition number (in the 1-norm) times epsilon is above this is ill-conditioned: its solution may have
// no correct digit beyond the second. As in cmab_kernels/constants.py.
constexpr double kIllConditionedLimit = CMAB_ILL_CONDITIONED;

// A condition that overflowed to a NaN is a bad one too.
template <class T>
static inline Info verdict(bool positive_definite, T condition) {
  if (!positive_definite) return kNotPositiveDefinite;
  return condition * std::numeric_limits<T>::epsilon() <= T(kIllConditionedLimit) ? kSound : kIllConditioned;
}

}  // namespace cmab
