// Refused calls, and every teardown order that NCCL may use.
#include "scenarios.h"

#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

#include <thread>

static void exchange_once(Session& s) {
  Rank& rank = s.rank;
  ncclGin gin = s.gin();
  if (values_work()) {
    gin.putValue(s.world(), rank.right(), s.dst->handle(), 0, seed_of(rank.rank, 1, 2), ncclGin_WeakSignalInc{1});
  } else {
    *(uint64_t*)s.src->base = seed_of(rank.rank, 1, 2);
    gin.put(s.world(), rank.right(), s.dst->handle(), 0, s.src->handle(), 0, 8, ncclGin_WeakSignalInc{1});
  }
  WAIT_SIGNAL(s, gin, 1, 1);
  CHECK(rank, s.dst->load<uint64_t>(0) == seed_of(rank.left(), 1, 2), "the value is wrong");
  FLUSH(s, gin);
  s.expect_no_error();
}

static int open_files() {
  int n = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (dir && readdir(dir)) n++;
  if (dir) closedir(dir);
  return n;
}

// Consecutive communicators in one process, with full teardown, without destroyContext, and also without deregMrSym. Resource use doesn't
// grow with their number.
static void teardown(Rank& rank) {
  int files[2] = {};
  for (int round = 0; round < 9; round++) {
    Needs needs;
    needs.contexts = 1 + round % 2;
    needs.connections = 1 + round % 2;
    Session s(rank, needs);
    exchange_once(s);
    // Closing the communicator with operations in flight must neither hang nor crash.
    if (round % 3 == 2) {
      for (int i = 0; i < 10; i++) s.gin().put(s.world(), rank.rank, s.dst->handle(), 0, s.src->handle(), 0, 4096);
    }
    // NCCL doesn't tell a rank that another is still posting to it. Here, all ranks have received their data.
    rank.barrier();
    s.close(round % 3 == 0, round % 3 != 2);
    if (round == 2) files[0] = open_files();
    if (round == 8) files[1] = open_files();
  }
  CHECK(rank, files[1] <= files[0], "%d open files after 3 communicators, %d after 9", files[0], files[1]);
}

// Each rank closes as soon as it has posted to the next one, without a flush: by destroyContext, or by closeColl alone. The first rank's
// request has a deferred doorbell.
static void close_at_once(Rank& rank) {
  for (int round = 0; round < 4; round++) {
    Session s(rank, Needs());
    ncclGin gin = s.gin();
    if (rank.rank > 0) {
      WAIT_SIGNAL(s, gin, 1, 1);
      CHECK(rank, s.dst->load<uint64_t>(0) == seed_of(rank.rank - 1, 1, round), "the value is wrong");
    }
    if (rank.rank + 1 < rank.nranks) {
      *(uint64_t*)s.src->base = seed_of(rank.rank, 1, round);
      put_flags(gin, s.world(), rank.rank + 1, s.dst->handle(), 0, s.src->handle(), 0, 8, ncclGin_WeakSignalInc{1},
                ncclGin_None{}, rank.rank == 0 ? foreign_aggregate : 0);
    }
    s.close(round % 2 == 0, round % 2 == 0);
  }
}

// Two communicators at once in one process, each on its own init context.
static void two_communicators(Rank& rank) {
  Session a(rank, Needs());
  Session b(rank, Needs());
  exchange_once(a);
  exchange_once(b);
  a.settle();
  a.close();
  ncclGin gin = b.gin();
  gin.signal(b.world(), (rank.rank + 1) % rank.nranks, ncclGin_WeakSignalInc{2});
  WAIT_SIGNAL(b, gin, 2, 1);
  b.settle();
  b.close();
}

// Every backend version that this release supports; 0 means 1.
static void versions(Rank& rank) {
  Needs needs;
  needs.backend_version = FOREIGN_BACKEND_VERSION == 1 ? 0 : 2;
  Session s(rank, needs);
  exchange_once(s);
  s.finish();
}

#define REFUSED(rank, call)                                                    \
  do {                                                                         \
    int before_ = warnings;                                                    \
    ncclResult_t result_ = (call);                                             \
    CHECK(rank, result_ != ncclSuccess, "%s was accepted", #call);             \
    CHECK(rank, warnings > before_, "%s was refused without a line why", #call); \
  } while (0)

// Invalid arguments return an error and log a line, and the plugin still works.
static void bad_arguments(Rank& rank) {
  setenv("FERROGIN_TIMEOUT", "40", 1);
  expect_warnings = true;
  Session s(rank, Needs());
  const ncclGin_v14_t* p = s.plugin;
  void* coll = s.colls[0];
  void* out = nullptr;
  ncclNetDeviceHandle_v11_t* handle = nullptr;
  unsigned char blob[FOREIGN_HANDLE_BYTES] = {};
  ncclNetProperties_v12_t props = {};

  ncclGinConfig_v14_t config = {};
  config.nSignals = 1;
  config.nContexts = 1;
  config.trafficClass = -1;
  config.backendVersion = 99;
  config.rankStride = 1;
  REFUSED(rank, p->createContext(coll, &config, &out, &handle));
  CHECK(rank, out == nullptr && handle == nullptr, "a refused createContext gave something out");
  config.backendVersion = FOREIGN_BACKEND_VERSION;
  config.nContexts = -1;
  REFUSED(rank, p->createContext(coll, &config, &out, &handle));
  config.nContexts = 1;
  config.nSignals = -1;
  REFUSED(rank, p->createContext(coll, &config, &out, &handle));
  config.nSignals = 1;
  REFUSED(rank, p->createContext(coll, nullptr, &out, &handle));
  REFUSED(rank, p->createContext(coll, &config, nullptr, &handle));
  REFUSED(rank, p->createContext(coll, &config, &out, nullptr));
  REFUSED(rank, p->createContext(nullptr, &config, &out, &handle));
  REFUSED(rank, p->regMrSym(coll, nullptr, 4096, FOREIGN_PTR_CUDA, 0, &out, &out));
  REFUSED(rank, p->regMrSym(coll, s.dst->base, 0, FOREIGN_PTR_CUDA, 0, &out, &out));
  REFUSED(rank, p->regMrSym(coll, s.dst->base, 4096, 77, 0, &out, &out));
  REFUSED(rank, p->regMrSym(coll, s.dst->base, 4096, FOREIGN_PTR_CUDA, 0, nullptr, &out));
  REFUSED(rank, p->regMrSym(nullptr, s.dst->base, 4096, FOREIGN_PTR_CUDA, 0, &out, &out));
  REFUSED(rank, p->deregMrSym(coll, nullptr));
  REFUSED(rank, p->devices(nullptr));
  REFUSED(rank, p->getProperties(-1, &props));
  REFUSED(rank, p->getProperties(1000, &props));
  REFUSED(rank, p->getProperties(0, nullptr));
  REFUSED(rank, p->getGinProperties(nullptr));
  REFUSED(rank, p->listen(s.ctx, -1, blob, &out));
  REFUSED(rank, p->listen(s.ctx, 1000, blob, &out));
  REFUSED(rank, p->listen(s.ctx, 0, nullptr, &out));
  REFUSED(rank, p->listen(s.ctx, 0, blob, nullptr));
  REFUSED(rank, p->connect(s.ctx, nullptr, rank.nranks, rank.rank, nullptr, &out));
  REFUSED(rank, p->closeColl(nullptr));
  REFUSED(rank, p->closeListen(nullptr));
  REFUSED(rank, p->destroyContext(nullptr));
  REFUSED(rank, p->queryLastError(nullptr, nullptr));

  // Invalid handles: no rank connects, and all get an error.
  void* listener = nullptr;
  GIN_CALL(s, listen(s.ctx, 0, blob, &listener));
  unsigned char garbage[max_ranks][FOREIGN_HANDLE_BYTES];
  memset(garbage, 0x5a, sizeof(garbage));
  void* handles[max_ranks];
  for (int r = 0; r < rank.nranks; r++) handles[r] = garbage[r];
  REFUSED(rank, p->connect(s.ctx, handles, rank.nranks, rank.rank, listener, &out));
  GIN_CALL(s, closeListen(listener));
  rank.barrier();

  exchange_once(s);
  s.finish();
}

// A rank dies between listen and connect: the other ranks get an error within FERROGIN_TIMEOUT, and can connect later.
static void dead_peer(Rank& rank) {
  setenv("FERROGIN_TIMEOUT", "2", 1);
  expect_warnings = true;
  void* library = dlopen(plugin_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK(rank, library, "dlopen: %s", dlerror());
  auto* plugin = (const ncclGin_v14_t*)dlsym(library, "ncclGinPlugin_v14");
  CHECK(rank, plugin, "no ncclGinPlugin_v14");
  void *ctx = nullptr, *listener = nullptr, *coll = nullptr;
  int devices = 0;
  CHECK(rank, plugin->init(&ctx, 1, plugin_logger) == ncclSuccess, "init");
  CHECK(rank, plugin->devices(&devices) == ncclSuccess && devices > 0, "devices");
  unsigned char mine[FOREIGN_HANDLE_BYTES] = {}, all[max_ranks][FOREIGN_HANDLE_BYTES];
  CHECK(rank, plugin->listen(ctx, 0, mine, &listener) == ncclSuccess, "listen");
  rank.allgather(mine, sizeof(mine), all);
  if (rank.rank == rank.nranks - 1) return;
  void* handles[max_ranks];
  for (int r = 0; r < rank.nranks; r++) handles[r] = all[r];
  long long start = clock64();
  ncclResult_t result = plugin->connect(ctx, handles, rank.nranks, rank.rank, listener, &coll);
  long long took = clock64() - start;
  CHECK(rank, result != ncclSuccess, "connect with a dead peer succeeded");
  CHECK(rank, warnings > 0, "connect failed without a line why");
  // Far above FERROGIN_TIMEOUT, because a busy machine delays processes; far below a hang.
  CHECK(rank, took < 60ll * 1000 * 1000 * 1000, "connect took %lld ms with FERROGIN_TIMEOUT=2", took / 1000000);
  CHECK(rank, plugin->closeListen(listener) == ncclSuccess, "closeListen");
  CHECK(rank, plugin->finalize(ctx) == ncclSuccess, "finalize");
}

// A rank dies during traffic: on a rank that writes to it, queryLastError keeps reporting the error, and that rank can still close. Data
// for the other ranks arrives.
static void peer_dies(Rank& rank) {
  expect_warnings = true;
  Session s(rank, Needs());
  exchange_once(s);
  pid_t own = getpid(), pids[max_ranks];
  rank.allgather(&own, sizeof(own), pids);
  int dead = rank.nranks - 1;
  if (rank.rank == dead) _exit(0);
  // Waits until the parent has reaped the rank.
  while (kill(pids[dead], 0) == 0) usleep(1000);
  ncclGin gin = s.gin();
  int right = (rank.rank + 1) % dead;
  for (int i = 0; i < 10; i++) gin.put(s.world(), dead, s.dst->handle(), 0, s.src->handle(), 0, 4096);
  *(uint64_t*)(s.src->base + 8192) = 7777;
  gin.put(s.world(), right, s.dst->handle(), 64, s.src->handle(), 8192, 8, ncclGin_WeakSignalInc{2});
  // NCCL's proxy stops at the first failure.
  if (!through_proxy) {
    WAIT_SIGNAL(s, gin, 2, 1);
    CHECK(rank, s.dst->load<uint64_t>(64) == 7777, "the value from a living rank is wrong");
  }
  // A rank that closed now could cancel data on its way to a live rank.
  Rank living = rank;
  living.nranks--;
  living.barrier();
  long long deadline = clock64() + (long long)patience;
  while (!s.has_error()) {
    CHECK(rank, clock64() < deadline, "two minutes after a peer's death queryLastError knows nothing of it");
    usleep(1000);
  }
  // The host reads the reason from the completion queue, a little after the counter changes.
  deadline = clock64() + (long long)patience;
  while (__atomic_load_n(&warnings, __ATOMIC_RELAXED) == 0) {
    CHECK(rank, clock64() < deadline, "an operation failed and no line says why");
    usleep(1000);
  }
  for (int i = 0; i < 1000; i++) CHECK(rank, s.has_error(), "the error of a context went away");
  s.close();
}

// A rank is killed at an arbitrary point of set-up, during a call or between two: the other ranks get an error within FERROGIN_TIMEOUT,
// and can close.
static void killed_in_setup(Rank& rank) {
  constexpr int rounds = 3;
  constexpr long long second = 1000ll * 1000 * 1000;
  setenv("FERROGIN_TIMEOUT", "6", 1);
  expect_warnings = true;
  void* library = nullptr;
  const ncclGin_v14_t* plugin = load_plugin(rank, library);
  void* ctx = nullptr;
  CHECK(rank, plugin->init(&ctx, 1, plugin_logger) == ncclSuccess, "init");
  void* listeners[rounds] = {};
  unsigned char all[rounds][max_ranks][FOREIGN_HANDLE_BYTES];
  for (int round = 0; round < rounds; round++) {
    unsigned char mine[FOREIGN_HANDLE_BYTES] = {};
    CHECK(rank, plugin->listen(ctx, 0, mine, &listeners[round]) == ncclSuccess, "listen");
    rank.allgather(mine, sizeof(mine), all[round]);
  }
  // Kills at a random time, counted from the first connect, or from the first call after the last connect.
  std::thread killer;
  bool late = clock64() / 1000 % 2;
  auto kill_within = [&](unsigned microseconds) {
    if (rank.rank < rank.nranks - 1 || killer.joinable()) return;
    useconds_t after = useconds_t(clock64() / 1000 % microseconds);
    killer = std::thread([after] {
      usleep(after);
      _exit(0);
    });
  };
  if (!late) kill_within(80000);

  static unsigned char memory[1 << 16];
  ncclGinConfig_v14_t config = {};
  config.nSignals = 8;
  config.nContexts = 1;
  config.trafficClass = -1;
  config.backendVersion = FOREIGN_BACKEND_VERSION;
  config.rankStride = 1;
  ncclResult_t result = ncclSuccess;
  const char* call = "";
  void* coll = nullptr;
  long long began = 0;
  // One timed collective call, which returns whichever rank is dead.
  auto collective = [&](const char* name, auto&& body) {
    if (result != ncclSuccess) return false;
    call = name;
    began = clock64();
    result = body();
    CHECK(rank, clock64() - began < 90 * second, "%s took %lld ms", name, (clock64() - began) / 1000000);
    return result == ncclSuccess;
  };
  for (int round = 0; result == ncclSuccess; round++) {
    CHECK(rank, round < 100000, "nobody was killed");
    if (round < rounds) {
      if (coll) CHECK(rank, plugin->closeColl(coll) == ncclSuccess, "closeColl");
      coll = nullptr;
      void* handles[max_ranks];
      for (int r = 0; r < rank.nranks; r++) handles[r] = all[round][r];
      collective("connect", [&] {
        return plugin->connect(ctx, handles, rank.nranks, rank.rank, listeners[round], &coll);
      });
      CHECK(rank, plugin->closeListen(listeners[round]) == ncclSuccess, "closeListen");
      listeners[round] = nullptr;
    }
    if (round == rounds - 1) kill_within(20000);
    void *mhandle = nullptr, *window = nullptr, *context = nullptr;
    ncclNetDeviceHandle_v11_t* device = nullptr;
    bool registered = collective("regMrSym", [&] {
      return plugin->regMrSym(coll, memory, sizeof(memory), FOREIGN_PTR_HOST, 0, &mhandle, &window);
    });
    if (collective("createContext", [&] { return plugin->createContext(coll, &config, &context, &device); })) {
      bool error = true;
      CHECK(rank, plugin->queryLastError(context, &error) == ncclSuccess && !error, "an error without an operation");
      CHECK(rank, plugin->destroyContext(context) == ncclSuccess, "destroyContext");
    }
    if (registered) CHECK(rank, plugin->deregMrSym(coll, mhandle) == ncclSuccess, "deregMrSym");
  }
  // On a very busy machine a call may time out before the kill.
  if (killer.joinable()) killer.join();
  CHECK(rank, warnings == 1, "%d lines for one failure (%s)", warnings, call);
  if (coll) CHECK(rank, plugin->closeColl(coll) == ncclSuccess, "closeColl");
  for (void* listener : listeners) {
    if (listener) CHECK(rank, plugin->closeListen(listener) == ncclSuccess, "closeListen");
  }
  CHECK(rank, plugin->finalize(ctx) == ncclSuccess, "finalize");
  if (getenv("FOREIGN_DEBUG")) fprintf(stderr, "  [%d] the rank was killed in %s\n", rank.rank, call);
}

// init and finalize without a communicator, as when NCCL doesn't use a plugin.
static void init_finalize(Rank& rank) {
  void* library = dlopen(plugin_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK(rank, library, "dlopen: %s", dlerror());
  auto* plugin = (const ncclGin_v14_t*)dlsym(library, "ncclGinPlugin_v14");
  CHECK(rank, plugin, "no ncclGinPlugin_v14");
  for (int round = 0; round < 50; round++) {
    void *a = nullptr, *b = nullptr;
    CHECK(rank, plugin->init(&a, 1, plugin_logger) == ncclSuccess, "init");
    CHECK(rank, plugin->init(&b, 2, plugin_logger) == ncclSuccess, "second init");
    CHECK(rank, plugin->finalize(a) == ncclSuccess, "finalize");
    CHECK(rank, plugin->finalize(b) == ncclSuccess, "second finalize");
  }
  dlclose(library);
}

const std::vector<Scenario> lifecycle_scenarios = {
  {"teardown", teardown, 60, nullptr},
  {"close_at_once", close_at_once, 30, nullptr},
  {"two_communicators", two_communicators, 30, nullptr},
  {"peer_dies", peer_dies, 60, nullptr},
  {"killed_in_setup", killed_in_setup, 60, nullptr},
};

const std::vector<Scenario> plugin_scenarios = {
  {"init_finalize", init_finalize, 30, nullptr},
  {"versions", versions, 30, nullptr},
  {"bad_arguments", bad_arguments, 60, nullptr},
  {"dead_peer", dead_peer, 30, nullptr},
};
