// The arguments of a continual step's launch on a GPU, and the layout of its shared memory; a block handles one head.
#pragma once

#include "common/elements.cuh"
#include "continual/schedule.h"

namespace cmab::cuda {

constexpr int kParts = 8;                // partial sums of a dot product, a thread each
constexpr int kTilePairs = kThreads;     // dot products of a phase
constexpr int kTileRows = kThreads / 2;  // rows of sums at a time: each has a product with either token
constexpr int kMaxima = 16;
constexpr int kMaxLandmarks = 64;
constexpr int kMaxValueWidth = 512;  // E

// An array before and after the step: the same memory if the step works in place.
template <class T>
struct Renewed {
  const T* from;
  T* to;
};

// The same for all heads, which are stored one after the other.
struct Renewal {
  const void* from;
  void* to;

  template <class T>
  CMAB_DEVICE Renewed<T> of_head(int64_t head, int64_t size) const {
    return {static_cast<const T*>(from) + head * size, static_cast<T*>(to) + head * size};
  }
};

// The arguments that both kinds of step share.
struct StepCall {
  DType dtype;
  int64_t batch, heads;
  int tokens, window, key_width, value_width;
  bool retroactive;
  double scale;
  Operand query, key, value;       // (B, H, t, width)
  int capacity_from, capacity_to;  // of the rings, > window
  // Contiguous:
  Renewal queries, keys, values;  // (B, H, capacity, width)
  Renewal sums;                   // (B, H, rows, E + 5)
  Renewal position;               // (B, H) int64
  void* out;                      // (B, H, t or n, E)
  bool sums_known;                // false in exact attention until the first retroactive step
};

struct NystromStepCall : StepCall {
  int landmarks, iterations;
  bool fixed;
  Renewal landmark_queries, landmark_keys;  // (B, H, m, D)
  Renewal inverse;                          // (B, H, m, m)
};

// Offsets of the arrays in a block's shared memory, in elements of the accumulator type.
struct Layout {
  static constexpr int parts = 0;
  static constexpr int weights = parts + kTilePairs * kParts;
  static constexpr int maxima = weights + kTilePairs;
  static constexpr int changes = maxima + kMaxima;
  static constexpr int stale = changes + 3 * kTileRows;
  static constexpr int affinity = stale + kTileRows;
  static constexpr int mixture = affinity + kTilePairs;
  static constexpr int sums = mixture + kTilePairs;
  // Three arrays reuse memory that is free at the time: the parts of logits that have been read; the maxima before a
  // row is recomputed; and the memory of outputs and recomputed rows while rows slide.
  static constexpr int sizes_of_window = parts, sizes_of_tokens = maxima, extras = affinity;
  static_assert(2 * kParts <= kMaxima && kExtraSums * kTileRows <= 2 * kTilePairs + kThreads, "they fit");
  int matrices, elements;

  CMAB_HOST_DEVICE Layout(int value_width, int landmarks)
      : matrices(sums + most(kThreads, value_width + 2)), elements(matrices + (4 * landmarks + 2) * landmarks) {}
};

template <class T>
CMAB_HOST_DEVICE int step_shared_bytes(int value_width, int landmarks) {
  return Layout(value_width, landmarks).elements * int(sizeof(Sum<T>));
}

// Stores x rounded to the output's type.
CMAB_DEVICE void round_to(double x, double* to) { *to = x; }
CMAB_DEVICE void round_to(float x, float* to) { *to = x; }
#if defined(__CUDACC__)
CMAB_DEVICE void round_to(float x, BFloat16* to) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }
CMAB_DEVICE void round_to(float x, Float16* to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }
#else
inline void round_to(float x, BFloat16* to) { narrow(x, to); }
inline void round_to(float x, Float16* to) { narrow(x, to); }
#endif

template <class S>
struct Largest;
template <>
struct Largest<float> {
  static constexpr float value = 0x1.fffffep127f;
};
template <>
struct Largest<double> {
  static constexpr double value = 0x1.fffffffffffffp1023;
};

// Clamps x to the finite range, because the difference of two infinities is NaN. Keeps a NaN.
template <class S>
CMAB_DEVICE S clamped(S x) {
  return x > Largest<S>::value ? Largest<S>::value : x < -Largest<S>::value ? -Largest<S>::value : x;
}

}  // namespace cmab::cuda
