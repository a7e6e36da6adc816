// Helpers shared by the CPU drivers: workspace memory, partition into pieces, the number of threads, and the treatment
// of tiny numbers.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace cmab::cpu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first row of piece `i` when `count` rows are divided into `pieces`: a multiple of `unit`, or `count` at the end.
inline int64_t piece_start(int64_t count, int64_t pieces, int64_t i, int64_t unit) {
  return std::min(count, ceil_div(count, unit) * i / pieces * unit);
}

// How many of `threads` to use. Starting threads takes microseconds, so there is only one thread below `little`
// multiplications.
inline int useful_threads(double multiplications, int threads, double little = 1 << 18) {
  return multiplications < little ? 1 : std::max(threads, 1);
}

// While an instance lives, its thread flushes results below the smallest normal number to 0. Large logits give many
// such weights, and an x86 processor computes each of them in microcode, which takes a hundred times as long. Operands
// may still be subnormal; they are not flushed. Every thread of a call needs its own instance.
class FlushToZero {
 public:
#if defined(__SSE2__)
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushToZero() { _mm_setcsr(before_); }
  FlushToZero(const FlushToZero&) = delete;

 private:
  const unsigned before_;
#else
  FlushToZero() {}  // other processors compute them as fast as other numbers
#endif
};

// A 64-byte-aligned buffer that only grows. It is not initialised; when it grows, its contents are lost.
class Workspace {
 public:
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    if (!memory_) throw std::bad_alloc();
    bytes_ = bytes;
  }
  char* at(size_t offset) const { return memory_.get() + offset; }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t bytes_ = 0;
};

// Rounds up to a multiple of 64 bytes.
inline size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Requests 2 MiB pages for a large result whose memory was not accessed before; the first access then takes a quarter
// of the time. Does nothing if the system has no such pages.
inline void prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  if (!memory || bytes < int64_t(4 * kPage)) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace cmab::cpu
