// What NCCL's device headers expect from nvcc, for clang without NVIDIA's headers. Next to this file are the parts of CUDA's headers that
// NCCL's headers include by name.
#pragma once

#include <assert.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#define CUDA_VERSION 13000
#define DEVICE __device__ inline __attribute__((always_inline))

struct alignas(16) __attribute__((may_alias)) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) ulong2 {
  unsigned long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

DEVICE void* memcpy(void* to, const void* from, size_t bytes) {
  return __builtin_memcpy(to, from, bytes);
}
DEVICE void* memset(void* to, int value, size_t bytes) {
  return __builtin_memset(to, value, bytes);
}
template <typename T>
DEVICE T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
DEVICE T max(T a, T b) {
  return a < b ? b : a;
}

DEVICE uint32_t __ldg(const uint32_t* p) {
  return __nvvm_ldg_ui(p);
}
DEVICE unsigned long __ldg(const unsigned long* p) {
  return __nvvm_ldg_ul(p);
}
DEVICE unsigned long long __ldg(const unsigned long long* p) {
  return __nvvm_ldg_ull(p);
}
template <typename T>
DEVICE T __ldg(const T* p) {
  return *p;
}

// NCCL's store of descriptors for its proxy, which looks for a flag in each 8-byte word.
DEVICE void __stwt(uint4* to, const uint4& value) {
  auto* words = (uint64_t*)to;
  __scoped_atomic_store_n(words, uint64_t(value.y) << 32 | value.x, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
  __scoped_atomic_store_n(words + 1, uint64_t(value.w) << 32 | value.z, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

DEVICE int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
DEVICE int __ffs(int bits) {
  return __builtin_ffs(bits);
}
DEVICE unsigned __fns(unsigned mask, unsigned base, int offset) {
  return __nvvm_fns(mask, base, offset);
}
DEVICE unsigned __activemask() {
  return __nvvm_activemask();
}
DEVICE int __shfl_sync(unsigned mask, int value, int lane, int width = 32) {
  return __nvvm_shfl_sync_idx_i32(mask, value, lane, (32 - width) << 8 | 31);
}
DEVICE unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
DEVICE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return __nvvm_mulhi_ull(a, b);
}
DEVICE void __threadfence_block() {
  __nvvm_membar_cta();
}
DEVICE void __threadfence() {
  __nvvm_membar_gl();
}
DEVICE void __threadfence_system() {
  __nvvm_membar_sys();
}
DEVICE size_t __cvta_generic_to_global(const void* p) {
  return size_t((const __attribute__((address_space(1))) void*)p);
}
DEVICE long long clock64() {
  return __nvvm_read_ptx_sreg_clock64();
}
DEVICE void __trap() {
  __builtin_trap();
}
