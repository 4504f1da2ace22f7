/* libcublas of the null GPU: handles and settings. The products themselves are no-ops named in allowed.toml. */
#include "nullgpu.h"
#include <cublas_v2.h>

static __thread cublasMath_t math_mode;
static __thread cublasPointerMode_t pointer_mode;
static __thread cudaStream_t stream;

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle)
{
  *handle = ng_handle();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version)
{
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetProperty(libraryPropertyType type, int *value)
{
  *value = type == MAJOR_VERSION ? CUBLAS_VER_MAJOR : type == MINOR_VERSION ? CUBLAS_VER_MINOR : CUBLAS_VER_PATCH;
  return CUBLAS_STATUS_SUCCESS;
}

size_t cublasGetCudartVersion(void)
{
  return CUDART_VERSION;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
  math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode)
{
  *mode = math_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode)
{
  pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode)
{
  *mode = pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t wanted)
{
  stream = wanted;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *current)
{
  *current = stream;
  return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusString(cublasStatus_t status)
{
  return status ? ng_error_text(NG_NOT_SUPPORTED) : "success";
}

const char *cublasGetStatusName(cublasStatus_t status)
{
  return status ? "CUBLAS_STATUS_NOT_SUPPORTED (null GPU)" : "CUBLAS_STATUS_SUCCESS";
}
