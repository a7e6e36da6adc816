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

// Launches `kernel` asynchronously; it may use more shared memory than the default 48 KiB.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, Stream on,
            const Arguments&... arguments) {
  check(cudaSetDevice(on.device), "choice of the device");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "shared memory of a kernel");
  kernel<<<unsigned(blocks), threads, shared_bytes, reinterpret_cast<cudaStream_t>(on.stream)>>>(arguments...);
  check(cudaGetLastError(), "launch of a kernel");
}

}  // namespace cmab::cuda
