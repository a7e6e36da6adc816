// A block of threads. On a GPU it is a real block. Elsewhere, one CPU thread runs all threads of the block in turn, so
// that kernels can be tested without a GPU (cuda_emulated.cpp).
//
// A block's code is a sequence of phases with a barrier between them. PerThread keeps the registers of a thread from
// one phase to the next. A thread's writes to shared or global memory may be read by other threads only in a later
// phase. Control flow outside the phases is uniform: the same for all threads.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

#if defined(__CUDACC__)
#define CMAB_UNROLL _Pragma("unroll")
#define CMAB_UNROLL_BY_2 _Pragma("unroll 2")
#define CMAB_NO_UNROLL _Pragma("unroll 1")
#else
#define CMAB_UNROLL _Pragma("GCC unroll 32")
#define CMAB_UNROLL_BY_2
#define CMAB_NO_UNROLL
#endif

namespace cmab::cuda {

constexpr int kThreads = 256;  // the largest number per block
constexpr int kWarp = 32;

CMAB_HOST_DEVICE int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
CMAB_HOST_DEVICE int least(int64_t a, int64_t b) { return int(a < b ? a : b); }
CMAB_HOST_DEVICE int most(int64_t a, int64_t b) { return int(a > b ? a : b); }

#if defined(__CUDACC__)

template <class T>
struct PerThread {
  T own;
  CMAB_DEVICE T& operator[](int) { return own; }
};

struct Block {
  char* shared;
  int threads;

  template <class Work>
  CMAB_DEVICE void each_thread(Work work) const {
    work(int(threadIdx.x));
    __syncthreads();
  }

  template <class Test>
  CMAB_DEVICE bool any_thread(Test test) const {
    return __syncthreads_or(test(int(threadIdx.x)));
  }
};

#else

template <class T>
struct PerThread {
  T all[kThreads];
  T& operator[](int thread) { return all[thread]; }
};

struct Block {
  char* shared;
  int threads;
  bool backwards;  // runs the threads of a phase in descending order; if the result changes, there is a race

  template <class Work>
  void each_thread(Work work) const {
    for (int i = 0; i < threads; ++i) work(backwards ? threads - 1 - i : i);
  }

  template <class Test>
  bool any_thread(Test test) const {
    bool any = false;
    each_thread([&](int thread) { any |= test(thread); });
    return any;
  }
};

#endif

// Runs a phase that calls `work` for 0, ..., count - 1; neighbouring threads take neighbouring indices.
template <class Work>
CMAB_DEVICE void each_index(const Block& block, int count, Work work) {
  block.each_thread([&](int thread) {
    for (int i = thread; i < count; i += block.threads) work(i);
  });
}

}  // namespace cmab::cuda
