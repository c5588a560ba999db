// Two ranks with the real libnccl, on one GPU or on two: kernels use NCCL's device API over the GIN plugin that NCCL selected. The same source
// compiles with NCCL's own EFA backend and, with -include ferrogin/nccl_gin.cuh, with ferrogin's.
//
// Status 0: all data arrived; 77: no GPU; any other status is a failure, which a line describes.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static constexpr int ranks = 2;
static constexpr int rounds = 1000;
static constexpr size_t block = 4096;
// The blocks that share a queue, the bytes of each of their puts, and the first of those bytes.
static constexpr int blocks = 132, puts_each = 50;
static constexpr size_t part = 64, parts_at = 64 << 10;

struct Shared {
  ncclUniqueId id;
  volatile int ready;
};

#define CUDA(call)                                                                         \
  do {                                                                                     \
    cudaError_t error_ = (call);                                                           \
    if (error_ != cudaSuccess) {                                                           \
      printf("rank %d: %s: %s\n", rank, #call, cudaGetErrorString(error_));                \
      return 1;                                                                            \
    }                                                                                      \
  } while (0)

#define NCCL(call)                                                                         \
  do {                                                                                     \
    ncclResult_t result_ = (call);                                                         \
    if (result_ != ncclSuccess) {                                                          \
      printf("rank %d: %s: %s (%s)\n", rank, #call, ncclGetErrorString(result_), ncclGetLastError(nullptr)); \
      return 1;                                                                            \
    }                                                                                      \
  } while (0)

// Sends values, then blocks, each with a signal, and checks the received data after the signal. `wrong` counts the differences.
__global__ void exchange(ncclDevComm comm, ncclWindow_t to, ncclWindow_t from, unsigned char* mine, unsigned char* got,
                         unsigned long long* wrong) {
  ncclGin gin{comm, 0};
  ncclTeam world = ncclTeamWorld(comm);
  int peer = (comm.rank + 1) % comm.nRanks;
  unsigned long long bad = 0;
  for (int round = 0; round < rounds; round++) {
    uint64_t sent = uint64_t(comm.rank + 1) << 32 | uint32_t(round);
    uint64_t expected = uint64_t(peer + 1) << 32 | uint32_t(round);
    gin.putValue(world, peer, to, 8 * size_t(round % 64), sent, ncclGin_WeakSignalInc{0});
    gin.waitSignal(ncclCoopThread(), 0, uint64_t(round) + 1);
    bad += *(volatile uint64_t*)(got + 8 * (round % 64)) != expected;

    for (size_t i = 0; i < block; i += 8) *(volatile uint64_t*)(mine + i) = sent + i;
    gin.put(world, peer, to, block, from, 0, block, ncclGin_WeakSignalInc{1}, ncclGin_WeakCounterInc{0});
    gin.waitSignal(ncclCoopThread(), 1, uint64_t(round) + 1);
    for (size_t i = 0; i < block; i += 8) bad += *(volatile uint64_t*)(got + block + i) != expected + i;
    gin.waitCounter(ncclCoopThread(), 0, uint64_t(round) + 1);
    gin.flush(ncclCoopThread());
    // The barrier keeps a rank from overwriting data that the other still checks.
    gin.signal(world, peer, ncclGin_WeakSignalInc{2});
    gin.waitSignal(ncclCoopThread(), 2, uint64_t(round) + 1);
  }
  *wrong = bad;
}

// Many blocks put on one queue, each by all of its threads, while others flush; the signal counts all of them.
__global__ void storm(ncclDevComm comm, ncclWindow_t to, ncclWindow_t from) {
  ncclGin gin{comm, 0};
  ncclTeam world = ncclTeamWorld(comm);
  int peer = (comm.rank + 1) % comm.nRanks;
  size_t at = parts_at + part * blockIdx.x;
  for (int i = 0; i < puts_each; i++) {
    gin.put(world, peer, to, at, from, at, part, ncclGin_WeakSignalInc{3}, ncclGin_None{}, ncclCoopCta());
    if (i % 10 == 9) gin.flush(ncclCoopCta());
  }
  if (blockIdx.x == 0) gin.waitSignal(ncclCoopCta(), 3, uint64_t(blocks) * puts_each);
}

// Whether kernels can run on this rank's GPU; otherwise prints the versions, and what to do.
static bool is_suitable(int rank, int device, int devices) {
  cudaDeviceProp properties;
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) {
    printf("rank %d: GPU %d: %s; the driver is of CUDA %d.%d, and this program of CUDA %d.%d\n", rank, device,
           cudaGetErrorString(error), driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return false;
  }
  if (properties.major * 10 + properties.minor < 75) {
    printf("rank %d: %s has compute capability %d.%d, and CUDA %d makes code from 7.5 on: take a newer GPU\n", rank,
           properties.name, properties.major, properties.minor, runtime / 1000);
    return false;
  }
  const char* shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (devices < ranks && (!shared || strcmp(shared, "1") != 0)) {
    printf("rank %d: %d ranks share %s, the only GPU, which NCCL refuses: set NCCL_MULTI_RANK_GPU_ENABLE=1, or let the job have %d GPUs\n",
           rank, ranks, properties.name, ranks);
    return false;
  }
  return true;
}

static int run(int rank, int devices, Shared* shared) {
  int device_number = rank % devices;
  if (!is_suitable(rank, device_number, devices)) return 1;
  CUDA(cudaSetDevice(device_number));
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&shared->id));
    __atomic_store_n(&shared->ready, 1, __ATOMIC_RELEASE);
  }
  while (!__atomic_load_n(&shared->ready, __ATOMIC_ACQUIRE)) usleep(1000);
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, shared->id, rank));
  constexpr size_t bytes = 2 << 20;
  void *mine = nullptr, *got = nullptr;
  NCCL(ncclMemAlloc(&mine, bytes));
  NCCL(ncclMemAlloc(&got, bytes));
  CUDA(cudaMemset(mine, 0xa0 + rank, bytes));
  CUDA(cudaMemset(got, 0, bytes));
  ncclWindow_t from, to;
  NCCL(ncclCommWindowRegister(comm, mine, bytes, &from, NCCL_WIN_COLL_SYMMETRIC));
  NCCL(ncclCommWindowRegister(comm, got, bytes, &to, NCCL_WIN_COLL_SYMMETRIC));
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginForceEnable = true;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  needs.ginContextCount = 1;
  needs.ginSignalCount = 4;
  needs.ginCounterCount = 1;
  needs.ginStrongSignalsRequired = false;
  needs.ginVaSignalsRequired = false;
  ncclDevComm device;
  NCCL(ncclDevCommCreate(comm, &needs, &device));
  unsigned long long *wrong = nullptr, bad = ~0ull;
  CUDA(cudaMalloc(&wrong, sizeof(*wrong)));
  exchange<<<1, 1>>>(device, to, from, (unsigned char*)mine, (unsigned char*)got, wrong);
  CUDA(cudaGetLastError());
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(&bad, wrong, sizeof(bad), cudaMemcpyDeviceToHost));
  storm<<<blocks, 64>>>(device, to, from);
  CUDA(cudaGetLastError());
  CUDA(cudaDeviceSynchronize());
  unsigned char arrived[blocks * part];
  CUDA(cudaMemcpy(arrived, (unsigned char*)got + parts_at, sizeof(arrived), cudaMemcpyDeviceToHost));
  for (unsigned char byte : arrived) bad += byte != 0xa0 + (rank + 1) % ranks;
  ncclResult_t failed = ncclSuccess;
  NCCL(ncclCommGetAsyncError(comm, &failed));
  if (failed != ncclSuccess || bad != 0) {
    printf("rank %d: %llu words or bytes are wrong, and the communicator says %s\n", rank, bad, ncclGetErrorString(failed));
    return 1;
  }
  NCCL(ncclDevCommDestroy(comm, &device));
  NCCL(ncclCommWindowDeregister(comm, to));
  NCCL(ncclCommWindowDeregister(comm, from));
  NCCL(ncclCommDestroy(comm));
  NCCL(ncclMemFree(mine));
  NCCL(ncclMemFree(got));
  printf("rank %d: %d rounds and %d puts arrived\n", rank, rounds, blocks * puts_each);
  return 0;
}

int main() {
  auto* shared =
    (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  // CUDA does not work after a fork, so the program uses it only afterwards.
  pid_t children[ranks];
  for (int rank = 0; rank < ranks; rank++) {
    children[rank] = fork();
    if (children[rank] == 0) {
      alarm(120);
      int devices = 0;
      cudaError_t error = cudaGetDeviceCount(&devices);
      // A driver that is too old is a failure, which the run describes.
      bool is_missing = error == cudaErrorNoDevice || (error == cudaSuccess && devices == 0);
      int driver = 0;
      if (is_missing || cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) _exit(77);
      int status = run(rank, devices > 0 ? devices : 1, shared);
      fflush(stdout);
      _exit(status);
    }
  }
  int worst = 0;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code > worst) worst = code;
  }
  return worst;
}
