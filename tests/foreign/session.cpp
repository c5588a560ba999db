#include "session.h"

#include "proxy.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

std::string plugin_path;
bool through_proxy = false;
int warnings = 0;
char last_warning[2048];
bool expect_warnings = false;

static Session* watched = nullptr;

void plugin_logger(int level, unsigned long, const char*, int, const char* format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  // The plugin reports a capability that a card lacks once; that's not a failure.
  bool remark = strstr(text, "has no 128-byte requests");
  // The plugin's threads write log lines too.
  if (level == FOREIGN_LOG_WARN && !remark) {
    memcpy(last_warning, text, sizeof(text));
    __atomic_add_fetch(&warnings, 1, __ATOMIC_RELEASE);
  }
  if ((level > FOREIGN_LOG_WARN || expect_warnings) && !getenv("FOREIGN_DEBUG")) return;
  fprintf(stderr, "  [%d] plugin %s: %s\n", this_rank, level == FOREIGN_LOG_WARN ? "WARN" : "INFO", text);
}

Session::Session(Rank& rank_, const Needs& needs_) : rank(rank_), needs(needs_) {
  watched = this;
  on_timeout = [] {
    if (watched) watched->dump();
  };
  load();
  connect();
  // NCCL registers the existing windows, then creates contexts, then registers its own resource window.
  src = register_window(needs.window_bytes);
  dst = register_window(needs.window_bytes);
  create_contexts();
  resource = register_window(2 << 20);
  rank.barrier();
}

const ncclGin_v14_t* load_plugin(Rank& rank, void*& library) {
  library = dlopen(plugin_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK(rank, library, "dlopen: %s", dlerror());
  const char* symbol = through_proxy ? "ncclRmaPlugin_v15" : "ncclGinPlugin_v14";
  auto* plugin = through_proxy ? proxy_over(library, process_memory) : (const ncclGin_v14_t*)dlsym(library, symbol);
  CHECK(rank, plugin, "dlsym %s: %s", symbol, dlerror());
  return plugin;
}

void Session::load() {
  plugin = load_plugin(rank, library);
  CHECK(rank, plugin->name && plugin->name[0], "the plugin has no name");

  GIN_CALL(*this, init(&ctx, 0x5eed, plugin_logger));
  int n = 0;
  GIN_CALL(*this, devices(&n));
  CHECK(rank, n > 0, "devices: %d", n);
  ncclNetProperties_v12_t props = {};
  GIN_CALL(*this, getProperties(0, &props));
  auto type = through_proxy ? NCCL_NET_DEVICE_GIN_PROXY : NCCL_NET_DEVICE_GIN_EFA_GDA;
  CHECK(rank, props.netDeviceType == type, "netDeviceType %d", int(props.netDeviceType));
  CHECK(rank, props.ptrSupport & FOREIGN_PTR_CUDA, "ptrSupport %d has no CUDA", props.ptrSupport);
  ncclGinProperties_v14_t gin_props = {!through_proxy, !through_proxy};
  GIN_CALL(*this, getGinProperties(&gin_props));
  CHECK(rank, gin_props.supportsStrongSignals == through_proxy, "EFA has no strong signals, and the proxy has");
  CHECK(rank, gin_props.supportsVASignals == through_proxy, "EFA has no VA signals, and the proxy has");
}

void Session::connect() {
  int n = 0;
  GIN_CALL(*this, devices(&n));
  for (int c = 0; c < needs.connections; c++) {
    int device = c % n;
    unsigned char mine[FOREIGN_HANDLE_BYTES] = {};
    void* listener = nullptr;
    GIN_CALL(*this, listen(ctx, device, mine, &listener));
    ncclNetProperties_v12_t props = {};
    GIN_CALL(*this, getProperties(device, &props));
    std::vector<unsigned char> all(size_t(rank.nranks) * FOREIGN_HANDLE_BYTES);
    rank.allgather(mine, FOREIGN_HANDLE_BYTES, all.data());
    std::vector<void*> handles;
    for (int r = 0; r < rank.nranks; r++) handles.push_back(&all[size_t(r) * FOREIGN_HANDLE_BYTES]);
    void* coll = nullptr;
    GIN_CALL(*this, connect(ctx, handles.data(), rank.nranks, rank.rank, listener, &coll));
    // The plugin must not use the listener or the handles after connect.
    GIN_CALL(*this, closeListen(listener));
    memset(all.data(), 0xa5, all.size());
    CHECK(rank, coll, "connect gave no communicator");
    colls.push_back(coll);
  }
}

Window* Session::register_window(size_t bytes, void* base, int type) {
  auto* window = new Window;
  window->owned = base == nullptr;
  window->bytes = bytes;
  if (!base) {
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(rank, base != MAP_FAILED, "mmap of %zu bytes", bytes);
  }
  window->base = (unsigned char*)base;
  window->view.numSegments = 1;
  window->view.worldRank = rank.rank;
  for (size_t c = 0; c < colls.size(); c++) {
    void* mhandle = nullptr;
    void* gin_handle = nullptr;
    GIN_CALL(*this, regMrSym(colls[c], base, bytes, type, 0, &mhandle, &gin_handle));
    CHECK(rank, mhandle, "regMrSym gave no mhandle");
    CHECK(rank, gin_handle, "regMrSym gave no ginHandle");
    window->mhandles.push_back(mhandle);
    window->view.ginWinsDefaultBackend[c] = gin_handle;
  }
  windows.push_back(window);
  // NCCL ends a collective registration with a barrier.
  rank.barrier();
  return window;
}

void Session::deregister(Window* window) {
  for (size_t c = 0; c < colls.size(); c++) GIN_CALL(*this, deregMrSym(colls[c], window->mhandles[c]));
  for (size_t i = 0; i < windows.size(); i++) {
    if (windows[i] == window) windows.erase(windows.begin() + i);
  }
  if (window->owned) munmap(window->base, window->bytes);
  delete window;
}

void Session::create_contexts() {
  int signals = needs.signals + rank.nranks;
  for (void* coll : colls) {
    ncclGinConfig_v14_t config = {};
    config.nSignals = signals;
    config.nCounters = needs.counters;
    config.nContexts = needs.contexts;
    config.queueDepth = needs.queue_depth;
    config.trafficClass = -1;
    config.backendVersion = needs.backend_version;
    config.rankStride = 1;
    void* gin_context = nullptr;
    ncclNetDeviceHandle_v11_t* handle = nullptr;
    ncclResult_t result = plugin->createContext(coll, &config, &gin_context, &handle);
    CHECK(rank, (result == ncclSuccess) != needs.context_refused, "createContext returned %d", int(result));
    if (needs.context_refused) return;
    CHECK(rank, gin_context && handle && handle->handle, "createContext left something null");
    auto type = through_proxy ? NCCL_NET_DEVICE_GIN_PROXY : NCCL_NET_DEVICE_GIN_EFA_GDA;
    CHECK(rank, handle->netDeviceType == type, "type %d", int(handle->netDeviceType));
    gin_contexts.push_back(gin_context);
    handles.push_back(handle);
  }

  int connections = int(colls.size());
  dev.rank = rank.rank;
  dev.nRanks = rank.nranks;
  dev.lsaSize = 1;
  dev.ginConnectionCount = uint8_t(connections);
  dev.ginContextCount = uint32_t(connections * needs.contexts);
  dev.ginConnectionStride = 1;
  dev.ginContextStride = 1;
  dev.ginSignalCount = signals;
  dev.ginCounterCount = needs.counters;
  for (int c = 0; c < connections; c++) {
    dev.ginNetDeviceTypes[c] = uint8_t(handles[c]->netDeviceType);
    dev.ginHandles[c] = handles[c]->handle;
  }
  shadows.resize(size_t(signals) * dev.ginContextCount);
  dev.ginSignalShadows = shadows.data();
  barrier.signal0 = uint32_t(needs.signals);
  dev.worldGinBarrier = barrier;
  if (handles[0]->needsProxyProgress) progress_thread = std::thread(&Session::progress, this);
}

void Session::progress() {
  // NCCL's thread polls without pausing, which would take too long here, where ranks share cores. The last round, after the session's last
  // post, gives that post to the plugin.
  bool is_last = false;
  for (int round = 0; !is_last; round++) {
    is_last = stopping;
    for (void* gin_context : gin_contexts) {
      // NCCL's thread ends too; `has_error` reports the error.
      if (plugin->ginProgress(gin_context) != ncclSuccess) return;
    }
    if (round % 64 == 63) usleep(20);
    else sched_yield();
  }
}

nccl_ofi_gin_gdaki_dev_handle* Session::device_handle(int context) const {
  int connections = int(colls.size());
  auto* array = (nccl_ofi_gin_gdaki_dev_handle*)dev.ginHandles[context % connections];
  return &array[context / connections];
}

bool Session::has_error() const {
  bool any = false;
  for (void* gin_context : gin_contexts) {
    bool error = true;
    GIN_CALL(*this, queryLastError(gin_context, &error));
    any |= error;
  }
  return any;
}

void Session::expect_no_error() const {
  CHECK(rank, !has_error(), "queryLastError says that an operation has failed");
}

void Session::settle() const {
  for (uint32_t c = 0; c < dev.ginContextCount; c++) {
    ncclResult_t result = gin(int(c)).flush(ncclCoopThread(), cuda::memory_order_acquire, ncclGin_None{},
                                            20ull * 1000 * 1000 * 1000);
    if (result != ncclSuccess) dump();
    CHECK(rank, result == ncclSuccess, "the flush at the end, context %u: %d", c, int(result));
  }
  rank.barrier();
  expect_no_error();
  CHECK(rank, warnings == 0 || expect_warnings || getenv("SOFTEFA_FAULTS"), "%d warnings", warnings);
}

void Session::close(bool destroy_contexts, bool deregister_all) {
  watched = nullptr;
  if (destroy_contexts) deregister(resource);
  stopping = true;
  if (progress_thread.joinable()) progress_thread.join();
  if (destroy_contexts) {
    for (void* gin_context : gin_contexts) GIN_CALL(*this, destroyContext(gin_context));
  }
  while (deregister_all && !windows.empty()) deregister(windows.back());
  for (void* coll : colls) GIN_CALL(*this, closeColl(coll));
  GIN_CALL(*this, finalize(ctx));
  for (Window* window : windows) {
    if (window->owned) munmap(window->base, window->bytes);
    delete window;
  }
  // NCCL closes a plugin's library after the last use.
  dlclose(library);
}

static void dump_endpoint(int rank, const char* name, int index, const nccl_ofi_gin_gdaki_dev_endpoint_handle& ep) {
  auto* qp = (const efa_cuda_qp*)ep.qp;
  uint64_t counter = __atomic_load_n(ep.local_cntr_value, __ATOMIC_ACQUIRE);
  if (qp->sq.wq.pc == 0) return;
  dprintf(2, "  [%d] %s%d: pc %u, handed off %u, rung %u, submitted %llu, completed %llu, sq_size %u, max_batch %u\n",
          rank, name, index, qp->sq.wq.pc, qp->sq.wq.wqes_completed, qp->sq.wq.wqes_posted,
          (unsigned long long)ep.submitted_count, (unsigned long long)counter, ep.sq_size, qp->sq.wq.max_batch);
}

void Session::dump() const {
  for (uint32_t c = 0; through_proxy && c < dev.ginContextCount; c++) {
    auto& view = ((ncclGinProxyGpuCtx_t*)dev.ginHandles[c % colls.size()])[c / colls.size()];
    for (int peer = 0; peer < rank.nranks; peer++) {
      dprintf(2, "  [%d] context %u, queue of rank %d: posted %u, done %u\n", rank.rank, c, peer, view.pis[peer],
              __atomic_load_n(&view.cis[peer], __ATOMIC_ACQUIRE));
    }
  }
  if (through_proxy) return;
  for (uint32_t c = 0; c < dev.ginContextCount; c++) {
    nccl_ofi_gin_gdaki_dev_handle* handle = device_handle(int(c));
    dump_endpoint(rank.rank, "data, context ", int(c), handle->data);
    dump_endpoint(rank.rank, "pvdata, context ", int(c), handle->pvdata);
    for (int i = 0; i < handle->nCounters; i++) dump_endpoint(rank.rank, "counter ", i, handle->counter_handles[i]->base);
    for (int i = 0; i < handle->nSignals; i++) {
      dprintf(2, "  [%d] signal %d: %llu\n", rank.rank, i,
              (unsigned long long)__atomic_load_n(handle->signal_handles[i]->cntr_value, __ATOMIC_ACQUIRE));
    }
  }
}
