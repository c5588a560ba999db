// The scenarios, which each rank runs with a session. CHECK ends the rank on a wrong result.
#pragma once

#include "session.h"

#include <stdlib.h>
#include <string.h>

struct Scenario {
  const char* name;
  void (*body)(Rank&);
  // Several times what it takes on an idle machine; run_ranks allows even more, for a busy one.
  unsigned seconds;
  // Why this build or number of ranks can't run the scenario, or null.
  const char* (*skip)(int nranks);
  // Calls putValue.
  bool values = false;
};

// The card's faults, from SOFTEFA_FAULTS; empty if there are none.
inline const char* faults() {
  const char* text = getenv("SOFTEFA_FAULTS");
  return text ? text : "";
}

// NCCL 2.32's putValue needs 128-byte requests, and fails an assertion on a card without them.
inline bool values_work() {
  return through_proxy || FOREIGN_BACKEND_VERSION == 1 || !strstr(faults(), "wqe_size=64");
}

extern const std::vector<Scenario> data_scenarios;
extern const std::vector<Scenario> signal_scenarios;
extern const std::vector<Scenario> stress_scenarios;
extern const std::vector<Scenario> lifecycle_scenarios;
// For the proxy only.
extern const std::vector<Scenario> strong_scenarios;
// Call a GIN plugin directly.
extern const std::vector<Scenario> plugin_scenarios;
// Two ranks, one of which has a fault or a limit of its own.
std::vector<Scenario> failure_scenarios();

// Bytes that depend on every part of `seed` and on their position.
void fill(void* where, size_t bytes, uint64_t seed);
// The index of the first byte that differs from what `fill` writes, or -1.
ptrdiff_t first_difference(const void* where, size_t bytes, uint64_t seed);
// A number made from (from, to, round).
inline uint64_t seed_of(int from, int to, int round) {
  return uint64_t(from + 1) * 1000003 + uint64_t(to + 1) * 10007 + uint64_t(round);
}

// Reads until `*p == value`, or the rank's alarm goes off.
template <typename T>
inline void poll_until(const T* p, T value) {
  while (__atomic_load_n(p, __ATOMIC_ACQUIRE) != value) shim::spun();
  shim::progressed();
}

// Ends a wait before the alarm, with a line about the event. NCCL counts cycles; the shim counts nanoseconds.
constexpr uint64_t patience = 120ull * 1000 * 1000 * 1000;

#define WAIT_SIGNAL(session, gin, signal, least)                                                                    \
  do {                                                                                                              \
    ncclResult_t wait_ = (gin).waitSignal(ncclCoopThread(), (signal), (least), 64, cuda::memory_order_acquire,      \
                                          patience);                                                                \
    if (wait_ != ncclSuccess) (session).dump();                                                                     \
    CHECK((session).rank, wait_ == ncclSuccess, "signal %u stays at %llu, awaited %llu", unsigned(signal),          \
          (unsigned long long)(gin).readSignal(signal), (unsigned long long)(least));                               \
  } while (0)

#define WAIT_COUNTER(session, gin, counter, least)                                                                  \
  do {                                                                                                              \
    ncclResult_t wait_ = (gin).waitCounter(ncclCoopThread(), (counter), (least), 56, cuda::memory_order_acquire,    \
                                           patience);                                                               \
    if (wait_ != ncclSuccess) (session).dump();                                                                     \
    CHECK((session).rank, wait_ == ncclSuccess, "counter %u stays at %llu, awaited %llu", unsigned(counter),        \
          (unsigned long long)(gin).readCounter(counter), (unsigned long long)(least));                             \
  } while (0)

#define FLUSH(session, gin)                                                                                         \
  do {                                                                                                              \
    ncclResult_t flush_ = (gin).flush(ncclCoopThread(), cuda::memory_order_acquire, ncclGin_None{}, patience);      \
    if (flush_ != ncclSuccess) (session).dump();                                                                    \
    CHECK((session).rank, flush_ == ncclSuccess, "flush does not end: %d", int(flush_));                            \
  } while (0)

// put with every argument but the flags at its default.
template <typename Remote, typename Local>
inline void put_flags(const ncclGin& gin, ncclTeam team, int peer, ncclWindow_t dst, size_t dst_off, ncclWindow_t src,
                      size_t src_off, size_t bytes, Remote remote, Local local, uint32_t flags) {
  gin.put(team, peer, dst, dst_off, src, src_off, bytes, remote, local, ncclCoopThread{}, ncclGin_None{},
          cuda::thread_scope_thread, cuda::thread_scope_device, flags);
}
