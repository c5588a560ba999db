// Signals, counters and NCCL's barrier: each counts only operations that name it.
#include "scenarios.h"

#include <string.h>

// Adding n to a signal, for which NCCL's EFA backend posts n writes, without and with bytes.
static void signal_add(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  int rounds = 50;
  for (int round = 0; round < rounds; round++) {
    for (int peer = 0; peer < rank.nranks; peer++) {
      gin.signal(s.world(), peer, ncclGin_WeakSignalAdd{1, 5});
      fill(s.src->base + 512 * peer, 512, seed_of(rank.rank, peer, round));
      gin.put(s.world(), peer, s.dst->handle(), 512 * size_t(rank.rank), s.src->handle(), 512 * size_t(peer), 512,
              ncclGin_WeakSignalAdd{2, 5});
      gin.putValue(s.world(), peer, s.dst->handle(), 65536 + 8 * size_t(rank.rank), seed_of(rank.rank, peer, round),
                   ncclGin_WeakSignalAdd{3, 3});
    }
    uint64_t all = uint64_t(rank.nranks) * uint64_t(round + 1);
    WAIT_SIGNAL(s, gin, 1, 5 * all);
    WAIT_SIGNAL(s, gin, 2, 5 * all);
    WAIT_SIGNAL(s, gin, 3, 3 * all);
    for (int from = 0; from < rank.nranks; from++) {
      ptrdiff_t bad = first_difference(s.dst->base + 512 * from, 512, seed_of(from, rank.rank, round));
      CHECK(rank, bad < 0, "round %d: byte %td from rank %d is wrong", round, bad, from);
      uint64_t value = s.dst->load<uint64_t>(65536 + 8 * size_t(from));
      CHECK(rank, value == seed_of(from, rank.rank, round), "round %d: the value from rank %d is wrong", round, from);
    }
    FLUSH(s, gin);
    rank.barrier();
    CHECK(rank, gin.readSignal(1) == 5 * all && gin.readSignal(2) == 5 * all && gin.readSignal(3) == 3 * all,
          "round %d: %llu %llu %llu", round, (unsigned long long)gin.readSignal(1),
          (unsigned long long)gin.readSignal(2), (unsigned long long)gin.readSignal(3));
    rank.barrier();
  }
  CHECK(rank, gin.readSignal(0) == 0, "signal 0 was raised by nobody and has moved");
  s.finish();
}

// A counter counts each put that names it exactly once, whatever its signal. A put without a signal raises none at the peer.
static void counters(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  ncclWindow_t dst = s.dst->handle(), src = s.src->handle();
  uint64_t expected[4] = {};
  uint64_t signalled[4] = {};
  for (int round = 0; round < 100; round++) {
    gin.put(s.world(), rank.right(), dst, 0, src, 0, 64, ncclGin_None{}, ncclGin_WeakCounterInc{0});
    expected[0]++;
    gin.put(s.world(), rank.right(), dst, 64, src, 64, 64, ncclGin_WeakSignalInc{1}, ncclGin_WeakCounterInc{1});
    expected[1]++, signalled[1]++;
    gin.put(s.world(), rank.right(), dst, 128, src, 128, 64, ncclGin_WeakSignalInc{3}, ncclGin_WeakCounterInc{2});
    expected[2]++, signalled[3]++;
    gin.put(s.world(), rank.right(), dst, 192, src, 192, 64, ncclGin_WeakSignalInc{2});
    signalled[2]++;
    // Five signals, one increment of the counter.
    gin.put(s.world(), rank.right(), dst, 256, src, 256, 64, ncclGin_WeakSignalAdd{1, 5}, ncclGin_WeakCounterInc{0});
    expected[0]++, signalled[1] += 5;
    // No bytes.
    gin.put(s.world(), rank.right(), dst, 0, src, 0, 0, ncclGin_None{}, ncclGin_WeakCounterInc{1});
    expected[1]++;
    for (unsigned c = 0; c < 4; c++) WAIT_COUNTER(s, gin, c, expected[c]);
    FLUSH(s, gin);
    for (unsigned c = 0; c < 4; c++) {
      CHECK(rank, gin.readCounter(c) == expected[c], "round %d: counter %u is %llu and not %llu", round, c,
            (unsigned long long)gin.readCounter(c), (unsigned long long)expected[c]);
    }
  }
  for (unsigned i = 1; i < 4; i++) WAIT_SIGNAL(s, gin, i, signalled[i]);
  rank.barrier();
  for (unsigned i = 0; i < 4; i++) {
    CHECK(rank, gin.readSignal(i) == signalled[i], "signal %u is %llu and not %llu", i,
          (unsigned long long)gin.readSignal(i), (unsigned long long)signalled[i]);
  }
  // Only the reset counter starts from 0.
  gin.resetCounter(0);
  CHECK(rank, gin.readCounter(0) == 0, "counter 0 is %llu after a reset", (unsigned long long)gin.readCounter(0));
  CHECK(rank, gin.readCounter(1) == expected[1], "the reset of counter 0 has changed counter 1");
  gin.put(s.world(), rank.right(), dst, 0, src, 0, 8, ncclGin_None{}, ncclGin_WeakCounterInc{0});
  WAIT_COUNTER(s, gin, 0, 1);
  CHECK(rank, gin.readCounter(0) == 1, "counter 0 is %llu", (unsigned long long)gin.readCounter(0));
  // The source may be overwritten once the counter has changed.
  for (int round = 0; round < 200; round++) {
    fill(s.src->base + 4096, 4096, seed_of(rank.rank, rank.right(), round));
    gin.put(s.world(), rank.right(), dst, 4096 * size_t(1 + round % 200), src, 4096, 4096, ncclGin_None{},
            ncclGin_WeakCounterInc{3});
    WAIT_COUNTER(s, gin, 3, uint64_t(round) + 1);
    memset(s.src->base + 4096, 0xee, 4096);
  }
  ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0);
  for (int round = 0; round < 200; round++) {
    ptrdiff_t bad = first_difference(s.dst->base + 4096 * size_t(1 + round), 4096, seed_of(rank.left(), rank.rank, round));
    CHECK(rank, bad < 0, "put %d: byte %td was read after its counter had ticked", round, bad);
  }
  s.finish();
}

// Resets, shadows, and reading signals while they change.
static void reset(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  for (int round = 0; round < 50; round++) {
    uint64_t n = 1 + uint64_t(round) % 7;
    for (uint64_t i = 0; i < n; i++) gin.signal(s.world(), rank.right(), ncclGin_WeakSignalInc{0});
    WAIT_SIGNAL(s, gin, 0, n);
    CHECK(rank, gin.readSignal(0) == n, "round %d: %llu", round, (unsigned long long)gin.readSignal(0));
    gin.resetSignal(0);
    CHECK(rank, gin.readSignal(0) == 0, "round %d: %llu after a reset", round, (unsigned long long)gin.readSignal(0));
    rank.barrier();
  }
  uint64_t before = 0, delta = 0, seen = 0;
  for (int i = 0; i < 200; i++) gin.signal(s.world(), rank.right(), ncclGin_WeakSignalInc{1});
  while (seen < 200) {
    gin.waitSignalFollowShadow(ncclCoopThread(), 1, uint64_t(1), &before, &delta);
    CHECK(rank, before == seen && delta >= 1, "shadow %llu, seen %llu", (unsigned long long)before,
          (unsigned long long)seen);
    seen += delta;
  }
  CHECK(rank, seen == 200, "%llu signals of 200", (unsigned long long)seen);
  rank.barrier();
  gin.increaseSignalShadow(1, 10);
  for (int i = 0; i < 10; i++) gin.signal(s.world(), rank.right(), ncclGin_WeakSignalInc{1});
  gin.waitSignalMeetShadow(ncclCoopThread(), 1);
  CHECK(rank, gin.readSignal(1) == 210, "%llu", (unsigned long long)gin.readSignal(1));
  // A wait with a deadline ends if the signal doesn't arrive.
  ncclResult_t result = gin.waitSignal(ncclCoopThread(), 2, 1, 64, cuda::memory_order_acquire, 20 * 1000 * 1000);
  CHECK(rank, result == ncclTimeout, "a wait for nothing returned %d", int(result));
  s.finish();
}

// NCCL's own barrier, on one context and over all contexts, with puts that must be visible after it.
static void barrier(Rank& rank) {
  Needs needs;
  needs.contexts = 2;
  needs.connections = 2;
  Session s(rank, needs);
  int contexts = int(s.dev.ginContextCount);
  for (int round = 0; round < 60; round++) {
    ncclGin gin = s.gin(round % contexts);
    for (int peer = 0; peer < rank.nranks; peer++) {
      fill(s.src->base + 3000 * peer, 3000, seed_of(rank.rank, peer, round));
      gin.put(s.world(), peer, s.dst->handle(), 3000 * size_t(rank.rank), s.src->handle(), 3000 * size_t(peer), 3000);
    }
    ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0);
    for (int from = 0; from < rank.nranks; from++) {
      ptrdiff_t bad = first_difference(s.dst->base + 3000 * from, 3000, seed_of(from, rank.rank, round));
      CHECK(rank, bad < 0, "round %d: behind the barrier byte %td from rank %d is wrong", round, bad, from);
    }
    ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
  }
  for (int round = 0; round < 20; round++) {
    ncclGinBarrier(ncclCoopThread(), ncclGinAllContexts(s.dev), s.world(), s.barrier, 0);
  }
  s.finish();
}

// Contexts on several connections have separate signals, counters and values.
static void contexts(Rank& rank) {
  Needs needs;
  needs.contexts = 3;
  needs.connections = 2;
  Session s(rank, needs);
  int count = int(s.dev.ginContextCount);
  CHECK(rank, count == 6, "%d contexts", count);
  for (int round = 0; round < 30; round++) {
    for (int k = 0; k < count; k++) {
      ncclGin gin = s.gin(k);
      for (int i = 0; i <= k; i++) {
        gin.putValue(s.world(), rank.right(), s.dst->handle(), 8 * size_t(k), seed_of(rank.rank, k, round),
                     ncclGin_WeakSignalInc{1});
      }
      gin.put(s.world(), rank.right(), s.dst->handle(), 4096, s.src->handle(), 0, 16, ncclGin_None{},
              ncclGin_WeakCounterInc{unsigned(k) % 4});
    }
    for (int k = 0; k < count; k++) {
      ncclGin gin = s.gin(k);
      WAIT_SIGNAL(s, gin, 1, uint64_t(k + 1) * uint64_t(round + 1));
      CHECK(rank, gin.readSignal(1) == uint64_t(k + 1) * uint64_t(round + 1), "context %d: signal %llu", k,
            (unsigned long long)gin.readSignal(1));
      CHECK(rank, s.dst->load<uint64_t>(8 * size_t(k)) == seed_of(rank.left(), k, round), "context %d: wrong value", k);
      WAIT_COUNTER(s, gin, unsigned(k) % 4, uint64_t(round) + 1);
    }
    rank.barrier();
  }
  for (int k = 0; k < count; k++) {
    ncclGin gin = s.gin(k);
    for (unsigned c = 0; c < 4; c++) {
      uint64_t expected = c == unsigned(k) % 4 ? 30 : 0;
      CHECK(rank, gin.readCounter(c) == expected, "context %d: counter %u is %llu", k, c,
            (unsigned long long)gin.readCounter(c));
    }
  }
  s.finish();
}

// Ranks with different numbers of signals and counters.
static void asymmetric(Rank& rank) {
  Needs needs;
  needs.signals = 2 + 3 * rank.rank;
  needs.counters = rank.rank;
  Session s(rank, needs);
  ncclGin gin = s.gin();
  // NCCL's barrier signals follow the others, so their numbers differ between ranks, and the test uses the host's barrier.
  int rounds = 100;
  for (int peer = 0; peer < rank.nranks; peer++) {
    unsigned last = unsigned(2 + 3 * peer + rank.nranks) - 1;
    for (int round = 0; round < rounds; round++) {
      size_t slot = size_t(rank.rank) * rounds + size_t(round);
      // The device code checks a put's signal number against its own count, but not a value's.
      gin.putValue(s.world(), peer, s.dst->handle(), 8 * slot, seed_of(rank.rank, peer, round),
                   ncclGin_WeakSignalInc{last});
    }
    gin.put(s.world(), peer, s.dst->handle(), 65536 + 64 * size_t(rank.rank), s.src->handle(), 0, 64,
            ncclGin_WeakSignalInc{1});
  }
  unsigned last = unsigned(needs.signals + rank.nranks) - 1;
  WAIT_SIGNAL(s, gin, last, uint64_t(rounds) * rank.nranks);
  WAIT_SIGNAL(s, gin, 1, uint64_t(rank.nranks));
  for (int from = 0; from < rank.nranks; from++) {
    for (int round = 0; round < rounds; round++) {
      uint64_t got = s.dst->load<uint64_t>(8 * (size_t(from) * rounds + size_t(round)));
      CHECK(rank, got == seed_of(from, rank.rank, round), "value %d from rank %d is wrong", round, from);
    }
  }
  for (int c = 0; c < needs.counters; c++) {
    gin.put(s.world(), 0, s.dst->handle(), 131072, s.src->handle(), 0, 8, ncclGin_None{},
            ncclGin_WeakCounterInc{unsigned(c)});
    WAIT_COUNTER(s, gin, unsigned(c), 1);
  }
  FLUSH(s, gin);
  rank.barrier();
  for (unsigned i = 0; i < last; i++) {
    uint64_t expected = i == 1 ? uint64_t(rank.nranks) : 0;
    CHECK(rank, gin.readSignal(i) == expected, "signal %u is %llu", i, (unsigned long long)gin.readSignal(i));
  }
  s.finish();
}

// No counters at all, and no signals except the barrier's.
static void bare(Rank& rank) {
  Needs needs;
  needs.signals = 0;
  needs.counters = 0;
  Session s(rank, needs);
  ncclGin gin = s.gin();
  for (int round = 0; round < 20; round++) {
    for (int peer = 0; peer < rank.nranks; peer++) {
      gin.putValue(s.world(), peer, s.dst->handle(), 8 * size_t(rank.rank), seed_of(rank.rank, peer, round));
    }
    ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0);
    for (int from = 0; from < rank.nranks; from++) {
      CHECK(rank, s.dst->load<uint64_t>(8 * size_t(from)) == seed_of(from, rank.rank, round), "round %d", round);
    }
    rank.barrier();
  }
  s.finish();
}

const std::vector<Scenario> signal_scenarios = {
  {"signal_add", signal_add, 60, nullptr, true}, {"counters", counters, 60, nullptr},
  {"reset", reset, 60, nullptr},           {"barrier", barrier, 60, nullptr},
  {"contexts", contexts, 60, nullptr, true},     {"asymmetric", asymmetric, 60, nullptr, true},
  {"bare", bare, 60, nullptr, true},
};
