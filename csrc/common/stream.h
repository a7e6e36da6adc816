// Where a call to a GPU runs.
#pragma once

#include <cstdint>

namespace cmab::cuda {

// A device, and one of its streams (a cudaStream_t).
struct Stream {
  int device;
  uintptr_t stream;
};

// How many bytes of shared memory a block may have on this GPU.
int shared_memory(int device);

}  // namespace cmab::cuda
