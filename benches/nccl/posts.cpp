// NCCL's own device code as C functions: one post per call, with run-time arguments, and loops with the post inlined. Built twice: bare
// (SHIM_BARE), with nothing added to NCCL's code, to count instructions; and with yielding waits and counted doorbells, to run many threads
// on few processors.
#include "device_code.h"

#include <atomic>

namespace {

constexpr auto scope = cuda::thread_scope_thread;

// One post's arguments, as laid out by the caller.
struct Post {
  uint32_t peer;
  uint32_t signal;  // id
  ncclGinWindow_t dst;
  uint64_t dst_off;
  ncclGinWindow_t src;
  uint64_t src_off;
  uint64_t bytes;
  uint64_t value;
};

// A context with a single backend that the compiler knows: NCCL's cheapest form.
using Ctx = ncclGinCtx_M<(1u << int(NCCL_NET_DEVICE_GIN_EFA_GDA))>;

struct Handle {
  Ctx ctx;
};

inline __attribute__((always_inline)) void put(const Ctx& ctx, uint32_t peer, ncclGinWindow_t dst, uint64_t dst_off,
                                               ncclGinWindow_t src, uint64_t src_off, uint64_t bytes, uint32_t flags) {
  ncclGinCall<ncclGinApi_Put>(ctx, ncclCoopThread(), int(peer), true, dst, size_t(dst_off), src, size_t(src_off),
                              size_t(bytes), ncclGinSignalDescriptor{}, ncclGinSignalInc, uint64_t(0), false,
                              ncclGinCounter_t(0), false, (ncclGinDescriptorSmem*)nullptr, scope, scope, flags);
}

inline ncclGinSignalDescriptor indexed(uint32_t id) {
  ncclGinSignalDescriptor signal = {};
  signal.type = NCCL_GIN_SIGNAL_TYPE_INDEXED;
  signal.indexedSignal.signalId = id;
  return signal;
}

inline __attribute__((always_inline)) void put_signal(const Ctx& ctx, uint32_t peer, ncclGinWindow_t dst,
                                                      uint64_t dst_off, ncclGinWindow_t src, uint64_t src_off,
                                                      uint64_t bytes, uint32_t id) {
  ncclGinCall<ncclGinApi_Put>(ctx, ncclCoopThread(), int(peer), bytes != 0, dst, size_t(dst_off), src, size_t(src_off),
                              size_t(bytes), indexed(id), ncclGinSignalInc, uint64_t(1), false, ncclGinCounter_t(0),
                              false, (ncclGinDescriptorSmem*)nullptr, scope, scope, uint32_t(ncclGinOptFlagsDefault));
}

inline __attribute__((always_inline)) void put_value(const Ctx& ctx, uint32_t peer, ncclGinWindow_t dst,
                                                     uint64_t dst_off, uint64_t value, uint32_t flags) {
  ncclGinCall<ncclGinApi_PutValue>(ctx, ncclCoopThread(), int(peer), dst, size_t(dst_off), value,
                                   ncclGinSignalDescriptor{}, ncclGinSignalInc, uint64_t(0), false,
                                   (ncclGinDescriptorSmem*)nullptr, scope, scope, flags);
}

inline __attribute__((always_inline)) void put_value_signal(const Ctx& ctx, uint32_t peer, ncclGinWindow_t dst,
                                                            uint64_t dst_off, uint64_t value, uint32_t id) {
  ncclGinCall<ncclGinApi_PutValue>(ctx, ncclCoopThread(), int(peer), dst, size_t(dst_off), value, indexed(id),
                                   ncclGinSignalInc, uint64_t(1), false, (ncclGinDescriptorSmem*)nullptr, scope, scope,
                                   uint32_t(ncclGinOptFlagsDefault));
}

inline __attribute__((always_inline)) void get(const Ctx& ctx, uint32_t peer, ncclGinWindow_t remote,
                                               uint64_t remote_off, ncclGinWindow_t local, uint64_t local_off,
                                               uint64_t bytes, uint32_t flags) {
  ncclGinCall<ncclGinApi_Get>(ctx, ncclCoopThread(), int(peer), remote, size_t(remote_off), local, size_t(local_off),
                              size_t(bytes), false, (ncclGinDescriptorSmem*)nullptr, flags);
}

#ifndef SHIM_BARE
std::atomic<uint64_t> doorbells;

void on_store(uint64_t, uint64_t, unsigned bytes) {
  if (bytes == 4) doorbells.fetch_add(1, std::memory_order_relaxed);
}
#endif

}  // namespace

#define API extern "C" __attribute__((visibility("default"), noinline))

API Handle* nccl_open(void* handle, int rank, int nranks) {
  auto* h = new Handle{};
  h->ctx.backendMask = 1u << int(NCCL_NET_DEVICE_GIN_EFA_GDA);
  h->ctx.backend = NCCL_NET_DEVICE_GIN_EFA_GDA;
  h->ctx.rank = rank;
  h->ctx.nRanks = nranks;
  h->ctx.handle = handle;
  h->ctx.resourceSharingMode = NCCL_GIN_RESOURCE_SHARING_GPU;
  return h;
}

API void nccl_put(const Handle* h, uint32_t peer, ncclGinWindow_t dst, uint64_t dst_off, ncclGinWindow_t src,
                  uint64_t src_off, uint64_t bytes, uint32_t flags) {
  put(h->ctx, peer, dst, dst_off, src, src_off, bytes, flags);
}

API void nccl_put_signal(const Handle* h, uint32_t peer, ncclGinWindow_t dst, uint64_t dst_off, ncclGinWindow_t src,
                         uint64_t src_off, uint64_t bytes, uint32_t id) {
  put_signal(h->ctx, peer, dst, dst_off, src, src_off, bytes, id);
}

API void nccl_put_value(const Handle* h, uint32_t peer, ncclGinWindow_t dst, uint64_t dst_off, uint64_t value,
                        uint32_t flags) {
  put_value(h->ctx, peer, dst, dst_off, value, flags);
}

API void nccl_put_value_signal(const Handle* h, uint32_t peer, ncclGinWindow_t dst, uint64_t dst_off, uint64_t value,
                               uint32_t id) {
  put_value_signal(h->ctx, peer, dst, dst_off, value, id);
}

API void nccl_flush(const Handle* h) {
  ncclGinCall<ncclGinApi_Flush>(h->ctx, ncclCoopThread(), false, (ncclGinDescriptorSmem*)nullptr,
                                cuda::memory_order_acquire, (uint32_t*)nullptr);
}

API void nccl_get(const Handle* h, uint32_t peer, ncclGinWindow_t remote, uint64_t remote_off, ncclGinWindow_t local,
                  uint64_t local_off, uint64_t bytes, uint32_t flags) {
  get(h->ctx, peer, remote, remote_off, local, local_off, bytes, flags);
}

// The same, inlined: the compiler knows the flags and whether there is a signal; the rest is loaded from memory each time.

API void nccl_inline_put(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    put(h->ctx, p.peer, p.dst, p.dst_off, p.src, p.src_off, p.bytes, ncclGinOptFlagsDefault);
  }
}

API void nccl_inline_put_aggregated(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    put(h->ctx, p.peer, p.dst, p.dst_off, p.src, p.src_off, p.bytes, ncclGinOptFlagsAggregateRequests);
  }
}

API void nccl_inline_put_signal(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    put_signal(h->ctx, p.peer, p.dst, p.dst_off, p.src, p.src_off, p.bytes, p.signal);
  }
}

API void nccl_inline_put_value(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    put_value(h->ctx, p.peer, p.dst, p.dst_off, p.value, ncclGinOptFlagsDefault);
  }
}

API void nccl_inline_put_value_signal(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    put_value_signal(h->ctx, p.peer, p.dst, p.dst_off, p.value, p.signal);
  }
}

API void nccl_inline_get(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    get(h->ctx, p.peer, p.dst, p.dst_off, p.src, p.src_off, p.bytes, ncclGinOptFlagsDefault);
  }
}

API void nccl_inline_signal(const Handle* h, const Post* posts, uint32_t mask, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const Post& p = posts[i & mask];
    put_signal(h->ctx, p.peer, p.dst, p.dst_off, p.src, p.src_off, 0, p.signal);
  }
}

#ifndef SHIM_BARE
// Starts counting doorbells; returns the count so far.
API uint64_t nccl_doorbells() {
  shim::mmio_hook = on_store;
  return doorbells.load(std::memory_order_relaxed);
}
#endif
