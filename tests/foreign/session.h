// One rank's use of a GIN plugin, in NCCL's order of calls, up to a kernel's arguments: an ncclDevComm with contexts and windows.
#pragma once

#include "device_code.h"
#include "plugin_abi.h"
#include "ranks.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

// What a scenario requires.
struct Needs {
  int signals = 4;
  int counters = 4;
  int contexts = 1;     // per connection
  int connections = 1;
  int queue_depth = 0;  // 0: the plugin's default
  size_t window_bytes = 1 << 20;
  int backend_version = FOREIGN_BACKEND_VERSION;
  bool context_refused = false;  // createContext fails on all ranks
};

// A window: memory registered on every connection, and its handles for NCCL's device code.
struct Window {
  unsigned char* base = nullptr;
  size_t bytes = 0;
  bool owned = false;
  std::vector<void*> mhandles;
  ncclWindow_vidmem view = {};

  ncclWindow_t handle() {
    return &view;
  }
  template <typename T>
  T load(size_t offset) const {
    return __atomic_load_n((const T*)(base + offset), __ATOMIC_ACQUIRE);
  }
};

// The path to the plugin under test.
extern std::string plugin_path;
// Kernels use that library's RMA plugin, through NCCL's proxy.
extern bool through_proxy;
// Loads the library, and returns the plugin's table.
const ncclGin_v14_t* load_plugin(Rank& rank, void*& library);
// How many WARN lines the plugin logged in this process, and the last one.
extern int warnings;
extern char last_warning[2048];
// Set by a scenario that causes warnings: the logger counts them without printing them.
extern bool expect_warnings;
// The logger for `init`: counts and prints warnings; with FOREIGN_DEBUG it prints all lines.
void plugin_logger(int level, unsigned long flags, const char* file, int line, const char* format, ...);

class Session {
 public:
  Session(Rank& rank, const Needs& needs);
  Session(const Session&) = delete;

  // Tears down in NCCL's order: ncclDevCommDestroy, ncclCommDestroy, last reference.
  void close(bool destroy_contexts = true, bool deregister = true);

  // Registers `bytes` at `base` (fresh memory if null); collective.
  Window* register_window(size_t bytes, void* base = nullptr, int type = FOREIGN_PTR_CUDA);
  void deregister(Window* window);

  ncclGin gin(int context = 0, ncclGinResourceSharingMode mode = NCCL_GIN_RESOURCE_SHARING_GPU) const {
    return ncclGin(dev, context, mode);
  }
  ncclTeam world() const {
    return ncclTeamWorld(dev);
  }
  nccl_ofi_gin_gdaki_dev_handle* device_handle(int context = 0) const;
  // Returns whether queryLastError reports an error for any context.
  bool has_error() const;
  // Fails the scenario if a context has seen an error.
  void expect_no_error() const;
  // Flushes every context and waits for the other ranks, so that no rank writes to a closed one. Checks that there were no errors and no
  // unexpected warnings.
  void settle() const;
  // Settles and closes.
  void finish() {
    settle();
    close();
  }
  void dump() const;

  Rank& rank;
  Needs needs;
  const ncclGin_v14_t* plugin = nullptr;
  void* ctx = nullptr;
  std::vector<void*> colls;
  ncclDevComm dev = {};
  // The first of the signals for NCCL's barrier, which follow the requested ones.
  ncclGinBarrierHandle barrier = {};
  Window* src = nullptr;
  Window* dst = nullptr;

 private:
  void load();
  void connect();
  void create_contexts();
  // Drives the contexts until `stopping`, as NCCL's thread does.
  void progress();

  void* library = nullptr;
  std::vector<void*> gin_contexts;
  std::vector<ncclNetDeviceHandle_v11_t*> handles;
  std::vector<Window*> windows;
  std::vector<uint64_t> shadows;
  Window* resource = nullptr;
  std::thread progress_thread;
  std::atomic<bool> stopping{false};
};

#define GIN_CALL(session, call)                                                           \
  do {                                                                                    \
    ncclResult_t result_ = (session).plugin->call;                                        \
    CHECK((session).rank, result_ == ncclSuccess, "%s returned %d", #call, int(result_)); \
  } while (0)
