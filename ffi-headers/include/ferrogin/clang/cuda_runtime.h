// The part of <cuda_runtime.h> that NCCL's public header uses.
#pragma once

#include "cuda.h"

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
