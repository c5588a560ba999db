// Strong signals and signals in memory, which NCCL's proxy supports.
#include "scenarios.h"

#include <string.h>

static constexpr size_t block = 512, area = 64 << 10;
static constexpr int blocks = 24;

static void put_blocks(Session& s, ncclGin& gin, int peer, int round) {
  for (int i = 0; i < blocks; i++) {
    size_t at = block * size_t(i);
    fill(s.src->base + at, block, seed_of(s.rank.rank, i, round));
    put_flags(gin, s.world(), peer, s.dst->handle(), at, s.src->handle(), at, block, ncclGin_None{}, ncclGin_None{},
              i % 3 ? foreign_aggregate : 0);
  }
  gin.putValue(s.world(), peer, s.dst->handle(), area, seed_of(s.rank.rank, blocks, round));
}

static void check_blocks(Session& s, int from, int round) {
  Rank& rank = s.rank;
  for (int i = 0; i < blocks; i++) {
    ptrdiff_t bad = first_difference(s.dst->base + block * size_t(i), block, seed_of(from, i, round));
    CHECK(rank, bad < 0, "round %d: the strong signal is there, byte %td of put %d is wrong", round, bad, i);
  }
  CHECK(rank, s.dst->load<uint64_t>(area) == seed_of(from, blocks, round), "round %d: the value is not there", round);
}

// Waits until a word in memory has this exact count.
static void wait_word(Session& s, size_t offset, uint64_t count) {
  poll_until((const uint64_t*)(s.dst->base + offset), count);
}

// A strong signal, with and without its own put, covers all puts and values before it.
static void strong_signal(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  for (int round = 0; round < 150; round++) {
    put_blocks(s, gin, rank.right(), round);
    if (round % 2) {
      gin.signal(s.world(), rank.right(), ncclGin_StrongSignalInc{0});
    } else {
      gin.put(s.world(), rank.right(), s.dst->handle(), 2 * area, s.src->handle(), 0, 64, ncclGin_StrongSignalInc{0});
    }
    WAIT_SIGNAL(s, gin, 0, uint64_t(round) + 1);
    check_blocks(s, rank.left(), round);
    gin.signal(s.world(), rank.left(), ncclGin_WeakSignalInc{1});
    WAIT_SIGNAL(s, gin, 1, uint64_t(round) + 1);
    FLUSH(s, gin);
  }
  s.finish();
}

// Signals in memory: strong ones cover everything before them, weak ones their own put or value, and adds from several peers are exact.
static void va_signal(Rank& rank) {
  Session s(rank, Needs());
  ncclGin gin = s.gin();
  ncclWindow_t dst = s.dst->handle(), src = s.src->handle();
  constexpr size_t strong_at = 3 * area, weak_at = strong_at + 8, back_at = strong_at + 16, sum_at = strong_at + 24;
  for (int round = 0; round < 150; round++) {
    uint64_t count = uint64_t(round) + 1;
    put_blocks(s, gin, rank.right(), round);
    gin.signal(s.world(), rank.right(), ncclGin_StrongVASignalAdd{dst, strong_at, 3});
    wait_word(s, strong_at, 3 * count);
    check_blocks(s, rank.left(), round);
    // NCCL posts the put and its weak signal separately.
    size_t bytes = 1 + size_t(round) * 97 % 9000;
    fill(s.src->base + area, bytes, seed_of(rank.rank, 100, round));
    gin.put(s.world(), rank.right(), dst, 2 * area, src, area, bytes, ncclGin_WeakVASignalInc{dst, weak_at});
    wait_word(s, weak_at, count);
    ptrdiff_t bad = first_difference(s.dst->base + 2 * area, bytes, seed_of(rank.left(), 100, round));
    CHECK(rank, bad < 0, "round %d: the signal is there, byte %td of %zu is wrong", round, bad, bytes);
    gin.signal(s.world(), rank.left(), ncclGin_WeakVASignalInc{dst, back_at});
    wait_word(s, back_at, count);
    for (int peer = 0; peer < rank.nranks; peer++) {
      gin.signal(s.world(), peer, ncclGin_WeakVASignalAdd{dst, sum_at, uint64_t(rank.rank) + 1});
    }
    FLUSH(s, gin);
  }
  wait_word(s, sum_at, 150 * uint64_t(rank.nranks * (rank.nranks + 1) / 2));
  s.finish();
}

const std::vector<Scenario> strong_scenarios = {
  {"strong_signal", strong_signal, 60, nullptr},
  {"va_signal", va_signal, 60, nullptr},
};
