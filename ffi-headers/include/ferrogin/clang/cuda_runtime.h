// The part of <cuda_runtime.h> that the public headers of NCCL and nccl_ep use.
#pragma once

#include "cuda.h"

#define CUDART_VERSION CUDA_VERSION

typedef enum cudaError { cudaSuccess = 0 } cudaError_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
