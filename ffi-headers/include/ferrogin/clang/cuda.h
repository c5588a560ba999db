// <cuda.h> of the driver API if the program has it, otherwise the part that NCCL's headers use.
#pragma once

#include "device.h"

#if __has_include_next(<cuda.h>)
extern "C" {
#include_next <cuda.h>
}
#else
typedef enum {
  CU_MEM_LOCATION_TYPE_INVALID = 0,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST = 2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
} CUmemLocationType;
#endif
