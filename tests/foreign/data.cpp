// Puts, values and gets: the bytes arrive in the right place, and nowhere else.
#include "scenarios.h"

#include <string.h>

static constexpr unsigned char poison = 0xa5;

// Every rank puts blocks of odd sizes at odd offsets to every rank, itself included. NCCL's barrier (flush and weak
// signals) ends each round. The bytes around the blocks don't change.
static void put(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  static const size_t sizes[] = {1, 3, 8, 64, 100, 4096, 5000, 65536};
  constexpr size_t area = 128 << 10;
  for (int round = 0; round < 40; round++) {
    size_t bytes = sizes[round % 8];
    size_t shift = 64 + size_t(round) * 7;
    memset(s.dst->base, poison, area * rank.nranks);
    for (int peer = 0; peer < rank.nranks; peer++) {
      fill(s.src->base + peer * area + round, bytes, seed_of(rank.rank, peer, round));
    }
    rank.barrier();
    for (int peer = 0; peer < rank.nranks; peer++) {
      gin.put(s.world(), peer, s.dst->handle(), rank.rank * area + shift, s.src->handle(), peer * area + round, bytes);
    }
    ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0);
    for (int from = 0; from < rank.nranks; from++) {
      unsigned char* got = s.dst->base + from * area;
      ptrdiff_t bad = first_difference(got + shift, bytes, seed_of(from, rank.rank, round));
      CHECK(rank, bad < 0, "round %d: byte %td of %zu from rank %d is wrong", round, bad, bytes, from);
      for (size_t i = 0; i < area; i++) {
        bool inside = i >= shift && i < shift + bytes;
        CHECK(rank, inside || got[i] == poison, "round %d: byte %zu outside the block was written", round, i);
      }
    }
    rank.barrier();
  }
  s.finish();
}

// A put with a signal increment: once the signal is there, the receiver reads the put's bytes. The ranks wait for each other, so that
// the count identifies the put.
static void put_signal(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  constexpr ncclGinSignal_t arrived = 1, consumed = 2;
  for (int round = 0; round < 300; round++) {
    size_t bytes = 1 + size_t(round) * 37 % 9000;
    fill(s.src->base, bytes, seed_of(rank.rank, rank.right(), round));
    gin.put(s.world(), rank.right(), s.dst->handle(), 0, s.src->handle(), 0, bytes, ncclGin_WeakSignalInc{arrived});
    WAIT_SIGNAL(s, gin, arrived, uint64_t(round) + 1);
    ptrdiff_t bad = first_difference(s.dst->base, bytes, seed_of(rank.left(), rank.rank, round));
    CHECK(rank, bad < 0, "round %d: the signal is there, byte %td of %zu is wrong", round, bad, bytes);
    uint64_t value = gin.readSignal(arrived);
    CHECK(rank, value == uint64_t(round) + 1, "round %d: the signal is %llu", round, (unsigned long long)value);
    gin.signal(s.world(), rank.left(), ncclGin_WeakSignalInc{consumed});
    WAIT_SIGNAL(s, gin, consumed, uint64_t(round) + 1);
    FLUSH(s, gin);
  }
  CHECK(rank, gin.readSignal(0) == 0 && gin.readSignal(3) == 0, "a signal that nobody raised has moved");
  s.finish();
}

template <typename T>
static void exchange_values(Session& s, ncclGin& gin, int rounds, size_t offset) {
  Rank& rank = s.rank;
  // A value is never 0, so that its arrival is visible in cleared memory.
  auto value_of = [](int from, int round) { return T(seed_of(from, 0, round) % 251 + 1 + uint64_t(round) * 256); };
  for (int round = 0; round < rounds; round++) {
    size_t at = offset + size_t(round) * sizeof(T);
    memset(s.dst->base + at, 0, sizeof(T));
  }
  rank.barrier();
  for (int round = 0; round < rounds; round++) {
    size_t at = offset + size_t(round) * sizeof(T);
    gin.putValue(s.world(), rank.right(), s.dst->handle(), at, value_of(rank.rank, round));
    poll_until((const T*)(s.dst->base + at), value_of(rank.left(), round));
  }
  rank.barrier();
  CHECK(rank, gin.readSignal(1) == 0, "a value without a signal has raised one");
}

// Values of each size without a signal; the receiver polls memory.
static void put_value(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  exchange_values<uint8_t>(s, gin, 500, 0);
  exchange_values<uint16_t>(s, gin, 500, 4096);
  exchange_values<uint32_t>(s, gin, 500, 8192);
  exchange_values<uint64_t>(s, gin, 1500, 16384);
  s.finish();
}

// A value with a signal increment: once the signal is there, the receiver reads the value.
static void put_value_signal(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  for (int round = 0; round < 1500; round++) {
    uint64_t value = seed_of(rank.rank, rank.right(), round) << 20;
    gin.putValue(s.world(), rank.right(), s.dst->handle(), 8 * size_t(round % 64), value, ncclGin_WeakSignalInc{1});
    WAIT_SIGNAL(s, gin, 1, uint64_t(round) + 1);
    uint64_t got = s.dst->load<uint64_t>(8 * size_t(round % 64));
    uint64_t expected = seed_of(rank.left(), rank.rank, round) << 20;
    CHECK(rank, got == expected, "round %d: the signal is there, the value is %llx and not %llx", round,
          (unsigned long long)got, (unsigned long long)expected);
    gin.signal(s.world(), rank.left(), ncclGin_WeakSignalInc{2});
    WAIT_SIGNAL(s, gin, 2, uint64_t(round) + 1);
  }
  // All ranks send to rank 0 at once: the signal's count and every value are exact.
  int rounds = 400;
  memset(s.dst->base, 0, s.dst->bytes);
  rank.barrier();
  for (int round = 0; round < rounds; round++) {
    size_t slot = size_t(rank.rank) * rounds + size_t(round);
    gin.putValue(s.world(), 0, s.dst->handle(), slot * 8, seed_of(rank.rank, 0, round), ncclGin_WeakSignalInc{3});
  }
  if (rank.rank == 0) {
    WAIT_SIGNAL(s, gin, 3, uint64_t(rounds) * rank.nranks);
    for (int from = 0; from < rank.nranks; from++) {
      for (int round = 0; round < rounds; round++) {
        uint64_t got = s.dst->load<uint64_t>((size_t(from) * rounds + size_t(round)) * 8);
        CHECK(rank, got == seed_of(from, 0, round), "value %d from rank %d is %llx", round, from,
              (unsigned long long)got);
      }
    }
  }
  FLUSH(s, gin);
  rank.barrier();
  uint64_t total = gin.readSignal(3);
  CHECK(rank, total == (rank.rank == 0 ? uint64_t(rounds) * rank.nranks : 0), "signal 3 is %llu",
        (unsigned long long)total);
  s.finish();
}

#if FOREIGN_HAS_GET
// Gets from each rank, visible after a flush. Also NCCL's barrier with a get fence.
static void get(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  constexpr size_t area = 128 << 10;
  static const size_t sizes[] = {1, 8, 100, 4096, 65536, 0, 12345, 64};
  for (int round = 0; round < 40; round++) {
    size_t bytes = sizes[round % 8];
    fill(s.src->base, area, seed_of(rank.rank, 0, round));
    memset(s.dst->base, poison, s.dst->bytes);
    rank.barrier();
    for (int peer = 0; peer < rank.nranks; peer++) {
      gin.get(s.world(), peer, s.src->handle(), 0, s.dst->handle(), area * peer + round, bytes);
    }
    if (round % 2) {
      ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0, cuda::memory_order_acq_rel,
                     ncclGinFenceLevel::Get);
    } else {
      FLUSH(s, gin);
    }
    for (int peer = 0; peer < rank.nranks; peer++) {
      unsigned char* got = s.dst->base + area * peer;
      ptrdiff_t bad = first_difference(got + round, bytes, seed_of(peer, 0, round));
      CHECK(rank, bad < 0, "round %d: byte %td of %zu got from rank %d is wrong", round, bad, bytes, peer);
      CHECK(rank, got[round + bytes] == poison, "round %d: more than %zu bytes were fetched", round, bytes);
    }
    rank.barrier();
  }
  // Reads and writes on one queue count together.
  for (int round = 0; round < 2000; round++) {
    int peer = round % rank.nranks;
    if (round % 3) {
      gin.get(s.world(), peer, s.src->handle(), 0, s.dst->handle(), area * peer, 64);
    } else {
      gin.put(s.world(), peer, s.dst->handle(), area * 7 + 64 * size_t(rank.rank), s.src->handle(), 64, 64);
    }
  }
  s.finish();
}
#endif

// A put of more than 1 GiB, which the device code splits: the signal proves that all bytes arrived.
static void large(Rank& rank) {
  Needs needs;
  size_t bytes = (size_t(1) << 30) + 12345;
  needs.window_bytes = (size_t(1) << 30) + (2 << 20);
  Session s(rank, needs);
  ncclGin gin = s.gin();
  auto mark = [&](size_t at) { return (uint64_t*)(s.src->base + (at & ~size_t(7))); };
  for (size_t at = 0; at < bytes - 8; at += 1 << 20) *mark(at) = seed_of(rank.rank, 1, int(at >> 20));
  *mark(bytes - 9) = 0x600d;
  rank.barrier();
  if (rank.rank == 0) {
    gin.put(s.world(), 1, s.dst->handle(), 0, s.src->handle(), 0, bytes, ncclGin_WeakSignalInc{1},
            ncclGin_WeakCounterInc{2});
    WAIT_COUNTER(s, gin, 2, 1);
    CHECK(rank, gin.readCounter(2) == 1, "the counter is %llu after one put", (unsigned long long)gin.readCounter(2));
  }
  if (rank.rank == 1) {
    WAIT_SIGNAL(s, gin, 1, 1);
    for (size_t at = 0; at < bytes - 8; at += 1 << 20) {
      uint64_t got = s.dst->load<uint64_t>(at & ~size_t(7));
      CHECK(rank, got == seed_of(0, 1, int(at >> 20)), "the signal is there, the bytes at %zu are not", at);
    }
    CHECK(rank, s.dst->load<uint64_t>((bytes - 9) & ~size_t(7)) == 0x600d, "the tail is wrong");
    CHECK(rank, gin.readSignal(1) == 1, "the signal is %llu", (unsigned long long)gin.readSignal(1));
  }
  s.finish();
}

// Windows over the same memory, of different sizes on different ranks, in host memory, and one that is registered late and deregistered
// early.
static void windows(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  size_t mine = size_t(1 + rank.rank) << 16;
  size_t his = size_t(1 + rank.right()) << 16;
  uint64_t signalled = 0;
  auto exchange = [&](Window* to, int round, size_t offset, size_t here) {
    fill(s.src->base, 256, seed_of(rank.rank, rank.right(), round));
    gin.put(s.world(), rank.right(), to->handle(), offset, s.src->handle(), 0, 256, ncclGin_WeakSignalInc{0});
    WAIT_SIGNAL(s, gin, 0, ++signalled);
    ptrdiff_t bad = first_difference(to->base + here, 256, seed_of(rank.left(), rank.rank, round));
    CHECK(rank, bad < 0, "round %d: byte %td is wrong", round, bad);
    FLUSH(s, gin);
    rank.barrier();
  };
  for (int round = 0; round < 20; round++) {
    Window* uneven = s.register_window(mine);
    exchange(uneven, round, his - 256, mine - 256);
    Window* again = s.register_window(mine, uneven->base);
    exchange(again, 100 + round, 0, 0);
    s.deregister(again);
    rank.barrier();
    // One of two windows over the same memory is deregistered: the other still works.
    exchange(uneven, 200 + round, 512, 512);
    Window* host = s.register_window(1 << 16, nullptr, FOREIGN_PTR_HOST);
    exchange(host, 300 + round, 1024, 1024);
    s.deregister(uneven);
    s.deregister(host);
    rank.barrier();
  }
  s.finish();
}

const std::vector<Scenario> data_scenarios = {
  {"put", put, 60, nullptr},
  {"put_signal", put_signal, 60, nullptr},
  {"put_value", put_value, 60, nullptr, true},
  {"put_value_signal", put_value_signal, 60, nullptr, true},
#if FOREIGN_HAS_GET
  {"get", get, 60, nullptr},
#else
  {"get", nullptr, 60, [](int) { return "this release's EFA backend has no get"; }},
#endif
  {"large", large, 120,
   [](int nranks) -> const char* {
     if (through_proxy) return nranks == 2 ? nullptr : "takes gigabytes: with 2 ranks only";
     return nranks == 2 && !*faults() ? nullptr : "takes gigabytes: with 2 ranks and no faults only";
   }},
  {"windows", windows, 60, nullptr},
};
