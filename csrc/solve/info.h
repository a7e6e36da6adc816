// The status of a solved system, the same on the CPU and on a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host_device.h"

namespace cmab {

// From cmab_kernels/runtime/constants.py.
enum Info : int32_t {
  kSound = CMAB_INFO_SOUND,
  kNotPositiveDefinite = CMAB_INFO_NOT_POSITIVE_DEFINITE,
  kIllConditioned = CMAB_INFO_ILL_CONDITIONED
};

// A system is ill-conditioned if its condition number (in the 1-norm) times epsilon exceeds this limit: possibly only
// the first two digits of its solution are correct. From cmab_kernels/runtime/constants.py.
constexpr double kIllConditionedLimit = CMAB_ILL_CONDITIONED;

// Returns a penalty unchanged, or NaN for a negative penalty; with NaN, no system counts as positive definite.
template <class T>
static CMAB_HOST_DEVICE T allowed(T alpha) {
  return alpha >= 0 ? alpha : T(NAN);
}

// The status of a system. A condition number that overflowed to NaN counts as ill-conditioned.
template <class T>
static inline Info verdict(bool positive_definite, T condition) {
  if (!positive_definite) return kNotPositiveDefinite;
  return condition * std::numeric_limits<T>::epsilon() <= T(kIllConditionedLimit) ? kSound : kIllConditioned;
}

}  // namespace cmab
