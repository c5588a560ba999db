// NCCL's own GIN device code, compiled for the CPU: the EFA_GDA and PROXY backends, the generic ncclGin class and its
// barrier.
#pragma once

#define NCCL_OS_LINUX 1
#define __CUDACC__ 1
#define NCCL_GIN_EFA_GDA_ENABLE 1
// With one backend only where instructions are counted.
#ifdef SHIM_BARE
#define NCCL_GIN_PROXY_ENABLE 0
#else
#define NCCL_GIN_PROXY_ENABLE 1
#endif
#define NCCL_GIN_GDAKI_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0

#include <assert.h>

#include "cuda_shim.h"

#include <nccl.h>
// NCCL's generic code over ferrogin's backend instead of NCCL's own.
#ifdef FOREIGN_FERROGIN
#include <cooperative_groups.h>
#include <ferrogin/nccl_gin_backend.cuh>
#include "nccl_device/transport/net_efa_gda/efa-dp-direct/include/device/efa_cuda_dp_impl.cuh"
#endif
#include "nccl_device/impl/comm__types.h"
#include "nccl_device/impl/core__funcs.h"
#include "nccl_device/impl/gin__funcs.h"
#include "nccl_device/impl/gin_barrier__funcs.h"

// The backendVersion that NCCL's library requests for an application compiled with these headers.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
#define FOREIGN_BACKEND_VERSION 2
#define FOREIGN_HAS_GET 1
#else
#define FOREIGN_BACKEND_VERSION 1
#define FOREIGN_HAS_GET 0
#endif

// For ncclGin methods that have defaults before the flags.
inline constexpr uint32_t foreign_aggregate = ncclGinOptFlagsAggregateRequests;
