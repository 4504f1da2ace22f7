/* libnccl of the null GPU: this process is rank r of n without peers. Each collective behaves as if every rank held
 * what this one holds. */
#include "nullgpu.h"
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

struct ncclComm {
  int ranks; /* 0: made by a split, whose size only the peers know */
  int rank;
  int device;
};

static ncclResult_t make(ncclComm_t *communicator, int ranks, int rank, int device)
{
  *communicator = calloc(1, sizeof **communicator);
  if (!*communicator)
    return ncclSystemError;
  **communicator = (struct ncclComm){ranks, rank, device};
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version)
{
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
  memset(id, 0x4e, sizeof *id);
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
  return result ? ng_error_text(NG_NOT_SUPPORTED) : "no error";
}

const char *ncclGetLastError(ncclComm_t communicator)
{
  return "";
}

ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int ranks, ncclUniqueId id, int rank)
{
  return make(communicator, ranks, rank, ng_device());
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
  return make(communicator, ranks, rank, ng_device());
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *communicator, int ranks, int rank, int ids, ncclUniqueId *id,
                                      ncclConfig_t *config)
{
  return make(communicator, ranks, rank, ng_device());
}

ncclResult_t ncclCommInitAll(ncclComm_t *communicators, int count, const int *devices)
{
  for (int i = 0; i < count; i++)
    if (make(communicators + i, count, i, devices ? devices[i] : i))
      return ncclSystemError;
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t *part, ncclConfig_t *config)
{
  *part = NULL;
  return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : make(part, 0, 0, communicator->device);
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator)
{
  free(communicator);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator)
{
  return ncclSuccess; /* torch may still look at an aborted communicator: a few bytes stay */
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int *count)
{
  if (!communicator->ranks)
    return (ncclResult_t)ng_refuse("ncclCommCount after ncclCommSplit", ncclInvalidUsage);
  *count = communicator->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank)
{
  if (!communicator->ranks)
    return (ncclResult_t)ng_refuse("ncclCommUserRank after ncclCommSplit", ncclInvalidUsage);
  *rank = communicator->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int *device)
{
  *device = communicator->device;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error)
{
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **pointer, size_t size)
{
  return ng_alloc(pointer, size, ng_device()) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclMemFree(void *pointer)
{
  return ng_free(pointer) ? ncclInvalidArgument : ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t communicator, void *buffer, size_t size, void **handle)
{
  *handle = ng_handle();
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t communicator)
{
  *op = ncclNumOps; /* the first number of a custom reduction */
  return ncclSuccess;
}

static size_t width(ncclDataType_t type)
{
  switch (type) {
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32:
    return 4;
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64:
    return 8;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  default: /* 8-bit integers and floats */
    return 1;
  }
}

static ncclResult_t copy(void *to, const void *from, size_t size)
{
  return to == from || !ng_copy(to, from, size) ? ncclSuccess : ncclInvalidArgument;
}

/* Counts and sizes are summed over ranks as integers, and shapes may follow from them; floats stay what they are. */
static void times_ranks(void *values, size_t count, ncclDataType_t type, int ranks)
{
  if (type == ncclInt32 || type == ncclUint32)
    for (size_t i = 0; i < count; i++)
      ((uint32_t *)values)[i] *= (uint32_t)ranks;
  if (type == ncclInt64 || type == ncclUint64)
    for (size_t i = 0; i < count; i++)
      ((uint64_t *)values)[i] *= (uint64_t)ranks;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t communicator, cudaStream_t stream)
{
  ncclResult_t result = copy(receive, send, count * width(type));
  if (op == ncclSum)
    times_ranks(receive, count, type, communicator->ranks ? communicator->ranks : 1);
  return result;
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t communicator, cudaStream_t stream)
{
  return receive ? ncclAllReduce(send, receive, count, type, op, communicator, stream) : ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream)
{
  return copy(receive, send, count * width(type));
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream)
{
  size_t size = count * width(type);
  for (int i = 0; i < (communicator->ranks ? communicator->ranks : 1); i++)
    if (copy((char *)receive + (size_t)i * size, send, size))
      return ncclInvalidArgument;
  return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t communicator, cudaStream_t stream)
{
  size_t size = count * width(type);
  ncclResult_t result = copy(receive, (const char *)send + (size_t)communicator->rank * size, size);
  if (op == ncclSum)
    times_ranks(receive, count, type, communicator->ranks ? communicator->ranks : 1);
  return result;
}
