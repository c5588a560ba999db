// Aggregation, flush, laps of the rings, and several threads on one context.
#include "scenarios.h"

#include <string.h>

#include <thread>

// Eight puts, seven of them aggregated: all arrive, with and without signals, whatever operation ends the sequence.
static void aggregate(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  ncclWindow_t dst = s.dst->handle(), src = s.src->handle();
  auto sentinel = [](int from, int round, int i) { return seed_of(from, i, round) << 8 | 1; };
  for (int round = 0; round < 1000; round++) {
    for (int i = 0; i < 8; i++) {
      *(uint64_t*)(s.src->base + 8 * i) = sentinel(rank.rank, round, i);
      put_flags(gin, s.world(), rank.right(), dst, 8 * size_t(i), src, 8 * size_t(i), 8, ncclGin_WeakSignalInc{1},
                ncclGin_None{}, i < 7 ? foreign_aggregate : 0);
    }
    WAIT_SIGNAL(s, gin, 1, 8 * uint64_t(round + 1));
    for (int i = 0; i < 8; i++) {
      uint64_t got = s.dst->load<uint64_t>(8 * size_t(i));
      CHECK(rank, got == sentinel(rank.left(), round, i), "round %d: put %d is %llx", round, i, (unsigned long long)got);
    }
    gin.signal(s.world(), rank.left(), ncclGin_WeakSignalInc{2});
    WAIT_SIGNAL(s, gin, 2, uint64_t(round) + 1);
    FLUSH(s, gin);
  }
  // Without signals, the receiver polls memory. A put without bytes rings the doorbell for the puts before it.
  memset(s.dst->base, 0, s.dst->bytes);
  rank.barrier();
  for (int round = 0; round < 200; round++) {
    int row = 1 + round % 90;
    for (int i = 0; i < row; i++) {
      *(uint64_t*)(s.src->base + 8 * i) = sentinel(rank.rank, round, i);
      put_flags(gin, s.world(), rank.right(), dst, 8 * size_t(i), src, 8 * size_t(i), 8, ncclGin_None{}, ncclGin_None{},
                foreign_aggregate);
    }
    put_flags(gin, s.world(), rank.right(), dst, 0, src, 0, 0, ncclGin_None{}, ncclGin_None{}, 0);
    for (int i = 0; i < row; i++) poll_until((uint64_t*)(s.dst->base + 8 * i), sentinel(rank.left(), round, i));
    FLUSH(s, gin);
    rank.barrier();
  }
  // Aggregated puts with counters wait on each counter's endpoint until a plain post rings its doorbell.
  for (int round = 0; round < 100; round++) {
    for (int i = 0; i < 8; i++) {
      put_flags(gin, s.world(), rank.right(), dst, 0, src, 0, 64, ncclGin_None{}, ncclGin_WeakCounterInc{unsigned(i) % 2},
                i < 6 ? foreign_aggregate : 0);
    }
    WAIT_COUNTER(s, gin, 0, 4 * uint64_t(round + 1));
    WAIT_COUNTER(s, gin, 1, 4 * uint64_t(round + 1));
  }
  s.finish();
}

// After a flush, the sources may be overwritten: later writes to them don't arrive.
static void flush(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  constexpr size_t block = 2048;
  // A flush without posts returns.
  FLUSH(s, gin);
  for (int round = 0; round < 30; round++) {
    for (int i = 0; i < 256; i++) {
      fill(s.src->base + block * i, block, seed_of(rank.rank, i, round));
      if (i % 4 == 3) {
        gin.put(s.world(), rank.right(), s.dst->handle(), block * size_t(i), s.src->handle(), block * size_t(i), block,
                ncclGin_WeakSignalInc{0}, ncclGin_WeakCounterInc{unsigned(i / 4) % 4});
      } else {
        gin.put(s.world(), rank.right(), s.dst->handle(), block * size_t(i), s.src->handle(), block * size_t(i), block,
                ncclGin_WeakSignalInc{0});
      }
    }
    FLUSH(s, gin);
    memset(s.src->base, 0xee, block * 256);
    WAIT_SIGNAL(s, gin, 0, 256 * uint64_t(round + 1));
    for (int i = 0; i < 256; i++) {
      ptrdiff_t bad = first_difference(s.dst->base + block * i, block, seed_of(rank.left(), i, round));
      CHECK(rank, bad < 0, "round %d: block %d byte %td was read behind the flush", round, i, bad);
    }
    rank.barrier();
  }
  // After a flush, no endpoint's counters change any more.
  for (unsigned c = 0; c < 4; c++) {
    uint64_t value = gin.readCounter(c);
    CHECK(rank, value == 16 * 30, "counter %u is %llu behind the flush", c, (unsigned long long)value);
  }
  s.finish();
}

// NCCL 2.31 reuses a value's slot after as many completions as the queue has slots, whichever values they are for. With completions out of
// order this is wrong, and neither plugin nor card can fix it, so the test separates the laps there.
static bool values_need_care() {
  const char* f = faults();
  return !through_proxy && FOREIGN_BACKEND_VERSION == 1 && (strstr(f, "reorder") || strstr(f, "delay_us") || strstr(f, "reread"));
}

// Many laps of every ring, with the default and a small queue.
static void wrap_with(Rank& rank, int queue_depth, int posts) {
  Needs needs;
  needs.queue_depth = queue_depth;
  Session s(rank, needs);
  ncclGin gin = s.gin();
  constexpr int slots = 4096;
  for (int i = 0; i < slots; i++) *(uint64_t*)(s.src->base + 8 * i) = seed_of(rank.rank, 0, i);
  // A value contains its number, which tells it apart from older ones.
  auto value_of = [](int from, int i) { return seed_of(from, 1, 0) << 32 | uint32_t(i); };
  int value_lap = through_proxy ? 0 : int(s.device_handle()->pvdata.sq_size);
  for (int i = 0; i < posts; i++) {
    size_t at = 8 * size_t(i % slots);
    gin.put(s.world(), rank.right(), s.dst->handle(), at, s.src->handle(), at, 8, ncclGin_WeakSignalInc{1},
            ncclGin_WeakCounterInc{0});
    gin.put(s.world(), rank.right(), s.dst->handle(), 65536 + at, s.src->handle(), at, 8);
    gin.putValue(s.world(), rank.right(), s.dst->handle(), 8 * slots * 4 + at, value_of(rank.rank, i),
                 ncclGin_WeakSignalInc{2});
    if (values_need_care() && i % value_lap == value_lap - 1) FLUSH(s, gin);
    // Values arrive in any order, so a word is written again only once its last value has arrived.
    if (i % slots == slots - 1) {
      WAIT_SIGNAL(s, gin, 2, uint64_t(i) + 1);
      rank.barrier();
    }
  }
  WAIT_SIGNAL(s, gin, 1, uint64_t(posts));
  WAIT_SIGNAL(s, gin, 2, uint64_t(posts));
  WAIT_COUNTER(s, gin, 0, uint64_t(posts));
  FLUSH(s, gin);
  rank.barrier();
  CHECK(rank, gin.readSignal(1) == uint64_t(posts), "%llu", (unsigned long long)gin.readSignal(1));
  CHECK(rank, gin.readCounter(0) == uint64_t(posts), "%llu", (unsigned long long)gin.readCounter(0));
  for (int i = 0; i < slots && i < posts; i++) {
    int last = posts - 1 - (posts - 1 - i) % slots;
    CHECK(rank, s.dst->load<uint64_t>(8 * size_t(i)) == seed_of(rank.left(), 0, i), "put %d is wrong", i);
    CHECK(rank, s.dst->load<uint64_t>(65536 + 8 * size_t(i)) == seed_of(rank.left(), 0, i), "plain put %d is wrong", i);
    uint64_t got = s.dst->load<uint64_t>(8 * size_t(slots) * 4 + 8 * size_t(i));
    CHECK(rank, got == value_of(rank.left(), last), "value %d is %llx and not %llx", i, (unsigned long long)got,
          (unsigned long long)value_of(rank.left(), last));
  }
  s.finish();
}

static void wrap(Rank& rank) {
  wrap_with(rank, 0, 20000);
}

static void small_queue(Rank& rank) {
  wrap_with(rank, 16, 5000);
}

// Many laps of the data endpoint's ring and, if cntr_start is close, across the wrap of its 31-bit counter. The test
// reads no signals or counters, because NCCL reads all 64 bits of them.
static void plain_laps(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  constexpr int slots = 4096, rounds = 5;
  for (int round = 0; round < rounds; round++) {
    for (int i = 0; i < slots; i++) {
      *(uint64_t*)(s.src->base + 8 * i) = seed_of(rank.rank, round, i);
      put_flags(gin, s.world(), rank.right(), s.dst->handle(), 8 * size_t(i), s.src->handle(), 8 * size_t(i), 8,
                ncclGin_None{}, ncclGin_None{}, i % 8 != 7 ? foreign_aggregate : 0);
      if (i % 1000 == 999) FLUSH(s, gin);
    }
    for (int i = 0; i < slots; i++) poll_until((uint64_t*)(s.dst->base + 8 * i), seed_of(rank.left(), round, i));
    FLUSH(s, gin);
    rank.barrier();
#if FOREIGN_HAS_GET
    memset(s.dst->base + 65536, 0, 8 * slots);
    for (int i = 0; i < slots; i++) {
      gin.get(s.world(), rank.right(), s.src->handle(), 8 * size_t(i), s.dst->handle(), 65536 + 8 * size_t(i), 8);
    }
    FLUSH(s, gin);
    for (int i = 0; i < slots; i++) {
      uint64_t got = s.dst->load<uint64_t>(65536 + 8 * size_t(i));
      CHECK(rank, got == seed_of(rank.right(), round, i), "round %d: get %d is %llx", round, i, (unsigned long long)got);
    }
    rank.barrier();
#endif
  }
  s.finish();
}

// Several threads post on one context: no post is lost or counted twice.
static void threads_with(Rank& rank, int posters, int posts) {
  Session s(rank, Needs());
  std::vector<std::thread> threads;
  for (int t = 0; t < posters; t++) {
    threads.emplace_back([&, t] {
      threadIdx.x = unsigned(t);
      ncclGin gin = s.gin();
      for (int i = 0; i < posts; i++) {
        int peer = (rank.rank + t + i) % rank.nranks;
        size_t slot = ((size_t(rank.rank) * posters + size_t(t)) * posts + size_t(i)) * 8;
        *(uint64_t*)(s.src->base + slot) = seed_of(rank.rank, t, i);
        switch (i % 4) {
          case 0:
            gin.put(s.world(), peer, s.dst->handle(), slot, s.src->handle(), slot, 8, ncclGin_WeakSignalInc{1});
            break;
          case 1:
            gin.put(s.world(), peer, s.dst->handle(), slot, s.src->handle(), slot, 8, ncclGin_WeakSignalInc{1},
                    ncclGin_WeakCounterInc{unsigned(t) % 4});
            break;
          case 2:
            gin.putValue(s.world(), peer, s.dst->handle(), slot, seed_of(rank.rank, t, i), ncclGin_WeakSignalInc{1});
            break;
          default:
            // The next plain post of any thread on this queue, or the last line of this loop, rings the doorbell.
            put_flags(gin, s.world(), peer, s.dst->handle(), slot, s.src->handle(), slot, 8, ncclGin_WeakSignalInc{1},
                      ncclGin_None{}, foreign_aggregate);
        }
        if (i % 64 == 63) gin.flush(ncclCoopThread());
      }
      put_flags(gin, s.world(), rank.rank, s.dst->handle(), 0, s.src->handle(), 0, 0, ncclGin_None{}, ncclGin_None{},
                0);
      gin.flush(ncclCoopThread());
    });
  }
  for (std::thread& t : threads) t.join();
  ncclGin gin = s.gin();
  FLUSH(s, gin);
  // How many posts target this rank, by the same rule.
  uint64_t expected = 0;
  for (int from = 0; from < rank.nranks; from++) {
    for (int t = 0; t < posters; t++) {
      for (int i = 0; i < posts; i++) expected += (from + t + i) % rank.nranks == rank.rank;
    }
  }
  WAIT_SIGNAL(s, gin, 1, expected);
  rank.barrier();
  CHECK(rank, gin.readSignal(1) == expected, "the signal is %llu and not %llu", (unsigned long long)gin.readSignal(1),
        (unsigned long long)expected);
  uint64_t ticks = 0;
  for (unsigned c = 0; c < 4; c++) ticks += gin.readCounter(c);
  CHECK(rank, ticks == uint64_t(posters) * uint64_t((posts + 2) / 4), "the counters sum to %llu",
        (unsigned long long)ticks);
  for (int from = 0; from < rank.nranks; from++) {
    for (int t = 0; t < posters; t++) {
      for (int i = 0; i < posts; i++) {
        if ((from + t + i) % rank.nranks != rank.rank) continue;
        size_t slot = ((size_t(from) * posters + size_t(t)) * posts + size_t(i)) * 8;
        CHECK(rank, s.dst->load<uint64_t>(slot) == seed_of(from, t, i), "post %d of thread %d, rank %d is wrong", i, t,
              from);
      }
    }
  }
  s.finish();
}

static void threads(Rank& rank) {
  threads_with(rank, 4, 3000);
}

// The lanes of a warp post together: NCCL's code reserves slots for all lanes on a queue at once, max_batch at a time.
static void warp(Rank& rank) {
  constexpr int lanes = 24, rounds = 60;
  Session s(rank, Needs());
  shim::Warp together(lanes);
  std::vector<std::thread> threads;
  for (int lane = 0; lane < lanes; lane++) {
    threads.emplace_back([&, lane] {
      shim::warp = &together;
      shim::lane = unsigned(lane);
      threadIdx.x = unsigned(lane);
      ncclGin gin = s.gin();
      for (int round = 0; round < rounds; round++) {
        size_t slot = (size_t(round) * lanes + size_t(lane)) * 8;
        *(uint64_t*)(s.src->base + slot) = seed_of(rank.rank, lane, round);
        put_flags(gin, s.world(), rank.right(), s.dst->handle(), slot, s.src->handle(), slot, 8, ncclGin_WeakSignalInc{1},
                  ncclGin_None{}, round % 3 ? foreign_aggregate : 0);
        // Here the lanes use different queues, because they name two counters.
        gin.put(s.world(), rank.right(), s.dst->handle(), 262144 + slot, s.src->handle(), slot, 8, ncclGin_None{},
                ncclGin_WeakCounterInc{unsigned(lane) % 2});
        gin.putValue(s.world(), rank.right(), s.dst->handle(), 524288 + slot, seed_of(rank.rank, lane, round),
                     ncclGin_WeakSignalInc{2});
      }
      put_flags(gin, s.world(), rank.right(), s.dst->handle(), 0, s.src->handle(), 0, 0, ncclGin_None{}, ncclGin_None{}, 0);
    });
  }
  for (std::thread& t : threads) t.join();
  ncclGin gin = s.gin();
  WAIT_SIGNAL(s, gin, 1, lanes * rounds);
  WAIT_SIGNAL(s, gin, 2, lanes * rounds);
  WAIT_COUNTER(s, gin, 0, lanes / 2 * rounds);
  WAIT_COUNTER(s, gin, 1, lanes / 2 * rounds);
  ncclGinBarrier(ncclCoopThread(), gin, s.world(), s.barrier, 0);
  CHECK(rank, gin.readSignal(1) == lanes * rounds && gin.readSignal(2) == lanes * rounds, "%llu and %llu signals",
        (unsigned long long)gin.readSignal(1), (unsigned long long)gin.readSignal(2));
  for (size_t i = 0; i < size_t(lanes) * rounds; i++) {
    uint64_t expected = seed_of(rank.left(), int(i) % lanes, int(i) / lanes);
    for (size_t area : {0, 262144, 524288}) {
      uint64_t got = s.dst->load<uint64_t>(area + 8 * i);
      CHECK(rank, got == expected, "lane %zu, round %zu, area %zu: %llx", i % lanes, i / lanes, area,
            (unsigned long long)got);
    }
  }
  s.finish();
}

const std::vector<Scenario> stress_scenarios = {
  {"aggregate", aggregate, 90, nullptr}, {"flush", flush, 60, nullptr},     {"wrap", wrap, 120, nullptr, true},
  {"plain_laps", plain_laps, 90, nullptr},
  {"small_queue", small_queue, 90, nullptr, true}, {"threads", threads, 120, nullptr, true},
  {"warp", warp, 120, nullptr, true},
};
