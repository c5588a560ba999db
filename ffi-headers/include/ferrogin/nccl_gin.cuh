// NCCL's device API with ferrogin as its EFA_GDA backend. Include it instead of <nccl_device.h>, or before it. A kernel
// that uses ncclGin needs no other change. Compile the kernel with -rdc=true, and link it with libferrogin_device's
// relocatable object for its architecture. Its communicator must use the ferrogin plugin.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef FERROGIN_NCCL_GIN_CUH
#define FERROGIN_NCCL_GIN_CUH

#include "nccl_gin_backend.cuh"

#include <nccl_device.h>

#ifdef __CUDACC__
#define ncclGinGdakiGPUContext ferrogin_signals_of_context
#endif

#endif  // FERROGIN_NCCL_GIN_CUH
