// One rank's use of a GIN plugin, in the order of calls that NCCL keeps, down to what a kernel is given: an ncclDevComm
// with contexts and windows.
#pragma once

#include "device_code.h"
#include "plugin_abi.h"
#include "ranks.h"

#include <string>
#include <vector>

// What a scenario needs of a session.
struct Needs {
  int signals = 4;
  int counters = 4;
  int contexts = 1;     // of each connection
  int connections = 1;
  int queue_depth = 0;  // 0: the plugin's default
  size_t window_bytes = 1 << 20;
  int backend_version = FOREIGN_BACKEND_VERSION;
};

// A window: memory registered on every connection, and what NCCL's device code knows it by.
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

// The path of the plugin under test.
extern std::string plugin_path;
// Warnings that the plugin gave its logger in this process.
extern int warnings;
// The scenario provokes warnings: they are counted and not printed.
extern bool expect_warnings;
// What `init` is given: counts warnings and prints them; with FOREIGN_DEBUG in the environment, prints everything.
void plugin_logger(int level, unsigned long flags, const char* file, int line, const char* format, ...);

class Session {
 public:
  Session(Rank& rank, const Needs& needs);
  Session(const Session&) = delete;

  // The order of NCCL's teardown: ncclDevCommDestroy, ncclCommDestroy, last reference.
  void close(bool destroy_contexts = true, bool deregister = true);

  // Registers `bytes` at `base` (fresh memory when null); collective.
  Window* register_window(size_t bytes, void* base = nullptr, int type = FOREIGN_PTR_CUDA);
  void deregister(Window* window);

  ncclGin gin(int context = 0, ncclGinResourceSharingMode mode = NCCL_GIN_RESOURCE_SHARING_GPU) const {
    return ncclGin(dev, context, mode);
  }
  ncclTeam world() const {
    return ncclTeamWorld(dev);
  }
  nccl_ofi_gin_gdaki_dev_handle* device_handle(int context = 0) const;
  // What queryLastError says, over all contexts.
  bool has_error() const;
  // Fails the scenario when a context has seen an error.
  void expect_no_error() const;
  // Flushes every context and waits for the other ranks: nobody writes to a rank that goes. No error has been
  // seen, and no warning given that was not provoked.
  void settle() const;
  void dump() const;

  Rank& rank;
  Needs needs;
  const ncclGin_v14_t* plugin = nullptr;
  void* ctx = nullptr;
  std::vector<void*> colls;
  ncclDevComm dev = {};
  // The first signal of the barrier that NCCL adds to the signals asked for; those come before it.
  ncclGinBarrierHandle barrier = {};
  Window* src = nullptr;
  Window* dst = nullptr;

 private:
  void load();
  void connect();
  void create_contexts();

  void* library = nullptr;
  std::vector<void*> gin_contexts;
  std::vector<ncclNetDeviceHandle_v11_t*> handles;
  std::vector<Window*> windows;
  std::vector<uint64_t> shadows;
  Window* resource = nullptr;
};

#define GIN_CALL(session, call)                                                           \
  do {                                                                                    \
    ncclResult_t result_ = (session).plugin->call;                                        \
    CHECK((session).rank, result_ == ncclSuccess, "%s returned %d", #call, int(result_)); \
  } while (0)
