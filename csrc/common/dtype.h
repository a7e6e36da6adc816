// Element types, and conversions between float32 and the two 16-bit types. The conversions work on raw bits and are
// branch-free, so that loops over them vectorise. Everything is static, because files compiled for different
// instruction sets must not share one copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace cmab {

// Element types of tensors; queries, keys and values have one of the first four types.
enum class DType : int { kFloat64, kFloat32, kBFloat16, kFloat16, kBool, kInt32, kInt64 };

static inline int64_t element_bytes(DType dtype) {
  constexpr int64_t kBytes[] = {8, 4, 2, 2, 1, 4, 8};
  return kBytes[int(dtype)];
}

// The type in which elements of `dtype` are accumulated: float64 for float64, else float32. Weights also have this
// type.
static inline DType state_type(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

static inline float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint32_t bits_from_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float widen(BFloat16 x) { return float_from_bits(uint32_t(x.bits) << 16); }

// The multiplication changes the base of the exponent by 112 and also normalises subnormals.
static inline float widen(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return float_from_bits(bits_from_float(float_from_bits(magnitude << 13) * 0x1p112f) | special | sign);
}

static inline float widen(float x) { return x; }
static inline double widen(double x) { return x; }

static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(double x, double* to) { *to = x; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
static inline void narrow(float x, BFloat16* to) {
  const uint32_t bits = bits_from_float(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = uint16_t(x != x ? (bits >> 16) | 0x40u : rounded);
}

static inline void narrow(float x, Float16* to) {
  const uint32_t bits = bits_from_float(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results lose 13 bits, with rounding. For subnormal results, a float addition rounds at the right bit.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t overflow = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to->bits = uint16_t(sign | (magnitude >= 0x477ff000u ? overflow : finite));
}

// Writes x to element `at` of `to`, whose elements have this type; T is float or double, and double for kFloat64.
template <class T>
static inline void narrow_to(DType dtype, T x, void* to, int64_t at) {
  if constexpr (sizeof(T) == 8) {
    if (dtype == DType::kFloat64) return narrow(x, static_cast<double*>(to) + at);
  }
  if (dtype == DType::kFloat32) return narrow(float(x), static_cast<float*>(to) + at);
  if (dtype == DType::kBFloat16) return narrow(float(x), static_cast<BFloat16*>(to) + at);
  narrow(float(x), static_cast<Float16*>(to) + at);
}

}  // namespace cmab
