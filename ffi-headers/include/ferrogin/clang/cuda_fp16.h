// NCCL's public header includes <cuda_fp16.h>; GIN needs nothing from it.
#pragma once
