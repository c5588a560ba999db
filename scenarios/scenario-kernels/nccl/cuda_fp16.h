// NCCL's public header includes <cuda_fp16.h>; GIN needs nothing of it.
#pragma once
