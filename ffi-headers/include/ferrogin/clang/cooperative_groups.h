// The part of <cooperative_groups.h> that NCCL's EFA backend uses: groups of a warp's lanes.
#pragma once

#include "device.h"

namespace cooperative_groups {

struct coalesced_group {
  unsigned lanes;

  DEVICE unsigned thread_rank() const {
    return unsigned(__popc(lanes & __nvvm_read_ptx_sreg_lanemask_lt()));
  }
  DEVICE unsigned num_threads() const {
    return unsigned(__popc(lanes));
  }
  DEVICE unsigned size() const {
    return num_threads();
  }
  DEVICE void sync() const {
    __syncwarp(lanes);
  }
  DEVICE uint32_t shfl(uint32_t value, int from) const {
    int lane = from == 0 ? __ffs(int(lanes)) - 1 : int(__fns(lanes, 0, from + 1));
    return uint32_t(__shfl_sync(lanes, int(value), lane));
  }
};

DEVICE coalesced_group coalesced_threads() {
  return {__activemask()};
}

DEVICE coalesced_group labeled_partition(const coalesced_group& group, unsigned long long label) {
  return {__nvvm_match_any_sync_i64(group.lanes, label)};
}

}  // namespace cooperative_groups
