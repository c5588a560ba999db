// The two-rank test's phases: kernels that use NCCL's device API, with any EFA backend. nccl.cu runs them with NCCL's
// library, and software.cu on the software GPU. Each rank sends to the other and checks what it receives; no wait
// outlasts `limit`.
#pragma once

enum Phase { PLAIN, SIGNALLED, AGGREGATED, BLOCKS, STORM, PHASES };

static const char* const phase_names[PHASES] = {
  "putValue<int> without a signal; the peer polls its memory",
  "putValue<int> with SignalInc; the peer waits for the signal",
  "eight putValue<int>, seven of them aggregated; the peer polls its memory",
  "puts of 4 KiB with a signal and a counter, and a flush",
  "puts by 132 thread blocks on one queue",
};

// A phase's result. `found` is the peer's last value, if it isn't the expected one.
struct Result {
  int rounds;
  int slot;
  int expected, found;
};

// The kernels' arguments.
struct Arguments {
  int rank;
  int rounds;
  char* memory;
  Result* result;
};

// The window: what the peer writes, then what this rank sends.
static constexpr unsigned values_at = 0, block = 4096, block_at = block, parts_at = 64 << 10, source_at = 1 << 20, window_bytes = 2 << 20;
// Values per phase; each round uses the next ones.
static constexpr int slots = 64;
// The last phase's blocks, their puts between two flushes, and the bytes in each.
static constexpr int blocks = 132, block_threads = 64, burst = 10;
static constexpr unsigned part = 64;

// Every byte of what this rank sends, before the first phase.
static inline unsigned char source_byte(int rank) {
  return (unsigned char)(0xa0 + rank);
}

#ifdef __CUDACC__

// How many cycles a wait may take: half a minute on a GPU.
static constexpr unsigned long long limit = 60ull * 1000 * 1000 * 1000;

// Value `k` of a rank's round: never 0, and different from all others.
static __device__ int value(int rank, int round, int k) {
  return (rank + 1) << 28 | round << 4 | k;
}

// Waits for a value in memory.
static __device__ bool is_found(const Arguments& a, int slot, int expected) {
  auto* at = reinterpret_cast<volatile int*>(a.memory + values_at) + slot;
  auto began = clock64();
  int found = *at;
  while (found != expected && (unsigned long long)(clock64() - began) < limit) found = *at;
  // The next puts must follow what the peer did before it sent the value.
  __threadfence_system();
  if (found == expected) return true;
  a.result->slot = slot;
  a.result->expected = expected;
  a.result->found = found;
  return false;
}

static __device__ bool is_signalled(const ncclGin& gin, const Arguments& a, ncclGinSignal_t signal, int count) {
  if (gin.waitSignal(ncclCoopThread(), signal, uint64_t(count), 64, cuda::memory_order_acquire, limit) == ncclSuccess) return true;
  a.result->slot = -1 - int(signal);
  a.result->expected = count;
  a.result->found = int(gin.readSignal(signal));
  return false;
}

// No rank sends a round before it has the peer's values for the last one, so no value is overwritten before it is read.
static __device__ bool values(const ncclGin& gin, ncclWindow_t window, const Arguments& a, Phase phase, int round) {
  int peer = 1 - a.rank, count = phase == AGGREGATED ? 8 : 1;
  int first = int(phase) * slots + round * count % slots;
  for (int k = 0; k < count; k++) {
    size_t to = values_at + sizeof(int) * size_t(first + k);
    int sent = value(a.rank, round, k);
    ncclTeam world = ncclTeamWorld(gin.comm);
    if (phase == SIGNALLED) {
      gin.putValue<int>(world, peer, window, to, sent, ncclGin_SignalInc{0});
    } else if (k + 1 < count) {
      gin.putValue<int>(world, peer, window, to, sent, ncclGin_None{}, ncclCoopThread(), ncclGin_None{},
                        cuda::thread_scope_thread, cuda::thread_scope_device, ncclGinOptFlagsAggregateRequests);
    } else {
      gin.putValue<int>(world, peer, window, to, sent);
    }
  }
  if (phase == SIGNALLED && !is_signalled(gin, a, 0, round + 1)) return false;
  for (int k = 0; k < count; k++) {
    if (!is_found(a, first + k, value(peer, round, k))) return false;
  }
  return true;
}

static __device__ bool puts(const ncclGin& gin, ncclWindow_t window, const Arguments& a, int round) {
  int peer = 1 - a.rank;
  ncclTeam world = ncclTeamWorld(gin.comm);
  auto* source = reinterpret_cast<volatile int*>(a.memory + source_at);
  auto* got = reinterpret_cast<volatile int*>(a.memory + block_at);
  for (unsigned i = 0; i < block / sizeof(int); i++) source[i] = value(a.rank, round, 0) + int(i << 16);
  gin.put(world, peer, window, block_at, window, source_at, block, ncclGin_SignalInc{1}, ncclGin_CounterInc{0});
  if (!is_signalled(gin, a, 1, round + 1)) return false;
  for (unsigned i = 0; i < block / sizeof(int); i++) {
    a.result->slot = int(i);
    a.result->expected = value(peer, round, 0) + int(i << 16);
    a.result->found = got[i];
    if (a.result->found != a.result->expected) return false;
  }
  if (gin.waitCounter(ncclCoopThread(), 0, uint64_t(round) + 1, 56, cuda::memory_order_acquire, limit) != ncclSuccess) return false;
  gin.flush(ncclCoopThread());
  // The peer has read the block before this rank sends the next one.
  gin.signal(world, peer, ncclGin_SignalInc{2});
  return is_signalled(gin, a, 2, round + 1);
}

// Every block puts with all of its threads and flushes before it puts to the same bytes again; the signal counts all blocks' puts.
static __device__ void storm(const ncclGin& gin, ncclWindow_t window, const Arguments& a) {
  for (int i = 0; i < a.rounds; i++) {
    size_t at = parts_at + size_t(part) * (blockIdx.x * burst + i % burst);
    gin.put(ncclTeamWorld(gin.comm), 1 - a.rank, window, at, window, source_at + at, part, ncclGin_SignalInc{3}, ncclGin_None{},
            ncclCoopCta());
    if (i % burst == burst - 1) gin.flush(ncclCoopCta());
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  if (!is_signalled(gin, a, 3, blocks * a.rounds)) return;
  int wrong = 0;
#pragma unroll 1
  for (unsigned i = 0; i < blocks * burst * part; i++) {
    wrong += ((unsigned char*)a.memory)[parts_at + i] != (unsigned char)(0xa0 + 1 - a.rank);
  }
  a.result->found = wrong;
  a.result->expected = 0;
  if (wrong == 0) a.result->rounds = a.rounds;
}

static __device__ void run_phase(const ncclDevComm& comm, ncclWindow_t window, const Arguments& a, Phase phase) {
  ncclGin gin{comm, 0};
  if (phase == STORM) return storm(gin, window, a);
  for (int round = 0; round < a.rounds; round++) {
    if (!(phase == BLOCKS ? puts(gin, window, a, round) : values(gin, window, a, phase, round))) return;
    a.result->rounds = round + 1;
  }
  gin.flush(ncclCoopThread());
}

#endif

// The host's part: prints a phase's line, and returns whether it passed.
#include <stdio.h>

static inline bool report(int rank, Phase phase, int rounds, const Result& result) {
  bool passed = result.rounds == rounds;
  printf("%s rank %d, %c: %s", passed ? "PASS" : "FAIL", rank, "abcde"[phase], phase_names[phase]);
  if (passed) {
    printf(" (%d rounds)\n", rounds);
  } else if (result.slot < 0) {
    printf(": round %d of %d: signal %d is %d and not %d\n", result.rounds, rounds, -1 - result.slot, result.found, result.expected);
  } else {
    printf(": round %d of %d: at %d is %#x and not %#x\n", result.rounds, rounds, result.slot, (unsigned)result.found,
           (unsigned)result.expected);
  }
  fflush(stdout);
  return passed;
}
