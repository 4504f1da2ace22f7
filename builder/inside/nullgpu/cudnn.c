/* libcudnn of the null GPU: descriptors are opaque; every graph has one engine that needs no workspace. */
#include "nullgpu.h"
#include <cudnn.h>
#include <string.h>

size_t cudnnGetVersion(void)
{
  return CUDNN_VERSION;
}

size_t cudnnGetCudartVersion(void)
{
  return CUDART_VERSION;
}

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value)
{
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

const char *cudnnGetErrorString(cudnnStatus_t status)
{
  return status ? ng_error_text(NG_NOT_SUPPORTED) : "CUDNN_STATUS_SUCCESS";
}

void cudnnGetLastErrorString(char *text, size_t size)
{
  if (size)
    strncpy(text, ng_error_text(NG_NOT_SUPPORTED), size - 1)[size - 1] = 0;
}

#define CREATE(name, type)                                                                                             \
  cudnnStatus_t name(type *handle)                                                                                     \
  {                                                                                                                    \
    *handle = ng_handle();                                                                                             \
    return CUDNN_STATUS_SUCCESS;                                                                                       \
  }
CREATE(cudnnCreate, cudnnHandle_t)
CREATE(cudnnCreateActivationDescriptor, cudnnActivationDescriptor_t)
CREATE(cudnnCreateConvolutionDescriptor, cudnnConvolutionDescriptor_t)
CREATE(cudnnCreateDropoutDescriptor, cudnnDropoutDescriptor_t)
CREATE(cudnnCreateFilterDescriptor, cudnnFilterDescriptor_t)
CREATE(cudnnCreateTensorDescriptor, cudnnTensorDescriptor_t)

static __thread cudaStream_t stream;

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t wanted)
{
  stream = wanted;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *current)
{
  *current = stream;
  return CUDNN_STATUS_SUCCESS;
}

/* ---- the graph API ---- */
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor)
{
  *descriptor = ng_handle();
  return CUDNN_STATUS_SUCCESS;
}

/* Bytes of one element of an attribute; 0 for one this file does not know. */
static size_t attribute_size(cudnnBackendAttributeType_t type)
{
  switch (type) {
  case CUDNN_TYPE_HANDLE:
  case CUDNN_TYPE_INT64:
  case CUDNN_TYPE_DOUBLE:
  case CUDNN_TYPE_VOID_PTR:
    return 8;
  case CUDNN_TYPE_BOOLEAN:
  case CUDNN_TYPE_CHAR:
    return 1;
  case CUDNN_TYPE_DATA_TYPE:
  case CUDNN_TYPE_FLOAT:
  case CUDNN_TYPE_HEUR_MODE:
  case CUDNN_TYPE_KNOB_TYPE:
  case CUDNN_TYPE_NUMERICAL_NOTE:
  case CUDNN_TYPE_BEHAVIOR_NOTE:
  case CUDNN_TYPE_INT32:
    return 4;
  default:
    return 0;
  }
}

/* One result of value zero: one engine configuration, engine 0, no workspace, no notes. Notes are counted zero: zero
 * would be a note. */
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *values)
{
  int notes = type == CUDNN_TYPE_NUMERICAL_NOTE || type == CUDNN_TYPE_BEHAVIOR_NOTE || type == CUDNN_TYPE_KNOB_TYPE;
  if (count)
    *count = notes ? 0 : 1;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) /* the caller made the descriptor and passes it in */
    return CUDNN_STATUS_SUCCESS;
  size_t size = attribute_size(type);
  if (!size)
    return (cudnnStatus_t)ng_refuse("this cuDNN backend attribute", CUDNN_STATUS_NOT_SUPPORTED);
  if (values && wanted > 0 && !notes)
    memset(values, 0, size);
  return CUDNN_STATUS_SUCCESS;
}

/* ---- batch normalization, dropout: no workspace ---- */
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *bytes)
{
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t scale, const cudnnActivationDescriptor_t activation,
    size_t *bytes)
{
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t handle, cudnnBatchNormMode_t mode,
                                                                   cudnnBatchNormOps_t ops,
                                                                   const cudnnActivationDescriptor_t activation,
                                                                   const cudnnTensorDescriptor_t x, size_t *bytes)
{
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *bytes)
{
  *bytes = 4096;
  return CUDNN_STATUS_SUCCESS;
}
