// Kernels that call NCCL's device API by its C names, to be linked with a libnccl_device.bc. Compiled by clang with
// NCCL's headers.
#define __clang_llvm_bitcode_lib__

#include <nccl.h>

struct __nv_fp8_e5m2;
#include <nccl_device_wrapper.h>
#include <nccl_device/gin/proxy/gin_proxy_device_host_common.h>

// What driver.py passes to set_up.
struct Setup {
  uint64_t rank, ranks, signals, counters, shadows, backend, handle, window, memory, lsa_rank, lsa_size, resources, stride;
};

// Fills in what NCCL's library would hand to a kernel: a device communicator and a window.
extern "C" __global__ void set_up(ncclDevComm* comm, ncclWindow_vidmem* window, const Setup* given) {
  memset(comm, 0, sizeof *comm);
  memset(window, 0, sizeof *window);
  comm->rank = int(given->rank);
  comm->nRanks = int(given->ranks);
  comm->nRanks_rcp32 = nccl::utility::idivRcp32(comm->nRanks);
  comm->lsaRank = int(given->lsa_rank);
  comm->lsaSize = int(given->lsa_size);
  comm->lsaSize_rcp32 = nccl::utility::idivRcp32(comm->lsaSize);
  comm->ginConnectionCount = 1;
  comm->ginConnectionStride = 1;
  comm->ginConnectionStride_rcp32 = nccl::utility::idivRcp32(1);
  comm->ginContextStride = int(given->stride);
  comm->ginContextCount = 1;
  comm->ginSignalCount = int(given->signals);
  comm->ginCounterCount = int(given->counters);
  comm->ginSignalShadows = reinterpret_cast<uint64_t*>(given->shadows);
  comm->ginNetDeviceTypes[0] = uint8_t(given->backend);
  comm->ginHandles[0] = reinterpret_cast<void*>(given->handle);
  comm->resourceWindow_inlined.lsaFlatBase = reinterpret_cast<char*>(given->resources);
  comm->resourceWindow_inlined.stride4G = 1;
  comm->hybridLsaBarrier.nBarriers = 1;
  // A rank has a signal per peer for data, and then one per peer for each barrier.
  comm->worldGinBarrier.signal0 = uint32_t(given->ranks);
  comm->railGinBarrier.signal0 = uint32_t(2 * given->ranks);
  comm->hybridRailGinBarrier.signal0 = uint32_t(3 * given->ranks);
  window->worldRank = comm->rank;
  window->lsaFlatBase = reinterpret_cast<char*>(given->memory);
  window->ginWinsDefaultBackend[0] = reinterpret_cast<ncclGinWindow_t>(given->window);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
  window->numSegments = 1;
#endif
}

static __device__ constexpr unsigned ALL = 1u << NCCL_NET_DEVICE_GIN_EFA_GDA | 1u << NCCL_NET_DEVICE_GIN_PROXY | 1u << NCCL_NET_DEVICE_GIN_GDAKI |
                                           1u << NCCL_NET_DEVICE_GIN_GPI;

// The group that posts: one thread, a warp, or the block.
static __device__ ncclCoopAny group(int kind) {
  ncclCoopAny coop;
  if (kind == 0) ncclCoopAnyInitThread(&coop);
  else if (kind == 1) ncclCoopAnyInitWarp(&coop);
  else ncclCoopAnyInitCta(&coop);
  return coop;
}

// Where things are in a window: a part per rank to send, to receive into, and to get into; then two words per rank, for
// a value and a signal.
struct Layout {
  int ranks;
  size_t bytes;
  __device__ size_t sent(int rank) const {
    return size_t(rank) * bytes;
  }
  __device__ size_t received(int rank) const {
    return size_t(ranks + rank) * bytes;
  }
  __device__ size_t got(int rank) const {
    return size_t(2 * ranks + rank) * bytes;
  }
  __device__ size_t value(int rank) const {
    return 3 * size_t(ranks) * bytes + 8 * size_t(rank);
  }
  __device__ size_t signal(int rank) const {
    return value(ranks + rank);
  }
};

// Each rank puts, writes a value, signals and gets, with all others. results: per peer the signal, and then the
// counter.
extern "C" __global__ void exchange(const ncclDevComm* comm, ncclWindow_t window, uint64_t bytes, uint64_t* results, int kind) {
  // The signals and the counter go on from the runs of the groups before.
  uint64_t runs = uint64_t(kind) + 1;
  ncclCoopAny coop = group(kind);
  if (kind < 2 && threadIdx.x >= (kind ? 32 : 1)) return;
  alignas(ncclGin_C) char space[sizeof(ncclGin_C)];
  auto* net = reinterpret_cast<ncclGin_C*>(space);
  ncclGin_C_init(net, ALL, *comm, 0);
  Layout at{comm->nRanks, bytes};
  ncclTeam world = ncclTeamWorld(*comm);
  int rank = comm->rank;
  for (int step = 1; step < comm->nRanks; step++) {
    int peer = (rank + step) % comm->nRanks;
    ncclGinPut(net, world, peer, window, at.received(rank), window, at.sent(peer), bytes, true, ncclGinSignal_t(rank), ncclGinSignalInc, 1, true,
               0, coop, false, nullptr, cuda::thread_scope_thread, cuda::thread_scope_device);
    ncclGinPutValue(net, world, peer, window, at.value(rank), uint64_t(rank) << 32 | uint32_t(peer), 8, true, ncclGinSignal_t(rank),
                    ncclGinSignalInc, 1, coop, false, nullptr, cuda::thread_scope_thread, cuda::thread_scope_device);
    ncclGinSignal(net, world, peer, true, ncclGinSignal_t(rank), ncclGinSignalAdd, 5, coop, false, nullptr, cuda::thread_scope_thread,
                  cuda::thread_scope_device);
    ncclGinGet(net, world, peer, window, at.sent(rank), window, at.got(peer), bytes, coop, false, nullptr, ncclGinOptFlagsDefault);
  }
  ncclGinFlush(net, coop, cuda::memory_order_acquire);
  ncclGinWaitCounter(net, coop, 0, runs * uint64_t(comm->nRanks - 1), 32, cuda::memory_order_acquire);
  for (int peer = 0; peer < comm->nRanks; peer++) {
    if (peer == rank) continue;
    ncclGinWaitSignal(net, coop, ncclGinSignal_t(peer), 7 * runs, 32, cuda::memory_order_acquire);
    results[peer] = ncclGinReadSignal(net, ncclGinSignal_t(peer), 32, cuda::memory_order_acquire);
  }
  results[comm->nRanks] = ncclGinReadCounter(net, 0, 32, cuda::memory_order_acquire);
}

// In each round, the ranks of a team write the round's number to each other; after the barrier, everyone must see it.
// The number of values that were wrong goes to results[0]. which: 0 the world's barrier, 1 the rail's, 2 the hybrid
// one.
extern "C" __global__ void barriers(const ncclDevComm* comm, ncclWindow_t window, uint64_t bytes, uint64_t* results, int rounds, int which) {
  ncclCoopAny coop = group(2);
  alignas(ncclGin_C) char space[sizeof(ncclGin_C)];
  auto* net = reinterpret_cast<ncclGin_C*>(space);
  ncclGin_C_init(net, ALL, *comm, 0);
  Layout at{comm->nRanks, bytes};
  int rank = comm->rank;
  ncclTeam team = which ? ncclTeamRail(*comm) : ncclTeamWorld(*comm);
  alignas(16) char room[sizeof(ncclBarrierSession_C)];
  auto* session = reinterpret_cast<ncclGinBarrierSession_C*>(room);
  auto* hybrid = reinterpret_cast<ncclBarrierSession_C*>(room);
  if (which == 2) ncclBarrierSessionInit(hybrid, coop, ncclTeamLsa(*comm), team, net, comm->hybridLsaBarrier, comm->hybridRailGinBarrier, 0);
  else ncclGinBarrierSessionInit(session, coop, net, team, which ? comm->railGinBarrier : comm->worldGinBarrier, 0);
  auto sync = [&] {
    if (which == 2) ncclBarrierSessionSync(hybrid, coop, cuda::memory_order_acq_rel);
    else ncclGinBarrierSessionSync(session, coop, cuda::memory_order_acq_rel);
  };
  auto* mine = static_cast<const char*>(ncclGetLocalPointer(window, 0));
  uint64_t wrong = 0;
  for (int round = 1; round <= rounds; round++) {
    for (int i = 0; i < team.nRanks; i++) {
      ncclGinPutValue(net, team, i, window, at.value(rank), uint64_t(round), 8, false, 0, ncclGinSignalInc, 0, coop, false, nullptr,
                      cuda::thread_scope_thread, cuda::thread_scope_device);
    }
    sync();
    for (int i = int(threadIdx.x); i < team.nRanks; i += int(blockDim.x)) {
      auto* word = reinterpret_cast<const volatile uint64_t*>(mine + at.value(ncclTeamRankToWorld(*comm, team, i)));
      wrong += *word != uint64_t(round);
    }
    sync();
  }
  if (wrong) __scoped_atomic_fetch_add(results, wrong, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
// Each rank puts to all others, with a strong signal in the window. results: per peer its signal.
extern "C" __global__ void put_with_va_signal(const ncclDevComm* comm, ncclWindow_t window, uint64_t bytes, uint64_t* results) {
  ncclCoopAny coop = group(0);
  alignas(ncclGin_C) char space[sizeof(ncclGin_C)];
  auto* net = reinterpret_cast<ncclGin_C*>(space);
  ncclGin_C_init(net, ALL, *comm, 0);
  Layout at{comm->nRanks, bytes};
  int rank = comm->rank;
  auto amount = [](int rank) { return uint64_t(rank + 1) << 33; };
  for (int step = 1; step < comm->nRanks; step++) {
    int peer = (rank + step) % comm->nRanks;
    ncclGinPut_v3(net, ncclTeamWorld(*comm), peer, window, at.received(rank), window, at.sent(peer), bytes, NCCL_GIN_SIGNAL_TYPE_VA, window,
                  at.signal(rank), 0, true, ncclGinSignalAdd, amount(rank), false, 0, coop, false, nullptr, cuda::thread_scope_thread,
                  cuda::thread_scope_device, ncclGinOptFlagsDefault, ncclGinSegmentTypeDevice);
  }
  for (int peer = 0; peer < comm->nRanks; peer++) {
    if (peer == rank) continue;
    ncclGinWaitSignalVA(net, coop, window, at.signal(peer), amount(peer), 64, cuda::memory_order_acquire);
    results[peer] = ncclGinReadSignalVA(net, window, at.signal(peer), 64, cuda::memory_order_acquire);
  }
  ncclGinFlush(net, coop, cuda::memory_order_acquire);
}
#endif

// Fills in a context of NCCL's proxy: queues of 8 requests per rank from queues[0] on.
extern "C" __global__ void set_up_proxy(ncclGinProxyGpuCtx_t* proxy, ncclGinProxyGfd_t* queues, uint32_t* indices, int ranks) {
  memset(proxy, 0, sizeof *proxy);
  proxy->nranks = ranks;
  proxy->queueSize = 8;
  proxy->queues = queues;
  proxy->pis = indices;
  proxy->cis = indices + ranks;
  proxy->lastIssuedGet = indices + 2 * ranks;
  proxy->lastVisibleGet = indices + 3 * ranks;
}

// One operation of each kind, to rank 1.
extern "C" __global__ void post_each(const ncclDevComm* comm, ncclWindow_t window) {
  ncclCoopAny coop = group(0);
  alignas(ncclGin_C) char space[sizeof(ncclGin_C)];
  auto* net = reinterpret_cast<ncclGin_C*>(space);
  ncclGin_C_init(net, ALL, *comm, 0);
  ncclTeam world = ncclTeamWorld(*comm);
  ncclGinPut(net, world, 1, window, 64, window, 128, 256, true, 3, ncclGinSignalInc, 1, true, 1, coop, false, nullptr, cuda::thread_scope_thread,
             cuda::thread_scope_system);
  ncclGinPutValue(net, world, 1, window, 512, 0x1122334455667788, 8, true, 2, ncclGinSignalAdd, 9, coop, false, nullptr, cuda::thread_scope_thread,
                  cuda::thread_scope_system);
  ncclGinSignal(net, world, 1, true, 1, ncclGinSignalAdd, 77, coop, false, nullptr, cuda::thread_scope_thread, cuda::thread_scope_system);
  ncclGinGet(net, world, 1, window, 1024, window, 2048, 32, coop, false, nullptr, ncclGinOptFlagsDefault);
}
