// What NCCL's device headers expect nvcc to provide, for a host C++ compiler: one CPU thread is one CUDA thread that is
// alone in its warp and block. Written for this test; nothing here comes from the CUDA toolkit.
#pragma once

#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))

// Nothing here calls the functions in NCCL's headers that use shared memory or other lanes.
struct ulonglong2 {
  unsigned long long x, y;
} __attribute__((aligned(16)));

// NCCL copies a descriptor's words as this type.
struct __attribute__((may_alias, aligned(16))) uint4 {
  unsigned x, y, z, w;
};

struct ulong2 {
  unsigned long x, y;
} __attribute__((aligned(16)));

struct shim_dim3 {
  unsigned x = 0, y = 0, z = 0;
};
// NCCL puts threadIdx.x into a WQE's request id, so each thread of the test has its own.
#ifdef SHIM_BARE
inline const shim_dim3 threadIdx;
#else
inline thread_local shim_dim3 threadIdx;
#endif
inline const shim_dim3 blockDim = {1, 1, 1};

using std::max;
using std::min;

template <typename T>
inline T __ldg(const T* p) {
  return *p;
}
inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline unsigned __fns(unsigned, unsigned, int) {
  return 0;
}
inline unsigned __activemask() {
  return 1;
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int, int = 32) {
  return value;
}
inline void __syncwarp(unsigned = ~0u) {}
inline void __syncthreads() {}
inline void __threadfence_block() {
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
}
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void* __cvta_generic_to_global(const void* p) {
  return const_cast<void*>(p);
}
// Nanoseconds here; NCCL counts cycles.
inline long long clock64() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

namespace shim {

#ifdef SHIM_BARE
// For counting instructions: a single thread, nothing added to NCCL's code, and no hook.
inline void spun() {}
inline void progressed() {}
inline void mmio_store_u32(uint64_t addr, uint32_t value) {
  __atomic_store_n((uint32_t*)addr, value, __ATOMIC_RELAXED);
}
inline void mmio_store_u64(uint64_t addr, uint64_t value) {
  __atomic_store_n((uint64_t*)addr, value, __ATOMIC_RELAXED);
}
#else
// NCCL's spin loops never yield. Many loads in a row without a store count as spinning: they yield, and later sleep,
// because yielding alone collapses when there are more threads than cores.
inline thread_local uint32_t loads_in_a_row = 0;

inline void spun() {
  uint32_t n = ++loads_in_a_row;
  if (n < 64) return;
  if (n < 512) {
    if (n % 16 == 0) sched_yield();
    return;
  }
  usleep(20);
}
inline void progressed() {
  loads_in_a_row = 0;
}

// Every MMIO store in NCCL's device code ends up here; a test that plays the card hooks in.
inline void (*mmio_hook)(uint64_t addr, uint64_t value, unsigned bytes) = nullptr;

inline void mmio_store_u32(uint64_t addr, uint32_t value) {
  progressed();
  __atomic_store_n((uint32_t*)addr, value, __ATOMIC_RELEASE);
  if (mmio_hook) mmio_hook(addr, value, 4);
}
inline void mmio_store_u64(uint64_t addr, uint64_t value) {
  progressed();
  __atomic_store_n((uint64_t*)addr, value, __ATOMIC_RELAXED);
  if (mmio_hook) mmio_hook(addr, value, 8);
}
#endif
inline void red_add_u64(uint64_t* p, uint64_t v) {
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

}  // namespace shim

// How NCCL stores descriptors: each 8-byte word has a flag for the reader.
inline void __stwt(uint4* to, const uint4& value) {
  uint64_t words[2];
  memcpy(words, &value, sizeof(words));
  shim::progressed();
  for (int i = 0; i < 2; i++) __atomic_store_n((uint64_t*)to + i, words[i], __ATOMIC_RELEASE);
}
