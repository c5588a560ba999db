// Posts from a kernel through one of three forms of the device code: ferrogin/gin.cuh, ncclGin with ferrogin's backend
// (-DBY_NCCL), or ncclGin with NCCL's own (-DBY_NCCL -DNCCL_OWN_BACKEND). The host program is benches/benches/gpu.rs.
#include <ferrogin/gin.h>

#include <stdint.h>

#if !defined(BY_NCCL)
#include <ferrogin/gin.cuh>
#elif defined(NCCL_OWN_BACKEND)
#include <nccl_device.h>
#else
#include <ferrogin/nccl_gin.cuh>
#endif

// `OPERATIONS` of the host program.
enum class Operation : uint32_t { PutValue, Put, Burst, Flush };

static constexpr uint32_t peer = 1, bytes_of_put = 1024, burst = 16;

#ifdef BY_NCCL

__device__ ncclDevComm comm;
__device__ ncclWindow_vidmem view;

extern "C" __global__ void setup(void* handle, void* window, uint32_t contexts) {
  comm.rank = 0;
  comm.nRanks = 2;
  comm.ginConnectionCount = 1;
  comm.ginContextCount = contexts;
  comm.ginConnectionStride = 1;
  comm.ginContextStride = 1;
  comm.ginNetDeviceTypes[0] = NCCL_NET_DEVICE_GIN_EFA_GDA;
  comm.ginHandles[0] = handle;
  view.numSegments = 1;
  view.ginWinsDefaultBackend[0] = window;
}

struct Poster {
  ncclGin gin;
  ncclTeam world;

  __device__ Poster(void*, void*, uint32_t context) : gin(comm, int(context)), world(ncclTeamWorld(comm)) {}
  static __device__ uint32_t options(bool more) {
    return more ? ncclGinOptFlagsAggregateRequests : ncclGinOptFlagsDefault;
  }
  __device__ void value(uint64_t offset, uint64_t word, bool more) {
    gin.putValue(world, int(peer), &view, offset, word, ncclGin_None{}, ncclCoopThread(), ncclGin_None{},
                 cuda::thread_scope_thread, cuda::thread_scope_device, options(more));
  }
  __device__ void put(uint64_t offset) {
    gin.put(world, int(peer), &view, offset, &view, offset, bytes_of_put);
  }
  __device__ void flush() {
    gin.flush(ncclCoopThread());
  }
};

#else

extern "C" __global__ void setup(void*, void*, uint32_t) {}

struct Poster {
  ferrogin::Gin<> gin;
  fgin_window window;

  __device__ Poster(void* handle, void* window_, uint32_t context) : gin(handle, context), window(window_) {}
  __device__ void value(uint64_t offset, uint64_t word, bool more) {
    gin.putValue(peer, window, offset, word, ferrogin::None{}, ferrogin::Thread{}, more ? FGIN_AGGREGATE : FGIN_DEFAULT);
  }
  __device__ void put(uint64_t offset) {
    gin.put(peer, window, offset, window, offset, bytes_of_put);
  }
  __device__ void flush() {
    gin.flush();
  }
};

#endif

static __device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// Every thread posts `count` times on the queues of context 0 or, with `spread`, of its block's context. `times` gets
// each thread's start and end.
extern "C" __global__ void posts(void* handle, void* window, uint32_t spread, Operation operation, uint32_t count, uint64_t* times) {
  Poster poster(handle, window, spread ? blockIdx.x : 0);
  uint32_t number = blockIdx.x * blockDim.x + threadIdx.x;
  uint64_t begin = now();
  for (uint32_t i = 0; i < count; i++) {
    uint64_t offset = uint64_t(i % 64) * bytes_of_put;
    switch (operation) {
      case Operation::PutValue: poster.value(offset, i, false); break;
      case Operation::Put: poster.put(offset); break;
      case Operation::Burst: poster.value(offset, i, i % burst != burst - 1); break;
      default:
        poster.value(offset, i, false);
        poster.flush();
    }
  }
  uint64_t end = now();
  poster.flush();
  times[2 * number] = begin;
  times[2 * number + 1] = end;
}
