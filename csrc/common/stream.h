// The device and stream on which a GPU call runs.
#pragma once

#include <cstdint>

namespace cmab::cuda {

// A device index and one of its streams (a cudaStream_t as an integer).
struct Stream {
  int device;
  uintptr_t stream;
};

// The largest number of bytes of shared memory that a block may have on this GPU.
int shared_memory(int device);

}  // namespace cmab::cuda
