// The status of a solved system, the same on the CPU and on a GPU.
#pragma once

#include <cstdint>
#include <limits>

namespace cmab {

enum Info : int32_t { kSound = 0, kNotPositiveDefinite = 1, kIllConditioned = 2 };

// A system is ill-conditioned if its condition number (in the 1-norm) times epsilon exceeds this: its solution may have
// no correct digit beyond the second. From cmab_kernels/constants.py.
constexpr double kIllConditionedLimit = CMAB_ILL_CONDITIONED;

// The status of a system; a condition number that overflowed to NaN counts as ill-conditioned.
template <class T>
static inline Info verdict(bool positive_definite, T condition) {
  if (!positive_definite) return kNotPositiveDefinite;
  return condition * std::numeric_limits<T>::epsilon() <= T(kIllConditionedLimit) ? kSound : kIllConditioned;
}

}  // namespace cmab
