// Function attributes: device code under nvcc, plain inline functions under any other compiler.
#pragma once

#if defined(__CUDACC__)
#define CMAB_DEVICE __device__ __forceinline__
#define CMAB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CMAB_DEVICE inline
#define CMAB_HOST_DEVICE inline
#endif
