// NCCL's GIN proxy over an RMA plugin: a GIN plugin, as in NCCL. Its handles are for NCCL's device code of the type
// PROXY, which writes descriptors into queues in host memory; `ginProgress` decodes them and calls the RMA plugin.
#pragma once

#include <nccl.h>
#include <nccl_device/net_device.h>

#include "rma_abi.h"

// The kernels' memory. On CPU threads, all memory is the process's own.
struct ProxyMemory {
  // Zeroed memory: shared by kernels and the proxy's thread, and on the device. It is never freed.
  void* (*shared)(size_t bytes);
  void* (*device)(size_t bytes);
  // A dma-buf for device memory, or -1.
  int (*dma_buf)(void* data, size_t bytes);
};
extern const ProxyMemory process_memory;

// The GIN plugin over the library's newest RMA plugin that this NCCL release knows; null if the library has none. A
// process's users all share it.
const ncclGin_v14_t* proxy_over(void* library, const ProxyMemory& memory);
