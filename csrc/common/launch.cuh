// Kernel launches; a CUDA error becomes an exception that says what failed.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/stream.h"

namespace cmab::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

constexpr int kDefaultShared = 48 << 10;  // larger shared memory must be requested

// Launches `kernel` asynchronously. The caller has made the device of the tensors the current device
// (cmab_kernels/runtime/cuda_launch.py). This function makes no change that remains after the call.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, Stream on,
            const Arguments&... arguments) {
  int current = -1;
  check(cudaGetDevice(&current), "the current device");
  if (current != on.device) throw std::runtime_error("the device of the tensors is not the current one");
  if (shared_bytes > kDefaultShared)  // the maximum, because another thread may need more than this call
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory(on.device)),
          "shared memory of a kernel");
  kernel<<<unsigned(blocks), threads, shared_bytes, reinterpret_cast<cudaStream_t>(on.stream)>>>(arguments...);
  check(cudaGetLastError(), "launch of a kernel");
}

}  // namespace cmab::cuda
