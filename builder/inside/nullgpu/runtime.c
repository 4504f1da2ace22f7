/* libcudart of the null GPU (CUDA 12 and 13): the functions that answer something. Other cudart functions are generated
 * (build.py). */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

static __thread cudaError_t last_error;

static cudaError_t answer(int error)
{
  if (error)
    last_error = (cudaError_t)error;
  return (cudaError_t)error;
}

/* The runtime makes a device's context current when it first needs one; torch asks the driver API for it afterwards. */
static int device(void)
{
  ng_set_device(ng_device());
  return ng_device();
}

/* ---- kernels of C++ code: registered, launched, never run ---- */
void **__cudaRegisterFatBinary(void *binary)
{
  static void *handle[4];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
}

void __cudaUnregisterFatBinary(void **handle)
{
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *e)
{
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global)
{
}

char __cudaInitModule(void **handle)
{
  return 1;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

/* Nothing is known of a registered kernel's resources, but a launch outside the card's own limits fails here too. */
static cudaError_t launch(dim3 grid, dim3 block, size_t shared)
{
  unsigned long threads = (unsigned long)block.x * block.y * block.z;
  device();
  if (!threads || threads > (unsigned long)ng_attribute(cudaDevAttrMaxThreadsPerBlock) || !grid.x || !grid.y || !grid.z)
    return answer(cudaErrorInvalidConfiguration);
  if (shared > (size_t)ng_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))
    return answer(NG_INVALID_VALUE);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream)
{
  return launch(grid, block, shared);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream)
{
  return launch(grid, block, shared);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream)
{
  return launch(grid, block, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments)
{
  return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
  function(data); /* everything before it on the stream is done: nothing ever takes time */
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags)
{
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

/* ---- devices ---- */
cudaError_t cudaGetDeviceCount(int *count)
{
  *count = ng_card()->count;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
  *device = ng_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
  return answer(ng_set_device(device));
}

cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags)
{
  return answer(ng_valid_device(device) ? NG_OK : NG_INVALID_DEVICE);
}

cudaError_t cudaDriverGetVersion(int *version)
{
  *version = ng_card()->driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
  if (!ng_valid_device(device))
    return answer(NG_INVALID_DEVICE);
  if (!ng_has_attribute(attribute))
    return answer(NG_INVALID_VALUE);
  *value = ng_attribute(attribute);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
  *can = ng_peer_access(device, peer);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device)
{
  snprintf(text, (size_t)size, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
  if (least)
    *least = 0;
  if (greatest)
    *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
  static char pools[NG_MAX_DEVICES];
  *pool = (cudaMemPool_t)&pools[device];
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
  *(unsigned long long *)value = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
  if (!ng_valid_device(device))
    return answer(NG_INVALID_DEVICE);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", ng_card()->name);
  ng_uuid(&p->uuid, device);
  p->totalGlobalMem = ng_card()->memory;
  p->memPitch = (size_t)ng_attribute(cudaDevAttrMaxPitch);
  p->totalConstMem = (size_t)ng_attribute(cudaDevAttrTotalConstantMemory);
  p->sharedMemPerBlock = (size_t)ng_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerMultiprocessor = (size_t)ng_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->sharedMemPerBlockOptin = (size_t)ng_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->reservedSharedMemPerBlock = (size_t)ng_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  p->regsPerBlock = ng_attribute(cudaDevAttrMaxRegistersPerBlock);
  p->regsPerMultiprocessor = ng_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->warpSize = ng_attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = ng_attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = ng_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = ng_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->maxThreadsDim[0] = ng_attribute(cudaDevAttrMaxBlockDimX);
  p->maxThreadsDim[1] = ng_attribute(cudaDevAttrMaxBlockDimY);
  p->maxThreadsDim[2] = ng_attribute(cudaDevAttrMaxBlockDimZ);
  p->maxGridSize[0] = ng_attribute(cudaDevAttrMaxGridDimX);
  p->maxGridSize[1] = ng_attribute(cudaDevAttrMaxGridDimY);
  p->maxGridSize[2] = ng_attribute(cudaDevAttrMaxGridDimZ);
  p->major = ng_attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = ng_attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = ng_attribute(cudaDevAttrMultiProcessorCount);
  p->l2CacheSize = ng_attribute(cudaDevAttrL2CacheSize);
  p->persistingL2CacheMaxSize = ng_attribute(cudaDevAttrMaxPersistingL2CacheSize);
  p->accessPolicyMaxWindowSize = ng_attribute(cudaDevAttrMaxAccessPolicyWindowSize);
  p->memoryBusWidth = ng_attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->textureAlignment = (size_t)ng_attribute(cudaDevAttrTextureAlignment);
  p->texturePitchAlignment = (size_t)ng_attribute(cudaDevAttrTexturePitchAlignment);
  p->surfaceAlignment = (size_t)ng_attribute(cudaDevAttrSurfaceAlignment);
  p->integrated = ng_attribute(cudaDevAttrIntegrated);
  p->canMapHostMemory = ng_attribute(cudaDevAttrCanMapHostMemory);
  p->concurrentKernels = ng_attribute(cudaDevAttrConcurrentKernels);
  p->ECCEnabled = ng_attribute(cudaDevAttrEccEnabled);
  p->tccDriver = ng_attribute(cudaDevAttrTccDriver);
  p->pciBusID = device + 1;
  p->asyncEngineCount = ng_attribute(cudaDevAttrAsyncEngineCount);
  p->unifiedAddressing = ng_attribute(cudaDevAttrUnifiedAddressing);
  p->streamPrioritiesSupported = ng_attribute(cudaDevAttrStreamPrioritiesSupported);
  p->globalL1CacheSupported = ng_attribute(cudaDevAttrGlobalL1CacheSupported);
  p->localL1CacheSupported = ng_attribute(cudaDevAttrLocalL1CacheSupported);
  p->managedMemory = ng_attribute(cudaDevAttrManagedMemory);
  p->pageableMemoryAccess = ng_attribute(cudaDevAttrPageableMemoryAccess);
  p->concurrentManagedAccess = ng_attribute(cudaDevAttrConcurrentManagedAccess);
  p->computePreemptionSupported = ng_attribute(cudaDevAttrComputePreemptionSupported);
  p->canUseHostPointerForRegisteredMem = ng_attribute(cudaDevAttrCanUseHostPointerForRegisteredMem);
  p->cooperativeLaunch = ng_attribute(cudaDevAttrCooperativeLaunch);
  p->hostRegisterSupported = ng_attribute(cudaDevAttrHostRegisterSupported);
  p->memoryPoolsSupported = ng_attribute(cudaDevAttrMemoryPoolsSupported);
  p->clusterLaunch = ng_attribute(cudaDevAttrClusterLaunch);
#if CUDART_VERSION < 13000
  p->clockRate = ng_attribute(cudaDevAttrClockRate);
  p->memoryClockRate = ng_attribute(cudaDevAttrMemoryClockRate);
  p->computeMode = ng_attribute(cudaDevAttrComputeMode);
#endif
  return cudaSuccess;
}

/* ---- errors ---- */
cudaError_t cudaGetLastError(void)
{
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void)
{
  return last_error;
}

const char *cudaGetErrorString(cudaError_t error)
{
  return ng_error_text(error);
}

const char *cudaGetErrorName(cudaError_t error)
{
  static __thread char name[64];
  snprintf(name, sizeof name, "cudaError (null GPU: %s)", ng_error_name(error));
  return error ? name : "cudaSuccess";
}

/* ---- memory ---- */
cudaError_t cudaMalloc(void **pointer, size_t size)
{
  *pointer = NULL;
  return answer(size ? ng_alloc(pointer, size, device()) : NG_OK);
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream)
{
  return cudaMalloc(pointer, size);
}

cudaError_t cudaFree(void *pointer)
{
  return answer(ng_free(pointer));
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
  return answer(ng_free(pointer));
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags)
{
  return answer(ng_alloc(pointer, size, NG_HOST));
}

cudaError_t cudaMallocHost(void **pointer, size_t size)
{
  return answer(ng_alloc(pointer, size, NG_HOST));
}

cudaError_t cudaFreeHost(void *pointer)
{
  return answer(ng_free(pointer));
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
  return answer(ng_register_host(pointer, size));
}

cudaError_t cudaHostUnregister(void *pointer)
{
  return answer(ng_unregister_host(pointer));
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
  *free_bytes = ng_free_bytes(ng_device());
  *total = ng_card()->memory;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
  return answer(ng_copy(to, from, size));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
{
  return answer(ng_copy(to, from, size));
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream)
{
  return answer(ng_copy(to, from, size));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
  int error = NG_OK;
  for (size_t row = 0; row < height && !error; row++)
    error = ng_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return answer(error);
}

cudaError_t cudaMemset(void *pointer, int value, size_t size)
{
  return answer(ng_fill(pointer, (unsigned char)value, 1, size));
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream)
{
  return answer(ng_fill(pointer, (unsigned char)value, 1, size));
}

/* One scratch area stands for every __device__ variable: only kernels read them. */
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol)
{
  static char scratch[1 << 16];
  *pointer = scratch;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
  struct ng_block block;
  memset(attributes, 0, sizeof *attributes);
  if (!ng_find(pointer, &block)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  attributes->type = block.device == NG_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = block.device == NG_HOST ? ng_device() : block.device;
  attributes->devicePointer = (void *)pointer;
  attributes->hostPointer = block.device == NG_HOST ? (void *)pointer : NULL;
  return cudaSuccess;
}

/* ---- streams and events ---- */
cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
  return answer(ng_stream_create((void **)stream, 0, 0));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
  return answer(ng_stream_create((void **)stream, flags, 0));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
  return answer(ng_stream_create((void **)stream, flags, priority));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
  return answer(ng_stream_destroy(stream));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
  return answer(ng_stream_priority(stream, priority));
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags)
{
  return answer(ng_stream_flags(stream, flags));
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
  return answer(ng_stream_device(stream, device));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
  return answer(ng_stream_wait(stream, event));
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
  return answer(ng_event_create((void **)event));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
  return answer(ng_event_create((void **)event));
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
  return answer(ng_event_destroy(event));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
  return answer(ng_event_record(event, stream));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
  return answer(ng_event_record(event, stream));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
  *milliseconds = ng_elapsed_milliseconds();
  return cudaSuccess;
}

/* ---- graphs: capture is tracked, the graph itself is an opaque handle ---- */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
  return answer(ng_capture_begin(stream, NULL));
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                          const cudaGraphEdgeData *edges, size_t count, enum cudaStreamCaptureMode mode)
{
  return answer(ng_capture_begin(stream, graph));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
  return answer(ng_capture_end(stream, (void **)graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
  return answer(ng_capture_info(stream, (int *)status, NULL, NULL));
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                const cudaGraphEdgeData **edges, size_t *count)
{
  if (dependencies)
    *dependencies = NULL;
  if (edges)
    *edges = NULL;
  if (count)
    *count = 0;
  return answer(ng_capture_info(stream, (int *)status, id, (void **)graph));
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
  return capture_info(stream, status, id, graph, dependencies, edges, count);
}
#else
#undef cudaStreamGetCaptureInfo
#undef cudaStreamGetCaptureInfo_v2
#undef cudaStreamGetCaptureInfo_v3
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, size_t *count)
{
  return capture_info(stream, status, id, graph, dependencies, NULL, count);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                        size_t *count)
{
  return capture_info(stream, status, id, graph, dependencies, edges, count);
}
#endif

/* One node: torch only asks whether a captured graph is empty. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
  *count = 1;
  if (nodes)
    nodes[0] = ng_handle();
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags)
{
  *graph = ng_handle();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
  *executable = ng_handle();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
  *executable = ng_handle();
  return cudaSuccess;
}

/* ---- functions: fat binaries are compressed, so these are plain values; only cub's choice of a policy depends on them
 * ---- */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = ng_attribute(cudaDevAttrMaxThreadsPerBlock);
  attributes->numRegs = 32;
  attributes->ptxVersion = ng_architecture();
  attributes->binaryVersion = ng_architecture();
  attributes->maxDynamicSharedSizeBytes = ng_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
      value > ng_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))
    return answer(NG_INVALID_VALUE);
  return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                            int device)
{
  return cudaFuncSetAttribute(kernel, attribute, value);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
  struct ng_kernel unknown = {0};
  *blocks = ng_blocks_per_sm(&unknown, threads, shared);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags)
{
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

/* ---- entry points of the driver ---- */
extern int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result)
{
  int error = cuGetProcAddress_v2(name, function, (int)version, flags, NULL);
  if (result)
    *result = error ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result)
{
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
#endif
