// What NCCL's device headers expect from nvcc, for clang without NVIDIA's headers. Next to this file are the parts of
// CUDA's headers that NCCL's headers include by name.
#pragma once

#include <assert.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#define CUDA_VERSION 13000
#define __constant__ __attribute__((constant))
#define __grid_constant__ __attribute__((grid_constant))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define FGIN_CLANG __device__ inline __attribute__((always_inline))

// CUDA's vectors, which programs also use to copy other types.
#define FGIN_VECTOR(name, type, bytes, ...) \
  struct alignas(bytes) __attribute__((may_alias)) name { \
    type __VA_ARGS__; \
  }
FGIN_VECTOR(int2, int, 8, x, y);
FGIN_VECTOR(int4, int, 16, x, y, z, w);
FGIN_VECTOR(uint2, unsigned, 8, x, y);
FGIN_VECTOR(uint4, unsigned, 16, x, y, z, w);
FGIN_VECTOR(float2, float, 8, x, y);
FGIN_VECTOR(float4, float, 16, x, y, z, w);
FGIN_VECTOR(longlong2, long long, 16, x, y);
FGIN_VECTOR(ulong2, unsigned long, 16, x, y);
FGIN_VECTOR(ulonglong2, unsigned long long, 16, x, y);
FGIN_VECTOR(longlong4_32a, long long, 32, x, y, z, w);
#undef FGIN_VECTOR

inline __host__ __device__ int2 make_int2(int x, int y) {
  return {x, y};
}
inline __host__ __device__ int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
inline __host__ __device__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline __host__ __device__ float2 make_float2(float x, float y) {
  return {x, y};
}
inline __host__ __device__ longlong4_32a make_longlong4_32a(long long x, long long y, long long z, long long w) {
  return {x, y, z, w};
}
inline __host__ __device__ float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

extern "C" __device__ int printf(const char* format, ...);

FGIN_CLANG void* memcpy(void* to, const void* from, size_t bytes) {
  return __builtin_memcpy(to, from, bytes);
}
FGIN_CLANG void* memset(void* to, int value, size_t bytes) {
  return __builtin_memset(to, value, bytes);
}
template <typename T>
FGIN_CLANG T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
FGIN_CLANG T max(T a, T b) {
  return a < b ? b : a;
}

FGIN_CLANG uint32_t __ldg(const uint32_t* p) {
  return __nvvm_ldg_ui(p);
}
FGIN_CLANG unsigned long __ldg(const unsigned long* p) {
  return __nvvm_ldg_ul(p);
}
FGIN_CLANG unsigned long long __ldg(const unsigned long long* p) {
  return __nvvm_ldg_ull(p);
}
template <typename T>
FGIN_CLANG T __ldg(const T* p) {
  return *p;
}

// NCCL's store of descriptors for its proxy, which looks for a flag in each 8-byte word.
FGIN_CLANG void __stwt(uint4* to, const uint4& value) {
  auto* words = (uint64_t*)to;
  __scoped_atomic_store_n(words, uint64_t(value.y) << 32 | value.x, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
  __scoped_atomic_store_n(words + 1, uint64_t(value.w) << 32 | value.z, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

FGIN_CLANG int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
FGIN_CLANG int __popcll(unsigned long long bits) {
  return __builtin_popcountll(bits);
}
FGIN_CLANG int __ffs(int bits) {
  return __builtin_ffs(bits);
}
FGIN_CLANG int __ffsll(long long bits) {
  return __builtin_ffsll(bits);
}
FGIN_CLANG unsigned __fns(unsigned mask, unsigned base, int offset) {
  return __nvvm_fns(mask, base, offset);
}

FGIN_CLANG unsigned __activemask() {
  return __nvvm_activemask();
}
FGIN_CLANG unsigned __ballot_sync(unsigned mask, int predicate) {
  return __nvvm_vote_ballot_sync(mask, predicate);
}
FGIN_CLANG int __all_sync(unsigned mask, int predicate) {
  return __nvvm_vote_all_sync(mask, predicate);
}
FGIN_CLANG int __any_sync(unsigned mask, int predicate) {
  return __nvvm_vote_any_sync(mask, predicate);
}
template <typename T>
FGIN_CLANG unsigned __match_any_sync(unsigned mask, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
  if constexpr (sizeof(T) == 4) return __nvvm_match_any_sync_i32(mask, __builtin_bit_cast(int, value));
  else return __nvvm_match_any_sync_i64(mask, __builtin_bit_cast(long long, value));
}
FGIN_CLANG unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return unsigned(__nvvm_redux_sync_add(int(value), int(mask)));
}
FGIN_CLANG unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return unsigned(__nvvm_redux_sync_or(int(value), int(mask)));
}
FGIN_CLANG int __syncthreads_or(int predicate) {
  return __nvvm_bar0_or(predicate);
}

// Shuffles of 4 or 8 bytes.
#define FGIN_SHUFFLE(name, builtin, Lane, clamp) \
  template <typename T> \
  FGIN_CLANG T name(unsigned mask, T value, Lane lane, int width = 32) { \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes"); \
    int segment = (32 - width) << 8 | clamp; \
    if constexpr (sizeof(T) == 4) { \
      return __builtin_bit_cast(T, builtin(mask, __builtin_bit_cast(int, value), int(lane), segment)); \
    } else { \
      int2 halves = __builtin_bit_cast(int2, value); \
      int x = builtin(mask, halves.x, int(lane), segment), y = builtin(mask, halves.y, int(lane), segment); \
      return __builtin_bit_cast(T, int2{x, y}); \
    } \
  }
FGIN_SHUFFLE(__shfl_sync, __nvvm_shfl_sync_idx_i32, int, 31)
FGIN_SHUFFLE(__shfl_up_sync, __nvvm_shfl_sync_up_i32, unsigned, 0)
FGIN_SHUFFLE(__shfl_down_sync, __nvvm_shfl_sync_down_i32, unsigned, 31)
FGIN_SHUFFLE(__shfl_xor_sync, __nvvm_shfl_sync_bfly_i32, int, 31)
#undef FGIN_SHUFFLE

// Read-modify-writes are PTX, because clang 22 drops their memory order and their scope (docs/found-elsewhere.md).
// `operation` has both.
#define FGIN_ATOM(operation, type, letter, p, value) \
  ({ \
    type found_; \
    asm volatile("atom" operation " %0, [%1], %2;" : "=" letter(found_) : "l"(p), letter(value) : "memory"); \
    found_; \
  })
#define FGIN_ATOMIC(name, operation) \
  FGIN_CLANG unsigned name(unsigned* p, unsigned value) { \
    return FGIN_ATOM(operation ".u32", unsigned, "r", p, value); \
  } \
  FGIN_CLANG int name(int* p, int value) { \
    return FGIN_ATOM(operation ".s32", int, "r", p, value); \
  } \
  FGIN_CLANG unsigned long long name(unsigned long long* p, unsigned long long value) { \
    return FGIN_ATOM(operation ".u64", unsigned long long, "l", p, value); \
  }
FGIN_ATOMIC(atomicAdd, ".relaxed.gpu.add")
FGIN_ATOMIC(atomicAdd_block, ".relaxed.cta.add")
FGIN_ATOMIC(atomicAdd_system, ".relaxed.sys.add")
FGIN_ATOMIC(atomicMax, ".relaxed.gpu.max")
FGIN_ATOMIC(atomicMin, ".relaxed.gpu.min")
#undef FGIN_ATOMIC
FGIN_CLANG float atomicAdd(float* p, float value) {
  return FGIN_ATOM(".relaxed.gpu.add.f32", float, "f", p, value);
}
FGIN_CLANG int atomicSub(int* p, int value) {
  return atomicAdd(p, -value);
}
FGIN_CLANG int atomicSub_system(int* p, int value) {
  return atomicAdd_system(p, -value);
}
#define FGIN_ATOMIC(name, operation) \
  template <typename T> \
  FGIN_CLANG T name(T* p, T value) { \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes"); \
    if constexpr (sizeof(T) == 4) { \
      return __builtin_bit_cast(T, FGIN_ATOM(operation ".b32", unsigned, "r", p, __builtin_bit_cast(unsigned, value))); \
    } else { \
      return __builtin_bit_cast(T, FGIN_ATOM(operation ".b64", uint64_t, "l", p, __builtin_bit_cast(uint64_t, value))); \
    } \
  }
FGIN_ATOMIC(atomicExch, ".relaxed.gpu.exch")
FGIN_ATOMIC(atomicExch_system, ".relaxed.sys.exch")
FGIN_ATOMIC(atomicAnd, ".relaxed.gpu.and")
FGIN_ATOMIC(atomicOr, ".relaxed.gpu.or")
#undef FGIN_ATOMIC
template <typename T>
FGIN_CLANG T atomicCAS(T* p, T expected, T value) {
  __scoped_atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return expected;
}

FGIN_CLANG unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
FGIN_CLANG unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return __nvvm_mulhi_ull(a, b);
}
FGIN_CLANG void __threadfence_block() {
  __nvvm_membar_cta();
}
FGIN_CLANG void __threadfence() {
  __nvvm_membar_gl();
}
FGIN_CLANG void __threadfence_system() {
  __nvvm_membar_sys();
}
FGIN_CLANG size_t __cvta_generic_to_shared(const void* p) {
  return size_t((const __attribute__((address_space(3))) void*)p);
}
FGIN_CLANG size_t __cvta_generic_to_global(const void* p) {
  return size_t((const __attribute__((address_space(1))) void*)p);
}
FGIN_CLANG long long clock64() {
  return __nvvm_read_ptx_sreg_clock64();
}
// Programmatic dependent launch, of kernels that were launched with the attribute of programmatic stream serialization.
FGIN_CLANG void cudaGridDependencySynchronize() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
FGIN_CLANG void cudaTriggerProgrammaticLaunchCompletion() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
FGIN_CLANG void __trap() {
  __builtin_trap();
}

FGIN_CLANG float fmaxf(float a, float b) {
  return __nvvm_fmax_f(a, b);
}
FGIN_CLANG float fminf(float a, float b) {
  return __nvvm_fmin_f(a, b);
}
FGIN_CLANG float fabsf(float a) {
  return __builtin_fabsf(a);
}
FGIN_CLANG bool __isinf(float a) {
  return fabsf(a) == __builtin_inff();
}
FGIN_CLANG unsigned __float2uint_rd(float a) {
  return __nvvm_f2ui_rm(a);
}
