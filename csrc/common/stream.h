// The device and stream that a GPU call runs on.
#pragma once

#include <cstdint>

namespace cmab::cuda {

// A device index and one of its streams (a cudaStream_t as an integer).
struct Stream {
  int device;
  uintptr_t stream;
};

// The most bytes of shared memory that a block may have on this GPU.
int shared_memory(int device);

}  // namespace cmab::cuda
