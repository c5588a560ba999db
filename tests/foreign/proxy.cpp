#include "proxy.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "nccl_device/gin/proxy/gin_proxy_device_host_common.h"

// How many of a peer's descriptors NCCL takes at once.
constexpr int poll_batch = 32;
// NCCL's requests in flight per receive.
constexpr int max_requests = 32;

static ncclRmaCalls_v15_t rma;
static ncclResult_t (*get_rma_properties)(void*, ncclRmaProperties_v16_t*);
static ProxyMemory memory;

const ProxyMemory process_memory = {
  [](size_t bytes) { return calloc(1, bytes); },
  [](size_t bytes) { return calloc(1, bytes); },
  [](void*, size_t) { return -1; },
};

#define TRY(call)                                \
  do {                                           \
    ncclResult_t result_ = (call);               \
    if (result_ != ncclSuccess) return result_;  \
  } while (0)

namespace {

struct Listener {
  void* listener;
  int device;
};

struct Comm {
  void* coll;
  int nranks;
  ncclNetProperties_v12_t properties;
};

// A descriptor that the proxy has read.
struct Issued {
  int op;
  uint32_t counter;
  int done;
  void* request;
};

// One context: for each peer, a queue of descriptors, indexed modulo the queue's size.
struct Queues {
  int id;
  ncclGinProxyGfd_t* descriptors;
  std::vector<Issued> issued;
  // How many descriptors have been read, and how many are done, by peer.
  std::vector<uint32_t> seen, consumed;
  // `consumed`, where kernels read it.
  uint32_t* published;
  uint64_t* inlines;
  void* inlines_mhandle;
};

struct Context {
  Comm* comm;
  void* rma_ctx;
  uint32_t queue_size;
  uint64_t* counters;
  int n_counters, n_signals;
  void* signals_mhandle = nullptr;
  std::vector<Queues> queues;
  bool failed = false;
  ncclNetDeviceHandle_v11_t handle = {};
};

template <typename T>
T* shared(size_t count) {
  return static_cast<T*>(memory.shared(count * sizeof(T)));
}

template <typename T>
T* on_device(size_t count) {
  return static_cast<T*>(memory.device(count * sizeof(T)));
}

ncclResult_t get_gin_properties(ncclGinProperties_v14_t* properties) {
  *properties = {true, true};
  return ncclSuccess;
}

ncclResult_t listen(void* ctx, int device, void* handle, void** out) {
  auto listener = std::make_unique<Listener>();
  listener->device = device;
  TRY(rma.listen(ctx, device, handle, &listener->listener));
  *out = listener.release();
  return ncclSuccess;
}

ncclResult_t close_listen(void* of) {
  std::unique_ptr<Listener> listener(static_cast<Listener*>(of));
  return rma.closeListen(listener->listener);
}

ncclResult_t connect(void* ctx, void* handles[], int nranks, int rank, void* of, void** out) {
  auto* listener = static_cast<Listener*>(of);
  auto comm = std::make_unique<Comm>();
  comm->nranks = nranks;
  TRY(rma.getProperties(listener->device, &comm->properties));
  TRY(rma.connect(ctx, handles, nranks, rank, listener->listener, &comm->coll));
  *out = comm.release();
  return ncclSuccess;
}

ncclResult_t close_coll(void* of) {
  std::unique_ptr<Comm> comm(static_cast<Comm*>(of));
  return rma.closeColl(comm->coll);
}

ncclResult_t register_memory(void* of, void* data, size_t size, int type, uint64_t flags, void** mhandle, void** gin_handle) {
  auto* comm = static_cast<Comm*>(of);
  bool takes_dma_buf = type == FOREIGN_PTR_CUDA && comm->properties.ptrSupport & FOREIGN_PTR_DMABUF;
  int fd = takes_dma_buf ? memory.dma_buf(data, size) : -1;
  if (fd >= 0) {
    ncclResult_t result = rma.regMrSymDmaBuf(comm->coll, data, size, type, 0, fd, flags, mhandle);
    // The plugin keeps a duplicate if it needs one.
    close(fd);
    TRY(result);
  } else {
    TRY(rma.regMrSym(comm->coll, data, size, type, flags, mhandle));
  }
  *gin_handle = *mhandle;
  return ncclSuccess;
}

ncclResult_t deregister_memory(void* of, void* mhandle) {
  return rma.deregMrSym(static_cast<Comm*>(of)->coll, mhandle);
}

ncclResult_t create_context(void* of, ncclGinConfig_v14_t* config, void** out, ncclNetDeviceHandle_v11_t** handle) {
  auto* comm = static_cast<Comm*>(of);
  auto context = std::make_unique<Context>();
  context->comm = comm;
  ncclRmaConfig_v14_t rma_config = {config->nContexts, config->trafficClass, config->rankStride};
  TRY(rma.createContext(comm->coll, &rma_config, &context->rma_ctx));
  bool flushes_all = false;
  if (get_rma_properties) {
    ncclRmaProperties_v16_t properties = {};
    TRY(get_rma_properties(comm->coll, &properties));
    flushes_all = properties.flushesAllPutsOnAnySignal;
  }
  // A power of two that the plugin allows; NCCL reads NCCL_GIN_PROXY_QUEUE_SIZE.
  uint32_t most = uint32_t(max_requests * comm->properties.maxRecvs), asked = uint32_t(config->queueDepth);
  context->queue_size = asked > 0 && asked <= most && !(asked & (asked - 1)) ? asked : most;
  size_t contexts = size_t(config->nContexts), peers = size_t(comm->nranks), slots = peers * context->queue_size;
  context->n_counters = config->nCounters;
  context->n_signals = config->nSignals;
  context->counters = shared<uint64_t>(contexts * size_t(config->nCounters) + 1);
  size_t signals = contexts * size_t(config->nSignals);
  auto* words = on_device<uint64_t>(signals + 1);
  auto* offsets = on_device<uint64_t>(signals + 1);
  void* unused = nullptr;
  if (signals > 0) {
    // As NCCL does for device code of backendVersion 2, which never resets a word.
    uint64_t never_reset = NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0) ? FOREIGN_MR_SIGNAL_NEVER_RESET : 0;
    TRY(register_memory(comm, words, signals * sizeof(uint64_t), FOREIGN_PTR_CUDA, FOREIGN_MR_FORCE_STRICT_ORDER | never_reset,
                        &context->signals_mhandle, &unused));
  }
  auto* views = shared<ncclGinProxyGpuCtx_t>(contexts);
  for (int id = 0; id < config->nContexts; id++) {
    Queues queues = {};
    queues.id = id;
    queues.descriptors = shared<ncclGinProxyGfd_t>(slots);
    queues.issued.resize(slots);
    queues.seen.resize(peers);
    queues.consumed.resize(peers);
    queues.published = shared<uint32_t>(peers);
    queues.inlines = static_cast<uint64_t*>(process_memory.shared(slots * sizeof(uint64_t)));
    TRY(register_memory(comm, queues.inlines, slots * sizeof(uint64_t), FOREIGN_PTR_HOST, 0, &queues.inlines_mhandle, &unused));
    ncclGinProxyGpuCtx_t& view = views[id];
    view.nranks = comm->nranks;
    view.queueSize = context->queue_size;
    view.queues = queues.descriptors;
    view.pis = on_device<uint32_t>(peers);
    view.cis = queues.published;
    view.counters = context->counters + id * config->nCounters;
    view.signals = words + id * config->nSignals;
    view.signalOffsets = offsets + id * config->nSignals;
    view.lastIssuedGet = on_device<uint32_t>(peers);
    view.lastVisibleGet = on_device<uint32_t>(peers);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
    view.flushesAllPutsOnAnySignal = flushes_all;
#else
    (void)flushes_all;
#endif
    context->queues.push_back(std::move(queues));
  }
  context->handle.netDeviceType = NCCL_NET_DEVICE_GIN_PROXY;
  context->handle.netDeviceVersion = NCCL_GIN_PROXY_VERSION;
  context->handle.handle = views;
  context->handle.needsProxyProgress = 1;
  *handle = &context->handle;
  *out = context.release();
  return ncclSuccess;
}

ncclResult_t destroy_context(void* of) {
  std::unique_ptr<Context> context(static_cast<Context*>(of));
  TRY(rma.destroyContext(context->rma_ctx));
  // A context's memory outlives it.
  if (context->signals_mhandle) TRY(deregister_memory(context->comm, context->signals_mhandle));
  for (Queues& queues : context->queues) TRY(deregister_memory(context->comm, queues.inlines_mhandle));
  return ncclSuccess;
}

// Tests a peer's requests, increments the counters of those that are done, and tells kernels up to which one all are done.
ncclResult_t complete(Context& context, Queues& queues, int peer) {
  Issued* row = &queues.issued[size_t(peer) * context.queue_size];
  uint32_t mask = context.queue_size - 1, first = queues.consumed[size_t(peer)];
  for (uint32_t i = first; i != queues.seen[size_t(peer)]; i++) {
    Issued& one = row[i & mask];
    if (!one.done) {
      TRY(rma.test(context.comm->coll, one.request, &one.done));
      if (one.done && one.op & ncclGinProxyOpWithCounter) {
        uint64_t* counter = context.counters + queues.id * context.n_counters + one.counter;
        // Kernels reset a counter only when no operations are in flight.
        __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + 1, __ATOMIC_RELEASE);
      }
    }
    if (one.done && i == queues.consumed[size_t(peer)]) {
      __atomic_store_n(&queues.published[peer], ++queues.consumed[size_t(peer)], __ATOMIC_RELEASE);
    }
  }
  return ncclSuccess;
}

// Takes a peer's next descriptor, each word of which has a flag; returns false if there is none.
bool take(Context& context, Queues& queues, int peer, ncclGinProxyGfd_t& to, Issued*& issued) {
  size_t slot = size_t(peer) * context.queue_size + (queues.seen[size_t(peer)] & (context.queue_size - 1));
  ncclGinProxyQword_t* words = queues.descriptors[slot].qword;
  for (int k = 0; k < ncclGinProxyGfdQwords; k++) {
    while (!((to.qword[k].raw = __atomic_load_n(&words[k].raw, __ATOMIC_ACQUIRE)) & 1)) {
      if (k == 0) return false;
      sched_yield();
    }
  }
  for (int k = 0; k < ncclGinProxyGfdQwords; k++) __atomic_store_n(&words[k].raw, 0, __ATOMIC_RELAXED);
  issued = &queues.issued[slot];
  *issued = {to.qword[ncclGinProxyGfdHeaderExt].headerExt.op, to.qword[ncclGinProxyGfdCompletion].completion.counterId, 0, nullptr};
  queues.seen[size_t(peer)]++;
  return true;
}

void* handle_of(uint64_t bits) {
  return reinterpret_cast<void*>(bits);
}

// Calls the plugin for a descriptor.
ncclResult_t issue(Context& context, Queues& queues, int peer, ncclGinProxyGfd_t& from, Issued& to, uint32_t flags) {
  const ncclGinProxyQword_t* word = from.qword;
  void* ctx = context.rma_ctx;
  auto rank = uint32_t(peer);
  size_t size = word[ncclGinProxyGfdHeader].header.size;
  uint64_t src_off = word[ncclGinProxyGfdSrcOff].srcOff.srcOff, dst_off = word[ncclGinProxyGfdDstOff].dstOff.dstOff;
  void* src = handle_of(word[ncclGinProxyGfdSrcHandle].srcHandle.srcHandle);
  void* dst = handle_of(word[ncclGinProxyGfdDstHandle].dstHandle.dstHandle);
  uint64_t amount = word[ncclGinProxyGfdCompletion].completion.signalValLow |
                    uint64_t(word[ncclGinProxyGfdSignalVal].signalVal.signalValLow2) << 16 |
                    uint64_t(word[ncclGinProxyGfdSignalVal].signalVal.signalValHigh) << 32;
  uint32_t signal_op = to.op & ncclGinProxyOpWithSignalInc ? FOREIGN_SIGNAL_INC : FOREIGN_SIGNAL_ADD;
  bool is_strong = word[ncclGinProxyGfdHeader].header.version < 2 || word[ncclGinProxyGfdSignalVal].signalVal.isStrongSignal;
  if (to.op & ncclGinProxyOpVASignal) {
    uint64_t offset = word[ncclGinProxyGfdVASignalOff].vaSignalOff.vaSignalOff;
    void* window = handle_of(word[ncclGinProxyGfdVASignalHandle].vaSignalHandle.vaSignalHandle);
    return rma.iputSignal(ctx, queues.id, 0, nullptr, 0, 0, nullptr, rank, offset, window, amount, signal_op, is_strong, flags, &to.request);
  }
  if (to.op & ncclGinProxyOpGet) {
    return rma.iget(ctx, queues.id, src_off, src, size, dst_off, dst, rank, flags, &to.request);
  }
  if (to.op & ncclGinProxyOpFlush) {
    TRY(rma.iflush(ctx, queues.id, context.signals_mhandle, rank, &to.request));
    to.done = to.request == nullptr;
    return ncclSuccess;
  }
  if (to.op & ncclGinProxyOpWithInline) {
    size_t slot = size_t(&to - queues.issued.data());
    uint64_t value = word[ncclGinProxyGfdInlineLow].inlineLow.inlineValLow;
    if (size > 4) value |= uint64_t(word[ncclGinProxyGfdInlineLow].inlineLow.inlineValLow2) << 32;
    if (size > 6) value |= uint64_t(word[ncclGinProxyGfdInlineHigh].inlineHigh.inlineValHigh) << 48;
    queues.inlines[slot] = value;
    src_off = slot * sizeof(uint64_t);
    src = queues.inlines_mhandle;
  }
  if (!(to.op & (ncclGinProxyOpWithSignalInc | ncclGinProxyOpWithSignalAdd))) {
    return rma.iput(ctx, queues.id, src_off, src, size, dst_off, dst, rank, flags, &to.request);
  }
  uint64_t signal = word[ncclGinProxyGfdCompletion].completion.signalId + uint64_t(queues.id) * uint64_t(context.n_signals);
  return rma.iputSignal(ctx, queues.id, src_off, src, size, dst_off, dst, rank, signal * sizeof(uint64_t), context.signals_mhandle, amount,
                        signal_op, is_strong, flags, &to.request);
}

// Takes a batch of a peer's descriptors. The plugin may hold back an operation's doorbell if another operation follows.
ncclResult_t take_batch(Context& context, Queues& queues, int peer) {
  ncclGinProxyGfd_t now, next;
  Issued *issued, *after;
  bool more = take(context, queues, peer, now, issued);
  for (int taken = 1; more; taken++) {
    more = taken < poll_batch && take(context, queues, peer, next, after);
    TRY(issue(context, queues, peer, now, *issued, more ? FOREIGN_RMA_AGGREGATE : 0));
    if (!issued->request && !issued->done) return ncclInternalError;
    now = next;
    issued = after;
  }
  return ncclSuccess;
}

ncclResult_t progress_of(Context& context) {
  for (Queues& queues : context.queues) {
    for (int peer = 0; peer < context.comm->nranks; peer++) TRY(complete(context, queues, peer));
    for (int peer = 0; peer < context.comm->nranks; peer++) TRY(take_batch(context, queues, peer));
  }
  return ncclSuccess;
}

ncclResult_t progress(void* of) {
  auto* context = static_cast<Context*>(of);
  ncclResult_t result = progress_of(*context);
  if (result != ncclSuccess) __atomic_store_n(&context->failed, true, __ATOMIC_RELEASE);
  TRY(result);
  // NCCL ignores the result.
  if (rma.rmaProgress) rma.rmaProgress(context->rma_ctx);
  return ncclSuccess;
}

ncclResult_t query_last_error(void* of, bool* has_error) {
  auto* context = static_cast<Context*>(of);
  *has_error = __atomic_load_n(&context->failed, __ATOMIC_ACQUIRE);
  return *has_error ? ncclSuccess : rma.queryLastError(context->rma_ctx, has_error);
}

}  // namespace

const ncclGin_v14_t* proxy_over(void* library, const ProxyMemory& given) {
  static ncclGin_v14_t table;
  memory = given;
  const char* name = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
  if (auto* v16 = static_cast<const ncclRma_v16_t*>(dlsym(library, "ncclRmaPlugin_v16"))) {
    name = v16->name;
    table.init = v16->init;
    table.devices = v16->devices;
    get_rma_properties = v16->getRmaProperties;
    rma = v16->calls;
  }
#endif
  if (auto* v15 = name ? nullptr : static_cast<const ncclRma_v15_t*>(dlsym(library, "ncclRmaPlugin_v15"))) {
    name = v15->name;
    table.init = v15->init;
    table.devices = v15->devices;
    rma = v15->calls;
  }
  if (!name) return nullptr;
  table.name = name;
  table.getGinProperties = get_gin_properties;
  table.getProperties = rma.getProperties;
  table.listen = listen;
  table.connect = connect;
  table.createContext = create_context;
  table.regMrSym = register_memory;
  table.deregMrSym = deregister_memory;
  table.destroyContext = destroy_context;
  table.closeColl = close_coll;
  table.closeListen = close_listen;
  table.ginProgress = progress;
  table.queryLastError = query_last_error;
  table.finalize = rma.finalize;
  return &table;
}
