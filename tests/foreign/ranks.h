// Ranks as forked processes, with the operations of NCCL's bootstrap: barrier and allgather.
#pragma once

#include <stddef.h>
#include <stdint.h>

constexpr int max_ranks = 16;

// One page of anonymous shared memory that the ranks inherit. It has no name, so no file remains.
struct Shared {
  uint32_t failed;
  uint32_t arrived;
  uint32_t generation;
  unsigned char slot[max_ranks][1024];
};

struct Rank {
  int rank;
  int nranks;
  const char* scenario;
  Shared* shared;

  int right() const {
    return (rank + 1) % nranks;
  }
  int left() const {
    return (rank + nranks - 1) % nranks;
  }
  // Waits for all ranks; exits if another rank failed.
  void barrier() const;
  // `all[r]` gets rank r's `bytes` bytes (at most 1024).
  void allgather(const void* mine, size_t bytes, void* all) const;
  // Prints one line that names the scenario and rank, and exits with status 1.
  [[noreturn]] void fail(const char* file, int line, const char* format, ...) const
    __attribute__((format(printf, 4, 5)));
};

#define CHECK(rank, condition, ...)                               \
  do {                                                            \
    if (!(condition)) (rank).fail(__FILE__, __LINE__, __VA_ARGS__); \
  } while (0)

// Runs `body` in `nranks` processes; returns whether all of them exited with status 0 within five times
// `seconds`. The limit ends a hung rank, and leaves enough time on a busy machine.
bool run_ranks(const char* scenario, int nranks, unsigned seconds, void (*body)(Rank&));
// A signal handler calls this function in a rank that runs out of time, to print its state.
extern void (*on_timeout)();
// This process's rank, for lines in a log.
extern int this_rank;
