// A stand-in for libcuda.so.1: Triton's launcher links against it as against NVIDIA's driver library, and launches
// kernels that do not run. A callback may run them instead. Device pointers are pointers of the host. The number of a
// device ends in its compute capability, 080 or 120.
#include <stdlib.h>
#include <string.h>
#include "cuda.h"

struct CUmod_st {
  const void* image;
};

struct CUfunc_st {
  CUmodule module;
};

typedef void (*Callback)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
                         unsigned shared, void** parameters);

static Callback callback;
static long launches;
static CUcontext current = (CUcontext)1;

void stub_call(Callback on_launch) { callback = on_launch; }
long stub_launches(void) { return launches; }

static int shared_memory(CUdevice device) {  // bytes that a block may have
  switch (device % 1000) {
    case 80:
    case 87:
      return 163 << 10;
    case 90:
    case 100:
    case 103:
      return 227 << 10;
    default:
      return 99 << 10;
  }
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = "an error of the stub of the driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = device % 1000 / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = device % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = shared_memory(device);
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = shared_memory(device) + 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      *value = 1 << 16;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 108;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = malloc(sizeof **module);
  (*module)->image = image;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = malloc(sizeof **function);
  (*function)->module = module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(value, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction function, const CUlaunchConfig* config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  ++launches;
  if (callback)
    callback(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes,
             parameters);
  return CUDA_SUCCESS;
}
