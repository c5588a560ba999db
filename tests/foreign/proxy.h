// NCCL's GIN proxy, over an RMA plugin, in the form in which NCCL has it: as a GIN plugin. Its handles are for NCCL's device code of the type
// PROXY, which writes descriptors into queues in host memory; `ginProgress` decodes them and calls the RMA plugin.
#pragma once

#include <nccl.h>
#include <nccl_device/net_device.h>

#include "rma_abi.h"

// The memory of kernels. On CPU threads all memory is the process's own.
struct ProxyMemory {
  // Zeroed memory that kernels and the proxy's thread use, and memory of the device; it is never freed.
  void* (*shared)(size_t bytes);
  void* (*device)(size_t bytes);
  // A dma-buf of device memory, or -1.
  int (*dma_buf)(void* data, size_t bytes);
};
extern const ProxyMemory process_memory;

// The GIN plugin over the newest RMA plugin of a library that NCCL of this release knows; null if the library has none. All users of a process
// share it.
const ncclGin_v14_t* proxy_over(void* library, const ProxyMemory& memory);
