// The part of <cooperative_groups.h> that NCCL's device headers use. A thread is alone in its group, unless it is a
// lane of a shim::Warp: then all of the warp's lanes must make each of these calls together.
#pragma once

#include "cuda_shim.h"

namespace shim {

// A yielding, reusable barrier for `members` threads of a warp.
struct Meeting {
  uint32_t arrived = 0;
  uint32_t round = 0;

  void wait(unsigned members) {
    if (members <= 1) return;
    uint32_t now = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == members) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&round, now + 1, __ATOMIC_RELEASE);
      return;
    }
    while (__atomic_load_n(&round, __ATOMIC_ACQUIRE) == now) sched_yield();
  }
};

struct Warp {
  explicit Warp(unsigned lanes_) : lanes(lanes_) {}
  unsigned lanes;
  Meeting everyone;              // for all lanes: a smaller group may still be busy when others arrive
  Meeting group[32];             // by the group's first lane
  unsigned long long label[32];  // by lane
  uint64_t value[32];            // by the group's first lane
};

#ifdef SHIM_BARE
constexpr Warp* warp = nullptr;
constexpr unsigned lane = 0;
#else
inline thread_local Warp* warp = nullptr;
inline thread_local unsigned lane = 0;
#endif

}  // namespace shim

namespace cooperative_groups {

struct coalesced_group {
  uint32_t lanes;  // a bit for each lane; 1 when the thread is alone

  unsigned thread_rank() const {
    return unsigned(__popc(lanes & ((1u << shim::lane) - 1)));
  }
  unsigned num_threads() const {
    return unsigned(__popc(lanes));
  }
  unsigned size() const {
    return num_threads();
  }
  void sync() const {
    if (!shim::warp) return;
    bool all = num_threads() == shim::warp->lanes;
    (all ? shim::warp->everyone : shim::warp->group[__builtin_ctz(lanes)]).wait(num_threads());
  }
  template <typename T>
  T shfl(T value, int from) const {
    static_assert(sizeof(T) <= 8, "a value of at most 8 bytes");
    if (!shim::warp) return value;
    uint64_t& slot = shim::warp->value[__builtin_ctz(lanes)];
    if (int(thread_rank()) == from) slot = uint64_t(value);
    sync();
    T result = T(slot);
    sync();
    return result;
  }
};

inline coalesced_group coalesced_threads() {
  if (!shim::warp) return {1};
  return {uint32_t((uint64_t(1) << shim::warp->lanes) - 1)};
}

template <typename Label>
inline coalesced_group labeled_partition(const coalesced_group& group, Label label) {
  if (!shim::warp) return group;
  shim::warp->label[shim::lane] = (unsigned long long)label;
  group.sync();
  uint32_t mine = 0;
  for (unsigned i = 0; i < shim::warp->lanes; i++) {
    if (shim::warp->label[i] == (unsigned long long)label) mine |= 1u << i;
  }
  group.sync();
  return {mine};
}

}  // namespace cooperative_groups
