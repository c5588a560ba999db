// The part of <cuda.h> that NCCL's public and device headers use.
#pragma once

#include "cuda_shim.h"

#ifndef CUDA_VERSION
#define CUDA_VERSION 13000
#endif

typedef enum {
  CU_MEM_LOCATION_TYPE_INVALID = 0,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST = 2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
} CUmemLocationType;
