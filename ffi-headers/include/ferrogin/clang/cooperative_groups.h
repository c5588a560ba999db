// The part of <cooperative_groups.h> that NCCL's EFA backend and EP kernels use: groups of a warp's lanes, and the
// grid.
#pragma once

#include "device.h"

namespace cooperative_groups {

struct coalesced_group {
  unsigned lanes;

  FGIN_CLANG unsigned thread_rank() const {
    return unsigned(__popc(lanes & __nvvm_read_ptx_sreg_lanemask_lt()));
  }
  FGIN_CLANG unsigned num_threads() const {
    return unsigned(__popc(lanes));
  }
  FGIN_CLANG unsigned size() const {
    return num_threads();
  }
  FGIN_CLANG void sync() const {
    __syncwarp(lanes);
  }
  FGIN_CLANG uint32_t shfl(uint32_t value, int from) const {
    int lane = from == 0 ? __ffs(int(lanes)) - 1 : int(__fns(lanes, 0, from + 1));
    return uint32_t(__shfl_sync(lanes, int(value), lane));
  }
};

FGIN_CLANG coalesced_group coalesced_threads() {
  return {__activemask()};
}

FGIN_CLANG coalesced_group labeled_partition(const coalesced_group& group, unsigned long long label) {
  return {__nvvm_match_any_sync_i64(group.lanes, label)};
}

// All threads of a cooperative launch. The barrier's word belongs to the module, so two grids of one module can't
// synchronise at the same time.
static __device__ unsigned grid_barrier;

struct grid_group {
  // The highest bit of the word changes when the last block arrives.
  FGIN_CLANG void sync() const {
    __syncthreads();
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0) {
      bool first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
      unsigned blocks = gridDim.x * gridDim.y * gridDim.z, arrival = first ? (1u << 31) - (blocks - 1) : 1, now;
      unsigned before = FGIN_ATOM(".acq_rel.gpu.add.u32", unsigned, "r", &grid_barrier, arrival);
      do {
        now = __scoped_atomic_load_n(&grid_barrier, __ATOMIC_ACQUIRE, __MEMORY_SCOPE_DEVICE);
      } while (((before ^ now) >> 31) == 0);
    }
    __syncthreads();
  }
};

FGIN_CLANG grid_group this_grid() {
  return {};
}

}  // namespace cooperative_groups
