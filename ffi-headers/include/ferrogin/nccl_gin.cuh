// NCCL's device API with ferrogin as its EFA_GDA backend: to be included instead of <nccl_device.h>, or before it. A kernel
// that uses ncclGin needs no other change. It has to be compiled with -rdc=true and linked with the relocatable object of
// libferrogin_device for its architecture, and its communicator has to use the ferrogin plugin.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef FERROGIN_NCCL_GIN_CUH
#define FERROGIN_NCCL_GIN_CUH

#include "nccl_gin_backend.cuh"

#include <nccl_device.h>

#endif  // FERROGIN_NCCL_GIN_CUH
