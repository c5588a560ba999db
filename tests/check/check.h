// Shared by the kernels of this directory. Each file has kernels with one mistake each, and with -DREPAIRED their repaired twins. A comment
// `CHECK kind` marks the lines that the report of the wrong kernel names.
#pragma once

#include <cstdlib>

#include <ferrogin/gin.cuh>

using namespace ferrogin;

// What the driver passes to every kernel: a window of 64 KiB, memory of this GPU (all zero), and two ranks that are each other's peers.
struct Args {
  void* handle;
  fgin_window window;
  char* bytes;      // the window's
  uint32_t* memory; // 4 KiB
  uint32_t* wrong;  // how many values were not the expected ones
  uint32_t rank, peer;
  fgin_window freed;    // in kernels named `freed_`: a window whose memory the driver frees after the kernel
};

#ifdef REPAIRED
#define FIX(...) __VA_ARGS__
#define BUG(...)
#else
#define FIX(...)
#define BUG(...) __VA_ARGS__
#endif

// 128 threads in one block, or in two if the name begins with `grid_`. After a kernel and a barrier of the ranks, the driver launches the one
// whose name has `_then` appended, if there is one.
#define KERNEL(name) extern "C" __global__ void name(Args a)

#define EXPECT(right) \
  do { \
    if (!(right)) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(a.wrong) : "memory"); \
  } while (0)

// Ordered accesses, as macros so that their line is the kernel's.
#define LOAD(sem, p) \
  ({ \
    uint32_t value_; \
    asm volatile("ld." sem ".b32 %0, [%1];" : "=r"(value_) : "l"(p) : "memory"); \
    value_; \
  })
// A plain load that stays where it is.
#define READ(x) LOAD("weak", &(x))
#define STORE(sem, p, v) asm volatile("st." sem ".b32 [%0], %1;" ::"l"(p), "r"(v) : "memory")
#define ADD(sem, p, v) asm volatile("red." sem ".global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory")
#define FENCE(scope) asm volatile("fence.acq_rel." scope ";" ::: "memory")
#define PTX(text, ...) asm volatile(text ::__VA_ARGS__ : "memory")
#define SHARED(p) uint32_t(reinterpret_cast<size_t>((__attribute__((address_space(3))) const void*)(p)))

// The 32-bit word at `offset` in the window.
#define WORD(offset) (*reinterpret_cast<uint32_t*>(a.bytes + (offset)))

__device__ inline bool is(unsigned thread) {
  return threadIdx.x == thread;
}

// One thread with a context, for kernels about requests.
#define ONE_THREAD(context) \
  Gin<> gin(a.handle, context); \
  if (threadIdx.x != 0) return

// Gives the peer's put something to read: 64 bytes at `offset` that begin with this rank's number.
#define FILL(offset) \
  for (int i_ = 0; i_ < 16; i_++) *(&WORD(offset) + i_) = 100 + a.rank
