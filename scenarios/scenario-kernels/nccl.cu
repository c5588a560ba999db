// gin.cu's functions, through NCCL's device API: kernels for ncclGin, which the scenarios' programs call with `Api::Cuda` when this file
// takes gin.cu's place. The backend is ferrogin's, or NCCL's own with -DNCCL_OWN_BACKEND.
#include <ferrogin/gin.h>
#include <ferrogin/layout.h>

#ifdef NCCL_OWN_BACKEND
#define REFUSED 0
#include <nccl_device.h>
#else
// NCCL's functions return nothing. Misuse leaves its status here, for the single thread of the scenario `bad-input`.
static __device__ int refused;
#define REFUSED refused
#define FGIN_ON_MISUSE(status) (refused = (status))
#include <ferrogin/nccl_gin.cuh>
#endif

// What a program gets from ncclDevCommCreate and ncclCommWindowRegister.
__device__ ncclDevComm comm;
// The scenarios' window, and one that stands for no window.
__device__ ncclWindow_vidmem windows[2];

// Limit of a wait in cycles: about ten seconds on a GPU.
static constexpr uint64_t limit = 20ull * 1000 * 1000 * 1000;

// `Threads` of plan.rs.
enum Threads : uint32_t { One, Tile, Warps, Blocks };

// The first context's emulated signals, or null.
static __device__ const char* emulated_of(const char* handle) {
  auto first = *reinterpret_cast<const uint64_t*>(handle - FGIN_HEADER_SIZE + FGIN_HEADER_CONTEXTS_OFFSET);
  return reinterpret_cast<const char*>(*reinterpret_cast<const uint64_t*>(first + FGIN_CONTEXT_EMULATED_OFFSET));
}

static __device__ uint32_t signals_of(const char* handle, const nccl_ofi_gin_gdaki_dev_handle& context) {
  auto* emulated = emulated_of(handle);
  return emulated ? *reinterpret_cast<const uint32_t*>(emulated + FGIN_EMULATED_N_SIGNALS_OFFSET) : context.nSignals;
}

// Fills in the communicator before the scenario's kernel runs.
extern "C" __global__ void gin_setup(void* handle, void* window, int rank, int nranks) {
  auto* context = static_cast<nccl_ofi_gin_gdaki_dev_handle*>(handle);
  comm.rank = rank;
  comm.nRanks = nranks;
  comm.ginConnectionCount = 1;
  comm.ginContextCount = 1;
  comm.ginConnectionStride = 1;
  comm.ginContextStride = 1;
  comm.ginSignalCount = signals_of(static_cast<const char*>(handle), *context);
  comm.ginCounterCount = context->nCounters;
  comm.ginNetDeviceTypes[0] = NCCL_NET_DEVICE_GIN_EFA_GDA;
  comm.ginHandles[0] = handle;
  for (auto& view : windows) {
    view.worldRank = rank;
    view.numSegments = 1;
    view.ginWinsDefaultBackend[0] = window;
    window = nullptr;
  }
}

static __device__ ncclWindow_t view_of(fgin_window window) {
  return &windows[window == nullptr];
}

static __device__ ncclGin gin_of(const fgin_context* ctx, uint32_t flags = 0) {
  auto* header = static_cast<const char*>(comm.ginHandles[0]) - FGIN_HEADER_SIZE;
  uint64_t first = *reinterpret_cast<const uint64_t*>(header + FGIN_HEADER_CONTEXTS_OFFSET);
  int id = int((reinterpret_cast<uint64_t>(ctx) - first) / FGIN_CONTEXT_SIZE);
  auto mode = flags & FGIN_SHARING_CTA ? NCCL_GIN_RESOURCE_SHARING_CTA :
    flags & FGIN_SHARING_THREAD ? NCCL_GIN_RESOURCE_SHARING_THREAD : NCCL_GIN_RESOURCE_SHARING_GPU;
  return ncclGin(comm, id, mode);
}

static __device__ void sync(Threads threads) {
  switch (threads) {
    case Tile: return ncclCoopTile<8>().sync();
    case Warps: return ncclCoopWarp().sync();
    case Blocks: return ncclCoopCta().sync();
    default: return;
  }
}

static __device__ bool is_leader(Threads threads) {
  switch (threads) {
    case Tile: return ncclCoopTile<8>().thread_rank() == 0;
    case Warps: return ncclCoopWarp().thread_rank() == 0;
    case Blocks: return ncclCoopCta().thread_rank() == 0;
    default: return true;
  }
}

// The thread of rank 0 runs an operation between two barriers of the group. For their part, the other threads call gin_flush_async.
template <typename Operation>
static __device__ int lead(Threads threads, Operation operation) {
  int status = FGIN_OK;
  sync(threads);
  if (is_leader(threads)) {
#ifndef NCCL_OWN_BACKEND
    refused = FGIN_OK;
#endif
    status = operation();
    if (status == FGIN_OK) status = REFUSED;
  }
  sync(threads);
  return status;
}

static __device__ uint32_t counter_slot(fgin_action action) {
  return action >> 16 & 0xffff;
}

// ncclGin would make the card's signals strong with a flush, but ferrogin's own functions refuse them.
static __device__ bool must_refuse(uint32_t flags) {
  return flags & FGIN_STRONG && !emulated_of(static_cast<const char*>(comm.ginHandles[0]));
}

// Calls `operation` with the signal of a packed action, which the flags may make strong.
template <typename Operation>
static __device__ int with_signal(fgin_action action, uint32_t flags, Operation operation) {
  uint32_t slot = action & 0xffff, amount = action >> 32;
  if (slot == 0) operation(ncclGin_None{});
  else if (flags & FGIN_STRONG && amount == 1) operation(ncclGin_StrongSignalInc{slot - 1});
  else if (flags & FGIN_STRONG) operation(ncclGin_StrongSignalAdd{slot - 1, amount});
  else if (amount == 1) operation(ncclGin_WeakSignalInc{slot - 1});
  else operation(ncclGin_WeakSignalAdd{slot - 1, amount});
  return FGIN_OK;
}

static __device__ uint32_t options(uint32_t flags) {
  return flags & FGIN_AGGREGATE ? ncclGinOptFlagsAggregateRequests : ncclGinOptFlagsDefault;
}

#define EXPORT extern "C" __device__ int
static constexpr auto given = cuda::thread_scope_thread, required = cuda::thread_scope_device;

// A put that raises the action's counter, if it names one.
template <typename Signal>
static __device__ void put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                           uint64_t src_off, uint64_t bytes, Signal signal, fgin_action action, uint32_t flags) {
  ncclGin gin = gin_of(ctx, flags);
  ncclTeam world = ncclTeamWorld(comm);
  uint32_t counter = counter_slot(action);
  if (counter) {
    gin.put(world, int(peer), view_of(dst), dst_off, view_of(src), src_off, bytes, signal,
            ncclGin_WeakCounterInc{counter - 1}, ncclCoopThread(), ncclGin_None{}, given, required, options(flags));
  } else {
    gin.put(world, int(peer), view_of(dst), dst_off, view_of(src), src_off, bytes, signal, ncclGin_None{},
            ncclCoopThread(), ncclGin_None{}, given, required, options(flags));
  }
}

EXPORT gin_open(void* handle, uint32_t id, const fgin_context** out) {
  return fgin_open(handle, id, out);
}

EXPORT gin_put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
               uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    if (must_refuse(flags)) return fgin_put(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags);
    return with_signal(action, flags, [&](auto signal) {
      put(ctx, peer, dst, dst_off, src, src_off, bytes, signal, action, flags);
    });
  });
}

EXPORT gin_put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                     uint32_t bytes, fgin_action action, uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    ncclGin gin = gin_of(ctx, flags);
    auto send = [&](auto word, auto signal) {
      gin.putValue(ncclTeamWorld(comm), int(peer), view_of(dst), dst_off, word, signal, ncclCoopThread(),
                   ncclGin_None{}, given, required, options(flags));
      return int(FGIN_OK);
    };
    bool is_plain = (action & 0xffff) == 0;
    // ncclGin's putValue has neither other sizes nor counters.
    if (counter_slot(action)) bytes = 0;
    if (must_refuse(flags)) return fgin_put_value(ctx, peer, dst, dst_off, value, bytes, action, flags);
    if (bytes == 8) return with_signal(action, flags, [&](auto signal) { send(value, signal); });
    if (bytes == 4 && is_plain) return send(uint32_t(value), ncclGin_None{});
    if (bytes == 2 && is_plain) return send(uint16_t(value), ncclGin_None{});
    if (bytes == 1 && is_plain) return send(uint8_t(value), ncclGin_None{});
    return fgin_put_value(ctx, peer, dst, dst_off, value, bytes, action, flags);
  });
}

// ncclGin has no operations for lanes, so these are the ones of gin.h. Lanes that call ncclGin at the same time still post together.

EXPORT gin_warp_put(const fgin_context* ctx, uint32_t lanes, uint32_t peer, fgin_window dst, uint64_t dst_off,
                    fgin_window src, uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags) {
  return fgin_warp_put(ctx, lanes, peer, dst, dst_off, src, src_off, bytes, action, flags);
}

EXPORT gin_warp_put_value(const fgin_context* ctx, uint32_t lanes, uint32_t peer, fgin_window dst, uint64_t dst_off,
                          uint64_t value, uint32_t bytes, fgin_action action, uint32_t flags) {
  return fgin_warp_put_value(ctx, lanes, peer, dst, dst_off, value, bytes, action, flags);
}

EXPORT gin_warp_signal(const fgin_context* ctx, uint32_t lanes, uint32_t peer, fgin_action action, uint32_t flags) {
  return fgin_warp_signal(ctx, lanes, peer, action, flags);
}

EXPORT gin_get(const fgin_context* ctx, uint32_t peer, fgin_window remote, uint64_t remote_off, fgin_window local,
               uint64_t local_off, uint64_t bytes, uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    gin_of(ctx, flags).get(ncclTeamWorld(comm), int(peer), view_of(remote), remote_off, view_of(local), local_off, bytes,
                           ncclCoopThread(), ncclGin_None{}, options(flags));
    return int(FGIN_OK);
  });
}

template <typename Signal>
static __device__ void raise(const fgin_context* ctx, uint32_t peer, Signal signal, uint32_t flags) {
  gin_of(ctx, flags).signal(ncclTeamWorld(comm), int(peer), signal);
}
static __device__ void raise(const fgin_context*, uint32_t, ncclGin_None, uint32_t) {}

EXPORT gin_signal(const fgin_context* ctx, uint32_t peer, fgin_action action, uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    uint32_t slot = action & 0xffff;
    // ncclGin's signal takes no counter, and can't be omitted.
    if (counter_slot(action) || slot == 0 || must_refuse(flags)) return fgin_signal(ctx, peer, action, flags);
    return with_signal(action, flags, [&](auto signal) { raise(ctx, peer, signal, flags); });
  });
}

// The whole group calls it.
EXPORT gin_flush(const fgin_context* ctx, Threads threads) {
  ncclGin gin = gin_of(ctx);
  switch (threads) {
    case Tile: gin.flush(ncclCoopTile<8>()); break;
    case Warps: gin.flush(ncclCoopWarp()); break;
    case Blocks: gin.flush(ncclCoopCta()); break;
    default: gin.flush(ncclCoopThread());
  }
  return FGIN_OK;
}

EXPORT gin_flush_async(const fgin_context* ctx, fgin_request* request, Threads threads) {
  return lead(threads, [&] {
    static_assert(sizeof(ncclGinRequest_t) <= sizeof(*request), "the request has room");
    // NCCL's request may need more alignment.
    ncclGinRequest_t begun;
    gin_of(ctx).flushAsync(ncclTeamWorld(comm), 0, &begun);
    memcpy(request, &begun, sizeof(begun));
    return int(FGIN_OK);
  });
}

EXPORT gin_wait_request(const fgin_context* ctx, const fgin_request* request, Threads threads) {
  return lead(threads, [&] {
    ncclGinRequest_t begun;
    memcpy(&begun, request, sizeof(begun));
    gin_of(ctx).wait(begun);
    return int(FGIN_OK);
  });
}

static __device__ int status_of(ncclResult_t result) {
  return result == ncclTimeout ? FGIN_TIMEOUT : FGIN_OK;
}

#ifndef NCCL_OWN_BACKEND
// True if an emulated signal's value is where DeepEP reads it: through NCCL's struct for another backend.
static __device__ bool is_found_by_cast(const ncclGin& gin, uint32_t id) {
  auto* context = static_cast<struct ncclGinGdakiGPUContext*>(gin._ginHandle) + gin.contextId;
  auto* words = reinterpret_cast<uint64_t*>(__ldg(reinterpret_cast<uint64_t*>(&context->signals_table.buffer)));
  uint64_t before = gin.readSignal(id), found = *static_cast<volatile uint64_t*>(words + id);
  return before <= found && found <= gin.readSignal(id);
}
#endif

EXPORT gin_wait_signal(const fgin_context* ctx, uint32_t id, uint64_t least, Threads threads) {
  return lead(threads, [&] {
    // NCCL does not check the number.
    if (id >= uint32_t(comm.ginSignalCount)) return int(FGIN_INVALID_ARGUMENT);
    ncclGin gin = gin_of(ctx);
    int status = status_of(gin.waitSignal(ncclCoopThread(), id, least, 64, cuda::memory_order_acquire, limit));
#ifndef NCCL_OWN_BACKEND
    if (emulated_of(static_cast<const char*>(comm.ginHandles[0])) && !is_found_by_cast(gin, id)) return int(FGIN_POISONED);
#endif
    return status;
  });
}

EXPORT gin_wait_counter(const fgin_context* ctx, uint32_t id, uint64_t least, Threads threads) {
  return lead(threads, [&] {
    if (id >= uint32_t(comm.ginCounterCount)) return int(FGIN_INVALID_ARGUMENT);
    return status_of(gin_of(ctx).waitCounter(ncclCoopThread(), id, least, 56, cuda::memory_order_acquire, limit));
  });
}

#ifdef NCCL_OWN_BACKEND

// NCCL's own backend has no signals in memory.
EXPORT gin_put_signal_at(const fgin_context*, uint32_t, fgin_window, uint64_t, fgin_window, uint64_t, uint64_t, fgin_window, uint64_t,
                         uint64_t, fgin_action, uint32_t, Threads) {
  return FGIN_UNSUPPORTED;
}
EXPORT gin_put_value_signal_at(const fgin_context*, uint32_t, fgin_window, uint64_t, uint64_t, uint32_t, fgin_window, uint64_t,
                               uint64_t, uint32_t, Threads) {
  return FGIN_UNSUPPORTED;
}
EXPORT gin_signal_at(const fgin_context*, uint32_t, fgin_window, uint64_t, uint64_t, uint32_t, Threads) {
  return FGIN_UNSUPPORTED;
}

#else

// Calls `operation` with a signal in memory, which the flags may make strong.
template <typename Operation>
static __device__ int with_word(fgin_window window, uint64_t offset, uint64_t amount, uint32_t flags, Operation operation) {
  ncclWindow_t view = view_of(window);
  if (amount == 1 && flags & FGIN_STRONG) operation(ncclGin_StrongVASignalInc{view, offset});
  else if (amount == 1) operation(ncclGin_WeakVASignalInc{view, offset});
  else if (flags & FGIN_STRONG) operation(ncclGin_StrongVASignalAdd{view, offset, amount});
  else operation(ncclGin_WeakVASignalAdd{view, offset, amount});
  return FGIN_OK;
}

EXPORT gin_put_signal_at(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                         uint64_t src_off, uint64_t bytes, fgin_window word, uint64_t word_off, uint64_t amount,
                         fgin_action action, uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    return with_word(word, word_off, amount, flags, [&](auto signal) {
      put(ctx, peer, dst, dst_off, src, src_off, bytes, signal, action, flags);
    });
  });
}

EXPORT gin_put_value_signal_at(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                               uint32_t, fgin_window word, uint64_t word_off, uint64_t amount, uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    return with_word(word, word_off, amount, flags, [&](auto signal) {
      gin_of(ctx, flags).putValue(ncclTeamWorld(comm), int(peer), view_of(dst), dst_off, value, signal, ncclCoopThread(),
                                  ncclGin_None{}, given, required, options(flags));
    });
  });
}

EXPORT gin_signal_at(const fgin_context* ctx, uint32_t peer, fgin_window word, uint64_t word_off, uint64_t amount,
                     uint32_t flags, Threads threads) {
  return lead(threads, [&] {
    return with_word(word, word_off, amount, flags, [&](auto signal) { raise(ctx, peer, signal, flags); });
  });
}

#endif
