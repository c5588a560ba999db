// The phases on the software GPU: clang compiles the kernels to PTX; the host uses the driver API and, in place of
// NCCL, the host API. build.sh --software compiles both; PTX lists the files to link. With THROUGH_PROXY, kernels use
// the RMA plugin through NCCL's proxy.
#ifdef __CUDACC__

#if defined(NCCL_OWN_BACKEND) || defined(THROUGH_PROXY)
#include <nccl_device.h>
#else
#include <ferrogin/nccl_gin.cuh>
#endif

#include "phases.cuh"

// What a program gets from ncclDevCommCreate and ncclCommWindowRegister.
__device__ ncclDevComm comm;
__device__ ncclWindow_vidmem view;

extern "C" __global__ void setup(void* handle, void* window, int rank) {
  comm.rank = rank;
  comm.nRanks = 2;
  comm.ginConnectionCount = comm.ginContextCount = comm.ginConnectionStride = comm.ginContextStride = 1;
  comm.ginSignalCount = 4;
  comm.ginCounterCount = 1;
#ifdef THROUGH_PROXY
  comm.ginNetDeviceTypes[0] = NCCL_NET_DEVICE_GIN_PROXY;
#else
  comm.ginNetDeviceTypes[0] = NCCL_NET_DEVICE_GIN_EFA_GDA;
#endif
  comm.ginHandles[0] = handle;
  view.worldRank = rank;
  view.numSegments = 1;
  view.ginWinsDefaultBackend[0] = window;
}

extern "C" __global__ void run(Arguments arguments, Phase phase) {
  run_phase(comm, &view, arguments, phase);
}

#else

extern "C" {
#include <cuda.h>
}

#include <ferrogin/host.hpp>

#include <string>

#include "launcher.h"
#include "phases.cuh"

#ifdef THROUGH_PROXY
#include "proxy_host.h"
#endif

// The interpreter executes a few million instructions a second.
static const int usual_rounds = 40, storm_rounds = 10;

static void must(CUresult result, const char* call) {
  const char* name = nullptr;
  if (result == CUDA_SUCCESS) return;
  cuGetErrorName(result, &name);
  throw ferrogin::Error(FERROGIN_CUDA_ERROR, (std::string(call) + " failed: " + (name ? name : "unknown")).c_str());
}
#define MUST(call) must(call, #call)

int main() try {
  Launcher launcher;
  if (!launcher.started_two_ranks()) return 2;
  int rank = int(launcher.rank.value), count = 0;
  if (cuInit(0) != CUDA_SUCCESS || cuDeviceGetCount(&count) != CUDA_SUCCESS || count == 0) {
    if (launcher.local.value == 0) printf("two_ranks: the CUDA driver finds no GPU: start it below ferrogin gpu --\n");
    return 3;
  }
  int number = int(launcher.local.value % count);
  CUcontext context;
  MUST(cuDevicePrimaryCtxRetain(&context, number));
  MUST(cuCtxSetCurrent(context));
  char name[64];
  MUST(cuDeviceGetName(name, sizeof(name), number));
  printf("rank %d: local rank %ld (%s) uses GPU %d of %d: %s\n", rank, launcher.local.value, launcher.local.name, number, count, name);

  CUlinkState link;
  CUmodule module;
  CUfunction setup, run;
  void *image, *memory_of_result;
  size_t bytes;
  MUST(cuLinkCreate(0, nullptr, nullptr, &link));
  for (const char* file : PTX) must(cuLinkAddFile(link, CU_JIT_INPUT_PTX, file, 0, nullptr, nullptr), file);
  MUST(cuLinkComplete(link, &image, &bytes));
  MUST(cuModuleLoadData(&module, image));
  MUST(cuLinkDestroy(link));
  MUST(cuModuleGetFunction(&setup, module, "setup"));
  MUST(cuModuleGetFunction(&run, module, "run"));
  MUST(cuMemHostAlloc(&memory_of_result, sizeof(Result), 0));
  auto* result = new (memory_of_result) Result{};

  int passed = 0;
  auto comm = ferrogin::Comm::open();
  auto window = comm.allocate(window_bytes, ferrogin::Memory::Device);
  auto memory = static_cast<char*>(window.address());
  MUST(cuMemsetD8(CUdeviceptr(memory), 0, window_bytes));
  MUST(cuMemsetD8(CUdeviceptr(memory) + source_at, source_byte(rank), window_bytes - source_at));
#ifdef THROUGH_PROXY
  auto proxy = through_proxy(comm, memory, window_bytes, 1, 4, 1);
  ProxyRanks& gin = *proxy;
  void* handle_of_window = gin.window();
#else
  ferrogin::ContextOptions options;
  options.signals = 4;
  options.counters = 1;
  auto gin = comm.context(options);
  void* handle_of_window = window.handle();
#endif
  auto launch = [](CUfunction kernel, unsigned grid, unsigned block, auto... values) {
    void* parameters[] = {&values...};
    MUST(cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, nullptr, parameters, nullptr));
    MUST(cuCtxSynchronize());
  };
  launch(setup, 1, 1, static_cast<void*>(gin.handle()), handle_of_window, rank);
  comm.barrier();
  for (int phase = 0; phase < PHASES && passed == phase; phase++) {
    *result = {};
    bool is_storm = phase == STORM;
    Arguments arguments = {rank, is_storm ? storm_rounds : usual_rounds, memory, result};
    launch(run, is_storm ? blocks : 1, is_storm ? block_threads : 1, arguments, Phase(phase));
    passed += report(rank, Phase(phase), arguments.rounds, *result);
  }
#ifdef THROUGH_PROXY
  if (gin.has_failed()) throw std::runtime_error("an operation of the RMA plugin has failed");
#else
  gin.check();
#endif
  printf("rank %d: %d of %d phases passed\n", rank, passed, int(PHASES));
  fflush(stdout);
  if (passed != PHASES) _exit(1);
  comm.barrier();
  return 0;
} catch (const std::exception& error) {
  printf("FAIL two_ranks: %s\n", error.what());
  return 1;
}

#endif
