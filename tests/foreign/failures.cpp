// A card that fails requests, stops or has too few counters, and a process at one of its limits: the plugin's line names cause and fix
// within the time in docs/software-card.md, and no call hangs. scenarios/scenario-runner/tests/all/failures.rs does the same for our device code.
#include "scenarios.h"

#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

// Rank 0's failure, and parts of the line that each rank sees: with kernels on the card, and through the proxy.
struct Failure {
  const char* name;
  // Rank 0's SOFTEFA_FAULTS.
  const char* faults;
  // Sets rank 0's limit, before its first post.
  void (*limit)();
  std::vector<const char*> seen[2];
  // Nothing for rank 0: the proxy doesn't have this failure.
  std::vector<const char*> seen_by_proxy[2];
};

static void set_limit(__rlimit_resource resource, rlim_t value) {
  struct rlimit now = {};
  getrlimit(resource, &now);
  now.rlim_cur = value;
  setrlimit(resource, &now);
}

// Leaves less room than a connection's shared memory takes.
static void no_memory() {
  long pages = 0;
  FILE* statm = fopen("/proc/self/statm", "r");
  if (!statm || fscanf(statm, "%ld", &pages) != 1) _exit(4);
  fclose(statm);
  set_limit(RLIMIT_AS, rlim_t(pages) * sysconf(_SC_PAGESIZE) + 512 * 1024);
}

static const std::vector<const char*> no_answer = {"write to rank 0", "the peer never answered",
                                                   "check that the peer runs, its log"};
static const std::vector<const char*> no_answer_by_proxy = {"from rank 1 to rank 0", "the peer never answered", "check the peer"};

static const std::vector<Failure> failures = {
  {"failed_request", "error_every=20", nullptr,
   {{"write to rank 1", "the peer reset the connection (status 8)", "check in the peer's log"}, {}},
   {{"from rank 0 to rank 1", "the peer reset the connection (provider code 8)", "check the peer"}, {}}},
  {"dead_card", "die_after=20", nullptr,
   {{"write to rank 1", "the queue pair failed inside the local card", "check the card"},
    {"write to rank 0", "answer", "check that the peer runs"}},
   {{"from rank 0 to rank 1", "the queue pair failed inside the local card", "its card"},
    {"from rank 1 to rank 0", "answer", "check the peer"}}},
  {"few_counters", "cntr_budget=4", nullptr,
   {{"createContext", "completion counters are needed on card", "request fewer signals"},
    {"rank 0 failed in createContext", "the log of rank 0"}},
   {}},
  {"no_descriptors", "", [] { set_limit(RLIMIT_NOFILE, 3); },
   {{"write to rank 1", "the peer never answered", "too many open files: raise `ulimit -n`"}, no_answer},
   {{"from rank 0 to rank 1", "the peer never answered", "too many open files: raise `ulimit -n`"}, no_answer_by_proxy}},
  // The RMA plugin allocates when it posts, and Rust's allocator ends a process that gets no memory.
  {"no_memory", "", no_memory,
   {{"write to rank 1", "the peer never answered", "no memory: raise", "`ulimit -v`"}, no_answer}, {}},
  {"no_shared_memory", "", [] { set_limit(RLIMIT_FSIZE, 4096); },
   {{"write to rank 1", "the peer never answered", "shared memory needs: raise `ulimit -f`"}, {}},
   {{"from rank 0 to rank 1", "the peer never answered", "shared memory needs: raise `ulimit -f`"}, {}}},
};

// On an EFA card, the plugin can't read the peer of NCCL's requests from the ring, and doesn't learn of the process's limits.
static bool known_of_efa(const char* part) {
  return !strstr(part, "to rank") && !strstr(part, "raise") && !strstr(part, "ulimit");
}

static void failure(Rank& rank) {
  const Failure* found = nullptr;
  for (const Failure& one : failures) {
    if (!strcmp(one.name, rank.scenario)) found = &one;
  }
  CHECK(rank, found, "no such failure");
  setenv("FERROGIN_TIMEOUT", "120", 1);
  setenv("SOFTEFA_WIRE", "shm", 1);
  const char* provider = getenv("FERROGIN_PROVIDER");
  bool efa = provider && !strcmp(provider, "efa");
  if (rank.rank == 0 && *found->faults) setenv("SOFTEFA_FAULTS", found->faults, 1);
  expect_warnings = true;
  Needs needs;
  needs.context_refused = strstr(found->faults, "cntr_budget");
  Session s(rank, needs);
  const auto& seen = (through_proxy ? found->seen_by_proxy : found->seen)[rank.rank];
  if (!needs.context_refused) {
    ncclGin gin = s.gin();
    // A queue of the proxy has room for 32, and nobody takes them after a failure.
    int posts = through_proxy ? 30 : 40;
    auto post = [&] {
      for (int i = 0; i < posts; i++) {
        gin.put(s.world(), 1 - rank.rank, s.dst->handle(), 0, s.src->handle(), 0, 64, ncclGin_WeakSignalInc{1});
      }
    };
    auto await_failure = [&] {
      long long deadline = clock64() + (long long)patience;
      while (!s.has_error() || !__atomic_load_n(&warnings, __ATOMIC_ACQUIRE)) {
        CHECK(rank, clock64() < deadline, "the failure is not reported");
        usleep(1000);
      }
    };
    if (rank.rank == 0) {
      if (found->limit) found->limit();
      post();
      await_failure();
    }
    // Rank 1 posts to what rank 0's failure has left.
    rank.barrier();
    if (rank.rank == 1) {
      post();
      if (seen.empty()) FLUSH(s, gin);
      else await_failure();
    }
    CHECK(rank, s.has_error() == !seen.empty(), "queryLastError");
  }
  for (const char* part : seen) {
    if (efa && !known_of_efa(part)) continue;
    CHECK(rank, strstr(last_warning, part), "\"%s\" is not in: %s", part, last_warning);
  }
  // NCCL's thread may learn of a failure by rmaProgress, and stops at the next call.
  int most = seen.empty() ? 0 : through_proxy ? 2 : 1;
  CHECK(rank, seen.empty() == !warnings && warnings <= most, "%d lines, the last: %s", warnings, last_warning);
  rank.barrier();
  s.close();
}

std::vector<Scenario> failure_scenarios() {
  std::vector<Scenario> all;
  auto skip = [](int nranks) { return nranks == 2 ? nullptr : "it is for two ranks"; };
  for (const Failure& one : failures) {
    if (!through_proxy || !one.seen_by_proxy[0].empty()) all.push_back({one.name, failure, 30, skip});
  }
  return all;
}
