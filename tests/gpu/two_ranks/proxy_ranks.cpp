#include "proxy_ranks.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include "../../foreign/proxy.h"

struct ProxyRanks::State {
  const ncclGin_v14_t* plugin = nullptr;
  void *ctx = nullptr, *comm = nullptr, *gin = nullptr, *mhandle = nullptr, *window = nullptr;
  ncclNetDeviceHandle_v11_t* handle = nullptr;
  std::thread thread;
  std::atomic<bool> stopping{false}, failed{false};
};

static void print_line(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level > FOREIGN_LOG_WARN && !getenv("FOREIGN_DEBUG")) return;
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
}

static void must(bool good, const char* call) {
  if (!good) throw std::runtime_error(std::string(call) + " failed");
}
#define MUST(call) must((call) == ncclSuccess, #call)

ProxyRanks::ProxyRanks(const char* plugin, int rank, const ProxyHost& host, void* window, size_t bytes, int contexts, int signals,
                       int counters)
    : state(new State) {
  State& s = *state;
  void* library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  // The plugin finds GPU memory's dma-bufs itself.
  s.plugin = proxy_over(library, {host.shared, host.device, process_memory.dma_buf});
  must(s.plugin, "dlsym of ncclRmaPlugin_v16");
  MUST(s.plugin->init(&s.ctx, 1, print_line));
  int count = 0;
  MUST(s.plugin->devices(&count));
  unsigned char blobs[2][FOREIGN_HANDLE_BYTES] = {};
  void *listener = nullptr, *handles[] = {blobs[0], blobs[1]};
  MUST(s.plugin->listen(s.ctx, 0, blobs[rank], &listener));
  must(host.exchange(blobs[rank], blobs[1 - rank], FOREIGN_HANDLE_BYTES), "the exchange of handles");
  MUST(s.plugin->connect(s.ctx, handles, 2, rank, listener, &s.comm));
  MUST(s.plugin->closeListen(listener));
  MUST(s.plugin->regMrSym(s.comm, window, bytes, FOREIGN_PTR_CUDA, 0, &s.mhandle, &s.window));
  ncclGinConfig_v14_t config = {};
  config.nSignals = signals;
  config.nCounters = counters;
  config.nContexts = contexts;
  config.trafficClass = -1;
  config.rankStride = 1;
  MUST(s.plugin->createContext(s.comm, &config, &s.gin, &s.handle));
  s.thread = std::thread([&s] {
    for (int round = 0; !s.stopping; round++) {
      if (s.plugin->ginProgress(s.gin) != ncclSuccess) {
        s.failed = true;
        return;
      }
      // The ranks share cores.
      if (round % 64 == 63) usleep(20);
      else sched_yield();
    }
  });
}

ProxyRanks::~ProxyRanks() {
  State& s = *state;
  s.stopping = true;
  if (s.thread.joinable()) s.thread.join();
  if (s.gin) s.plugin->destroyContext(s.gin);
  if (s.mhandle) s.plugin->deregMrSym(s.comm, s.mhandle);
  if (s.comm) s.plugin->closeColl(s.comm);
  if (s.ctx) s.plugin->finalize(s.ctx);
}

void* ProxyRanks::handle() const {
  return state->handle->handle;
}

void* ProxyRanks::window() const {
  return state->window;
}

bool ProxyRanks::has_failed() const {
  bool failed = true;
  return state->failed || state->plugin->queryLastError(state->gin, &failed) != ncclSuccess || failed;
}
