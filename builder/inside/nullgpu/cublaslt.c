/* libcublasLt of the null GPU: descriptors are opaque, the heuristic names one algorithm. */
#include "nullgpu.h"
#include <cublasLt.h>
#include <string.h>

size_t cublasLtGetVersion(void)
{
  return CUBLAS_VERSION;
}

size_t cublasLtGetCudartVersion(void)
{
  return CUDART_VERSION;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
  *handle = ng_handle();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *descriptor, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
  *descriptor = ng_handle();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading)
{
  *layout = ng_handle();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
  *preference = ng_handle();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixTransformDescCreate(cublasLtMatrixTransformDesc_t *descriptor, cudaDataType scale)
{
  *descriptor = ng_handle();
  return CUBLAS_STATUS_SUCCESS;
}

/* torch raises when there is no result, so there is always one: it needs no workspace. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *found)
{
  memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  results->wavesCount = 1;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
  return status ? ng_error_text(NG_NOT_SUPPORTED) : "success";
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
  return status ? "CUBLAS_STATUS_NOT_SUPPORTED (null GPU)" : "CUBLAS_STATUS_SUCCESS";
}
