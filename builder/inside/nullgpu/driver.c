/* libcuda.so.1 of the null GPU: devices, contexts, modules, launches, memory, streams and events of the CUDA driver
 * API. Every other cu* function is generated (build.py): no-ops named in allowed.toml succeed, the rest refuse. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cuda.h renames some functions to their versioned symbol; the plain names are symbols too, so they are written out
 * here. */
#undef cuGetProcAddress
#undef cuStreamGetCaptureInfo
#undef cuEventElapsedTime

/* ---- contexts: one primary context a device; its address is its handle ---- */
static char contexts[NG_MAX_DEVICES];
static char active[NG_MAX_DEVICES];
static __thread int current = -1; /* device of this thread's context, -1 before anything made one current */

int ng_valid_device(int device)
{
  return device >= 0 && device < ng_card()->count;
}

int ng_device(void)
{
  return current < 0 ? 0 : current;
}

int ng_set_device(int device)
{
  if (!ng_valid_device(device))
    return NG_INVALID_DEVICE;
  current = device;
  active[device] = 1;
  return NG_OK;
}

int ng_peer_access(int device, int peer)
{
  return device != peer && ng_valid_device(device) && ng_valid_device(peer);
}

void ng_uuid(void *uuid, int device)
{
  memset(uuid, 0x4e, 16); /* "NNNN...": recognisable */
  ((char *)uuid)[15] = (char)device;
}

static int device_of(CUcontext context)
{
  long device = (char *)context - contexts;
  return device >= 0 && device < NG_MAX_DEVICES ? (int)device : -1;
}

static CUresult make_current(CUcontext context)
{
  if (!context) {
    current = -1;
    return CUDA_SUCCESS;
  }
  return device_of(context) < 0 ? NG_INVALID_CONTEXT : (CUresult)ng_set_device(device_of(context));
}

CUresult cuInit(unsigned flags)
{
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
  *version = ng_card()->driver;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
  *count = ng_card()->count;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
  if (!ng_valid_device(ordinal))
    return NG_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
  if (!ng_valid_device(device))
    return NG_INVALID_DEVICE;
  snprintf(name, (size_t)size, "%s", ng_card()->name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
  ng_uuid(uuid, device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
  *bytes = ng_card()->memory;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
  if (!ng_valid_device(device))
    return NG_INVALID_DEVICE;
  if (!ng_has_attribute(attribute))
    return NG_INVALID_VALUE; /* as a driver older than the attribute answers */
  *value = ng_attribute(attribute);
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
  *major = ng_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  *minor = ng_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
  snprintf(text, (size_t)size, "0000:%02X:00.0", device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
  *can = ng_peer_access(device, peer);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
  if (!ng_valid_device(device))
    return NG_INVALID_DEVICE;
  active[device] = 1;
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active)
{
  if (!ng_valid_device(device))
    return NG_INVALID_DEVICE;
  if (flags)
    *flags = 0;
  if (is_active)
    *is_active = active[device];
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
  *context = current < 0 ? NULL : (CUcontext)&contexts[current];
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
  return make_current(context);
}

/* A stack of one: what is pushed stays current until the pop, which makes the one before current again. */
static __thread int below[64];
static __thread int depth;

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
  if (depth == 64)
    return NG_INVALID_VALUE;
  below[depth++] = current;
  return make_current(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
  if (context)
    cuCtxGetCurrent(context);
  current = depth ? below[--depth] : -1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
  if (current < 0)
    return NG_INVALID_CONTEXT;
  *device = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
  if (least)
    *least = 0;
  if (greatest)
    *greatest = -5;
  return CUDA_SUCCESS;
}

/* ---- modules and functions ---- */
CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
  return (CUresult)ng_image_load((struct ng_image **)module, image);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values)
{
  return (CUresult)ng_image_load((struct ng_image **)module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
  return (CUresult)ng_image_load((struct ng_image **)module, image);
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
  return (CUresult)ng_image_load_file((struct ng_image **)module, path);
}

CUresult cuModuleUnload(CUmodule module)
{
  ng_image_unload((struct ng_image *)module);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
  return module ? (CUresult)ng_image_kernel((struct ng_image *)module, name, (struct ng_kernel **)function)
                : NG_INVALID_HANDLE;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit, void **jit_values,
                           unsigned jit_count, CUlibraryOption *options, void **values, unsigned count)
{
  return (CUresult)ng_image_load((struct ng_image **)library, image);
}

CUresult cuLibraryUnload(CUlibrary library)
{
  ng_image_unload((struct ng_image *)library);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
  return cuModuleGetFunction((CUfunction *)kernel, (CUmodule)library, name);
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
  const struct ng_kernel *kernel = (void *)function;
  if (!kernel->inspected)
    return (CUresult)ng_refuse("resources of a kernel loaded from PTX", NG_NOT_SUPPORTED);
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_NUM_REGS:
    *value = kernel->registers;
    break;
  case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    *value = kernel->local_bytes;
    break;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    *value = kernel->static_shared;
    break;
  case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    *value = kernel->constant_bytes;
    break;
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    *value = kernel->max_threads;
    break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
    *value = kernel->dynamic_shared;
    break;
  case CU_FUNC_ATTRIBUTE_PTX_VERSION:
  case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
    *value = ng_architecture();
    break;
  case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    *value = 0;
    break;
  case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    *value = kernel->cluster_allowed;
    break;
  case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
    *value = kernel->carveout;
    break;
  default:
    return (CUresult)ng_refuse("this function attribute", NG_NOT_SUPPORTED);
  }
  return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
  return cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
  struct ng_kernel *kernel = (void *)function;
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
    if (value < 0 || value > ng_max_dynamic_shared(kernel))
      return NG_INVALID_VALUE;
    kernel->dynamic_shared = value;
    break;
  case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    kernel->cluster_allowed = value;
    break;
  case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
    kernel->carveout = value;
    break;
  default:
    return (CUresult)ng_refuse("setting this function attribute", NG_NOT_SUPPORTED);
  }
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
  return cuFuncSetAttribute((CUfunction)kernel, attribute, value);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra)
{
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  return (CUresult)ng_check_launch((void *)function, grid, block, shared);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **arguments)
{
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments, NULL);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra)
{
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                        c->sharedMemBytes, c->hStream, arguments, extra);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared)
{
  *blocks = ng_blocks_per_sm((void *)function, threads, shared);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                              size_t shared, unsigned flags)
{
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

/* An upper bound: how many clusters fit in a GPC is known to the card alone. Triton asks only to see that it is not
 * zero. */
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config)
{
  int size = 1;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      size = (int)(config->attrs[i].value.clusterDim.x * config->attrs[i].value.clusterDim.y *
                   config->attrs[i].value.clusterDim.z);
  int threads = (int)(config->blockDimX * config->blockDimY * config->blockDimZ);
  int blocks = ng_blocks_per_sm((void *)function, threads, config->sharedMemBytes);
  *clusters = blocks * ng_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) / (size > 0 ? size : 1);
  return CUDA_SUCCESS;
}

/* The descriptor is read by kernels only, and none runs. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
  if (!map || !address || rank < 1 || rank > 5)
    return NG_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

/* ---- memory ---- */
#define POINTER(address) ((void *)(uintptr_t)(address))

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
  return size ? (CUresult)ng_alloc((void **)address, size, ng_device()) : NG_INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
  return (CUresult)ng_free(POINTER(address));
}

CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags)
{
  return (CUresult)ng_alloc(pointer, size, NG_HOST);
}

CUresult cuMemAllocHost_v2(void **pointer, size_t size)
{
  return (CUresult)ng_alloc(pointer, size, NG_HOST);
}

CUresult cuMemFreeHost(void *pointer)
{
  return (CUresult)ng_free(pointer);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
  *free_bytes = ng_free_bytes(ng_device());
  *total = ng_card()->memory;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
  struct ng_block block;
  if (!ng_find(POINTER(address), &block))
    return NG_NOT_FOUND;
  if (base)
    *base = block.start;
  if (size)
    *size = block.size;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
  struct ng_block block;
  if (!ng_find(POINTER(address), &block))
    return NG_INVALID_VALUE;
  int device = block.device == NG_HOST ? 0 : block.device;
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_CONTEXT:
    *(CUcontext *)value = (CUcontext)&contexts[device];
    break;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    *(unsigned *)value = block.device == NG_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    break;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
  case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    *(CUdeviceptr *)value = address;
    break;
  case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    *(unsigned long long *)value = block.start;
    break;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    *(int *)value = device;
    break;
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    *(CUdeviceptr *)value = block.start;
    break;
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    *(size_t *)value = block.size;
    break;
  case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    *(char *)value = 0;
    break;
  default:
    return (CUresult)ng_refuse("this pointer attribute", NG_NOT_SUPPORTED);
  }
  return CUDA_SUCCESS;
}

#define COPY(name, to_type, from_type)                                                                                 \
  CUresult name(to_type to, from_type from, size_t size)                                                               \
  {                                                                                                                    \
    return (CUresult)ng_copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);                              \
  }
#define COPY_ASYNC(name, to_type, from_type)                                                                           \
  CUresult name(to_type to, from_type from, size_t size, CUstream stream)                                              \
  {                                                                                                                    \
    return (CUresult)ng_copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);                              \
  }
COPY(cuMemcpy, CUdeviceptr, CUdeviceptr)
COPY(cuMemcpyHtoD_v2, CUdeviceptr, const void *)
COPY(cuMemcpyDtoH_v2, void *, CUdeviceptr)
COPY(cuMemcpyDtoD_v2, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyAsync, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr)

CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count)
{
  return (CUresult)ng_fill(POINTER(address), value, 1, count);
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream)
{
  return (CUresult)ng_fill(POINTER(address), value, 1, count);
}

CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned value, size_t count)
{
  return (CUresult)ng_fill(POINTER(address), value, 4, count);
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream)
{
  return (CUresult)ng_fill(POINTER(address), value, 4, count);
}

/* Virtual memory management (torch's expandable segments): a range is address space, a handle is a claim on the card's
 * memory. */
struct physical {
  size_t size;
  int references;
  CUmemAllocationProp property;
};

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *property,
                                       CUmemAllocationGranularity_flags option)
{
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags)
{
  return (CUresult)ng_reserve((void **)address, size, ng_device());
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
  return (CUresult)ng_free(POINTER(address));
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *property,
                     unsigned long long flags)
{
  int device = property->location.id;
  if (property->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !ng_valid_device(device))
    return NG_INVALID_VALUE;
  int error = ng_charge(device, size);
  if (error)
    return (CUresult)error;
  struct physical *physical = calloc(1, sizeof *physical);
  *physical = (struct physical){size, 1, *property};
  *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
  return CUDA_SUCCESS;
}

/* A mapped handle may be released before it is unmapped; counting it as given back at once is early, never wrong
 * shapes. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
  struct physical *physical = POINTER(handle);
  if (--physical->references == 0) {
    ng_discharge(physical->property.location.id, physical->size);
    free(physical);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
  struct ng_block block;
  return ng_find(POINTER(address), &block) && block.reserved ? CUDA_SUCCESS : NG_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
  ng_drop(POINTER(address), size);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *property, CUmemGenericAllocationHandle handle)
{
  *property = ((struct physical *)POINTER(handle))->property;
  return CUDA_SUCCESS;
}

/* ---- streams, events, capture ---- */
struct ng_capture {
  unsigned long long id;
  int running;
  void *graph;
};

struct ng_stream {
  int device;
  int priority;
  unsigned flags;
  struct ng_capture *capture; /* never freed: an event may still point to it */
};

struct ng_event {
  struct ng_capture
      *capture; /* the capture this event was recorded in: waiting for it joins a stream to that capture */
};

static struct ng_stream default_streams[NG_MAX_DEVICES];

static struct ng_stream *stream_of(void *handle)
{
  if ((uintptr_t)handle > 2) /* 0: default, 1: legacy default, 2: per-thread default */
    return handle;
  struct ng_stream *stream = &default_streams[ng_device()];
  stream->device = ng_device();
  return stream;
}

int ng_stream_create(void **handle, unsigned flags, int priority)
{
  struct ng_stream *stream = calloc(1, sizeof *stream);
  if (!stream)
    return NG_OUT_OF_MEMORY;
  *stream = (struct ng_stream){.device = ng_device(), .priority = priority, .flags = flags};
  *handle = stream;
  return NG_OK;
}

int ng_stream_destroy(void *handle)
{
  if ((uintptr_t)handle <= 2)
    return NG_INVALID_HANDLE;
  free(handle);
  return NG_OK;
}

int ng_stream_priority(void *handle, int *priority)
{
  *priority = stream_of(handle)->priority;
  return NG_OK;
}

int ng_stream_flags(void *handle, unsigned *flags)
{
  *flags = stream_of(handle)->flags;
  return NG_OK;
}

int ng_stream_device(void *handle, int *device)
{
  *device = stream_of(handle)->device;
  return NG_OK;
}

int ng_event_create(void **handle)
{
  *handle = calloc(1, sizeof(struct ng_event));
  return *handle ? NG_OK : NG_OUT_OF_MEMORY;
}

int ng_event_destroy(void *handle)
{
  free(handle);
  return NG_OK;
}

static struct ng_capture *running(struct ng_capture *capture)
{
  return capture && capture->running ? capture : NULL;
}

int ng_event_record(void *event, void *stream)
{
  if (!event)
    return NG_INVALID_HANDLE;
  ((struct ng_event *)event)->capture = running(stream_of(stream)->capture);
  return NG_OK;
}

int ng_stream_wait(void *stream, void *event)
{
  if (!event)
    return NG_INVALID_HANDLE;
  struct ng_capture *capture = running(((struct ng_event *)event)->capture);
  if (capture)
    stream_of(stream)->capture = capture;
  return NG_OK;
}

/* Every measurement takes this long: benchmarks end after few repeats, and nobody may use the number. */
float ng_elapsed_milliseconds(void)
{
  return (float)ng_setting("NULLGPU_EVENT_MS", 50);
}

int ng_capture_begin(void *handle, void *graph)
{
  static unsigned long long next;
  struct ng_stream *stream = stream_of(handle);
  if (running(stream->capture))
    return NG_INVALID_VALUE;
  struct ng_capture *capture = calloc(1, sizeof *capture);
  if (!capture)
    return NG_OUT_OF_MEMORY;
  *capture = (struct ng_capture){__sync_add_and_fetch(&next, 1), 1, graph ? graph : ng_handle()};
  stream->capture = capture;
  return NG_OK;
}

int ng_capture_end(void *handle, void **graph)
{
  struct ng_capture *capture = running(stream_of(handle)->capture);
  if (!capture)
    return NG_INVALID_VALUE;
  capture->running = 0;
  *graph = capture->graph;
  return NG_OK;
}

int ng_capture_info(void *handle, int *status, unsigned long long *id, void **graph)
{
  struct ng_capture *capture = running(stream_of(handle)->capture);
  if (status)
    *status = capture != NULL;
  if (id)
    *id = capture ? capture->id : 0;
  if (graph)
    *graph = capture ? capture->graph : NULL;
  return NG_OK;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
  return (CUresult)ng_stream_create((void **)stream, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
  return (CUresult)ng_stream_create((void **)stream, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
  return (CUresult)ng_stream_destroy(stream);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
  return (CUresult)ng_stream_wait(stream, event);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
  *context = (CUcontext)&contexts[stream_of(stream)->device];
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
  return (CUresult)ng_capture_info(stream, (int *)status, NULL, NULL);
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
  return (CUresult)ng_event_create((void **)event);
}

CUresult cuEventDestroy_v2(CUevent event)
{
  return (CUresult)ng_event_destroy(event);
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
  return (CUresult)ng_event_record(event, stream);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags)
{
  return (CUresult)ng_event_record(event, stream);
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
  *milliseconds = ng_elapsed_milliseconds();
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
  *milliseconds = ng_elapsed_milliseconds();
  return CUDA_SUCCESS;
}

/* ---- errors and entry points ---- */
CUresult cuGetErrorString(CUresult error, const char **text)
{
  *text = ng_error_text(error);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text)
{
  static __thread char name[64];
  snprintf(name, sizeof name, "CUDA_%s%s", error ? "ERROR_" : "", ng_error_name(error));
  *text = name;
  return CUDA_SUCCESS;
}

/* Must fail: a statically linked CUDA runtime (cuFFT, cuSOLVER, CUPTI) that gets a table calls into it and crashes. */
CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
  *table = NULL;
  return NG_NOT_FOUND;
}

/* Generated from cudaTypedefs.h: which symbol a caller compiled for CUDA `version` means by `name`. */
extern const struct ng_entry {
  const char *name;
  int version;
  const char *symbol;
} ng_entries[];

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result)
{
  const char *symbol = NULL;
  for (const struct ng_entry *entry = ng_entries; entry->name; entry++) /* sorted by version within a name */
    if (entry->version <= version && !strcmp(entry->name, name))
      symbol = entry->symbol;
  *function = symbol ? dlsym(RTLD_DEFAULT, symbol) : NULL;
  if (!*function)
    ng_log(1, "no entry point %s for CUDA %d", name, version);
  if (result)
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : NG_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
