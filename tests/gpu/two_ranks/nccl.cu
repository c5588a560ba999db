// Two ranks with NCCL's library and a GPU each, on one or two hosts: kernels call NCCL's device API over the GIN
// plugin. The same source compiles with NCCL's own EFA backend and, with -include ferrogin/nccl_gin.cuh, with
// ferrogin's. See build.sh, and README.md to start it.
//
// Prints PASS or FAIL for each phase, and the counts. Status 0: all passed; 1: something failed; 2: not two ranks; 3,
// with a line that says why: this machine can't run it.
#include <nccl.h>
#include <nccl_device.h>

#include <cuda_runtime.h>
#include <dlfcn.h>

#include "launcher.h"
#include "phases.cuh"

static const int usual_rounds = 1000, storm_rounds = 50;
// Seconds that a rank waits for the other one, and that the whole test may take.
static const int meeting_limit = 60, test_limit = 300;

// Both libraries are loaded at run time, so that a machine without one gets a line that says so.
#define DRIVER_CALLS(call) \
  call(cuInit, int, (unsigned)) call(cuDeviceGetCount, int, (int*)) call(cuDriverGetVersion, int, (int*)) \
  call(cuDeviceGetName, int, (char*, int, int)) call(cuDeviceGetPCIBusId, int, (char*, int, int)) \
  call(cuDeviceGetAttribute, int, (int*, int, int))
#define NCCL_CALLS(call) \
  call(ncclGetVersion, ncclResult_t, (int*)) call(ncclGetUniqueId, ncclResult_t, (ncclUniqueId*)) \
  call(ncclCommInitRank, ncclResult_t, (ncclComm_t*, int, ncclUniqueId, int)) \
  call(ncclMemAlloc, ncclResult_t, (void**, size_t)) call(ncclMemFree, ncclResult_t, (void*)) \
  call(ncclCommWindowRegister, ncclResult_t, (ncclComm_t, void*, size_t, ncclWindow_t*, int)) \
  call(ncclCommWindowDeregister, ncclResult_t, (ncclComm_t, ncclWindow_t)) \
  call(ncclDevCommCreate, ncclResult_t, (ncclComm_t, ncclDevCommRequirements_t const*, ncclDevComm_t*)) \
  call(ncclDevCommDestroy, ncclResult_t, (ncclComm_t, ncclDevComm_t const*)) \
  call(ncclCommGetAsyncError, ncclResult_t, (ncclComm_t, ncclResult_t*)) call(ncclCommDestroy, ncclResult_t, (ncclComm_t)) \
  call(ncclGetErrorString, const char*, (ncclResult_t)) call(ncclGetLastError, const char*, (ncclComm_t))
#define POINTER(name, result, arguments) result(*name) arguments;
#define FIND(name, result, arguments) \
  if (!(library.name = reinterpret_cast<result(*) arguments>(dlsym(handle, #name)))) return #name;

static struct Driver {
  DRIVER_CALLS(POINTER)
} driver;
static struct Nccl {
  NCCL_CALLS(POINTER)
} api;

// The name of a missing function, or null.
static const char* find(void* handle, Driver& library) {
  DRIVER_CALLS(FIND)
  return nullptr;
}
static const char* find(void* handle, Nccl& library) {
  NCCL_CALLS(FIND)
  return nullptr;
}

static Launcher launcher;
static long rank = 0;
// Set once the ranks have met: from then on both know the same, and only rank 0 prints.
static bool has_met = false;

// This machine can't run the test. One rank per host says so.
template <typename... Values>
[[noreturn]] static void refuse(const char* format, Values... values) {
  if (has_met ? rank == 0 : launcher.local.value == 0) {
    printf("two_ranks: ");
    printf(format, values...);
    printf("\n");
    fflush(stdout);
  } else {
    // A launcher ends the job when the first rank fails, so the line must come first.
    sleep(1);
  }
  _exit(3);
}

template <typename... Values>
[[noreturn]] static void fail(const char* format, Values... values) {
  printf("FAIL rank %ld: ", rank);
  printf(format, values...);
  printf("\n");
  fflush(stdout);
  _exit(1);
}

#define CUDA(call)                                                                        \
  do {                                                                                    \
    cudaError_t error_ = (call);                                                          \
    if (error_ != cudaSuccess) fail("%s: %s", #call, cudaGetErrorString(error_));         \
  } while (0)
#define NCCL(name, ...)                                                                   \
  do {                                                                                    \
    ncclResult_t result_ = api.name(__VA_ARGS__);                                        \
    if (result_ != ncclSuccess) {                                                         \
      fail("%s: %s: %s; NCCL_DEBUG=INFO says more", #name, api.ncclGetErrorString(result_), api.ncclGetLastError(nullptr)); \
    }                                                                                     \
  } while (0)

__global__ void run(ncclDevComm comm, ncclWindow_t window, Arguments arguments, Phase phase) {
  run_phase(comm, window, arguments, phase);
}

// A GPU and its driver, as the ranks exchange them.
struct Gpu {
  int number, major, minor, version;
  char name[64], address[32];
};

// Chooses the local rank's GPU, with driver calls only.
static Gpu choose_gpu() {
  Gpu gpu{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) refuse("no CUDA driver on this machine (libcuda.so.1); README.md of tests/gpu has the commands without a GPU");
  if (const char* missing = find(library, driver)) refuse("the CUDA driver is too old: it has no %s", missing);
  int count = 0, error = driver.cuInit(0);
  if (error == 0) error = driver.cuDeviceGetCount(&count);
  if (error != 0 || count == 0) refuse("the CUDA driver finds no GPU (error %d); nvidia-smi should list one", error);
  gpu.number = int(launcher.local.value % count);
  driver.cuDeviceGetName(gpu.name, int(sizeof(gpu.name)), gpu.number);
  driver.cuDeviceGetPCIBusId(gpu.address, int(sizeof(gpu.address)), gpu.number);
  driver.cuDeviceGetAttribute(&gpu.major, cudaDevAttrComputeCapabilityMajor, gpu.number);
  driver.cuDeviceGetAttribute(&gpu.minor, cudaDevAttrComputeCapabilityMinor, gpu.number);
  driver.cuDriverGetVersion(&gpu.version);
  printf("rank %ld: local rank %ld (%s) uses GPU %d of %d: %s at %s, driver of CUDA %d.%d\n", rank, launcher.local.value,
         launcher.local.name, gpu.number, count, gpu.name, gpu.address, gpu.version / 1000, gpu.version % 1000 / 10);
  fflush(stdout);
  return gpu;
}

static void check_gpu(const Gpu& gpu) {
  if (gpu.major * 10 + gpu.minor < 75) {
    refuse("%s has compute capability %d.%d, and CUDA %d makes code for 7.5 and later: take a newer GPU", gpu.name, gpu.major,
           gpu.minor, CUDART_VERSION / 1000);
  }
  int needed = CUDART_VERSION / 1000;
  if (gpu.version / 1000 < needed) {
    refuse("the driver is of CUDA %d.%d, and this program and NCCL need one of CUDA %d.0: install driver 580 or newer",
           gpu.version / 1000, gpu.version % 1000 / 10, needed);
  }
}

static void load_nccl() {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (!library) refuse("%s; pip install nvidia-nccl-cu13, and add its directory nvidia/nccl/lib to LD_LIBRARY_PATH", dlerror());
  const char* missing = find(library, api);
  int version = 0;
  if (!missing) api.ncclGetVersion(&version);
  if (missing || version < NCCL_VERSION_CODE) {
    refuse("the program was compiled with NCCL %d.%d.%d, and libnccl.so.2 is older (%s): take that release or a newer one", NCCL_MAJOR,
           NCCL_MINOR, NCCL_PATCH, missing ? missing : std::to_string(version).c_str());
  }
  if (!getenv("NCCL_GIN_PLUGIN")) refuse("NCCL_GIN_PLUGIN is not set: export NCCL_GIN_PLUGIN=$PWD/dist/libnccl-gin-ferrogin.so");
  if (rank == 0) printf("rank 0: NCCL %d.%d.%d, program of NCCL %d.%d.%d\n", version / 10000, version % 10000 / 100, version % 100, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
}

int main() {
  if (!launcher.started_two_ranks()) return 2;
  rank = launcher.rank.value;
  const int other = int(1 - rank);
  // Ends a rank whose peer is gone; the phases have their own limits.
  alarm(test_limit);
  Gpu gpu = choose_gpu();
  ncclUniqueId id{};
  // Ranks on two hosts meet at NCCL_COMM_ID, as in NCCL.
  if (!getenv("NCCL_COMM_ID")) {
    Meeting meeting(rank, meeting_limit);
    Gpu others{};
    if (!meeting.is_open() || !meeting.exchange(&gpu, &others, sizeof(gpu))) {
      fail("rank %d is not on this host, or did not come within %d s; across hosts, set NCCL_COMM_ID=HOST:PORT, a free port of rank 0's host",
           other, meeting_limit);
    }
    has_met = true;
    const char* shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (strcmp(gpu.address, others.address) == 0 && (!shared || strcmp(shared, "1") != 0)) {
      refuse("both ranks have the GPU %s at %s: take a machine with two, or set NCCL_MULTI_RANK_GPU_ENABLE=1", gpu.name, gpu.address);
    }
    load_nccl();
    check_gpu(gpu);
    check_gpu(others);
    if (rank == 0) NCCL(ncclGetUniqueId, &id);
    ncclUniqueId received{};
    if (!meeting.exchange(&id, &received, sizeof(id))) fail("rank %d ended during the meeting", other);
    if (rank != 0) id = received;
  } else {
    load_nccl();
    check_gpu(gpu);
    NCCL(ncclGetUniqueId, &id);
  }
  // The plugin's type, and none of NCCL's own kernels, which need signals that EFA lacks.
  setenv("NCCL_GIN_TYPE", "5", 0);
  setenv("NCCL_SYM_GIN_KERNELS_ENABLE", "0", 0);
  CUDA(cudaSetDevice(gpu.number));
  ncclComm_t comm;
  NCCL(ncclCommInitRank, &comm, 2, id, int(rank));

  void* memory = nullptr;
  NCCL(ncclMemAlloc, &memory, window_bytes);
  CUDA(cudaMemset(memory, 0, window_bytes));
  CUDA(cudaMemset(static_cast<char*>(memory) + source_at, source_byte(int(rank)), window_bytes - source_at));
  CUDA(cudaDeviceSynchronize());
  ncclWindow_t window;
  NCCL(ncclCommWindowRegister, comm, memory, window_bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginForceEnable = true;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  needs.ginContextCount = 1;
  needs.ginSignalCount = 4;
  needs.ginCounterCount = 1;
  needs.ginStrongSignalsRequired = false;
  needs.ginVaSignalsRequired = false;
  ncclDevComm device;
  NCCL(ncclDevCommCreate, comm, &needs, &device);

  Result* result = nullptr;
  CUDA(cudaMallocHost(&result, sizeof(*result)));
  int passed = 0;
  for (int phase = 0; phase < PHASES && passed == phase; phase++) {
    *result = {};
    bool is_storm = phase == STORM;
    Arguments arguments = {int(rank), is_storm ? storm_rounds : usual_rounds, static_cast<char*>(memory), result};
    run<<<is_storm ? blocks : 1, is_storm ? block_threads : 1>>>(device, window, arguments, Phase(phase));
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    passed += report(int(rank), Phase(phase), arguments.rounds, *result);
  }
  ncclResult_t failed = ncclSuccess;
  NCCL(ncclCommGetAsyncError, comm, &failed);
  if (failed != ncclSuccess) fail("the communicator failed: %s", api.ncclGetErrorString(failed));
  // The phases after a failed one didn't run.
  printf("rank %ld: %d of %d phases passed\n", rank, passed, int(PHASES));
  fflush(stdout);
  // A failed rank's peer may be gone, so nothing is torn down, as that would involve it.
  if (passed != PHASES) _exit(1);
  NCCL(ncclDevCommDestroy, comm, &device);
  NCCL(ncclCommWindowDeregister, comm, window);
  NCCL(ncclCommDestroy, comm);
  NCCL(ncclMemFree, memory);
  return 0;
}
