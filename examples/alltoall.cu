// All-to-all: every rank has a block for every rank, and gets one from every rank. The kernel puts the blocks with a
// signal that counts the blocks that have arrived, because they arrive in any order. A second signal says that a rank
// has read its blocks, so that the next round may overwrite them.
#include "example.h"

using namespace ferrogin;

constexpr int ROUNDS = 20;
constexpr uint64_t WORDS = 512, BYTES = WORDS * sizeof(uint64_t);

enum : uint32_t { ARRIVED, READ, SIGNALS };

// Word i of the block from rank `from` to rank `to`.
FGIN_API uint64_t word(uint64_t round, uint64_t from, uint64_t to, uint64_t i) {
  return round << 48 | from << 32 | to << 16 | i;
}

// The window has the blocks to send, then the blocks received, both by rank.
KERNEL alltoall(Outcome* outcome, void* handle, fgin_window window, uint64_t* blocks, uint32_t rank, uint32_t ranks,
                unsigned long long* wrong) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  uint64_t* received = blocks + ranks * WORDS;
  for (int round = 0; round < ROUNDS; round++) {
    for (uint64_t i = block.thread_rank(); i < ranks * WORDS; i += block.size()) {
      blocks[i] = word(round, rank, i / WORDS, i % WORDS);
    }
    // All ranks have read the previous round's blocks.
    TRY(gin.waitSignal(READ, uint64_t(round) * ranks, block));
    for (uint32_t i = 0; i < ranks; i++) {
      // Each rank starts with a different peer, so that they don't all put to the same rank at once.
      uint32_t peer = (rank + i) % ranks;
      uint64_t to = (ranks + rank) * BYTES, from = peer * BYTES;
      TRY(gin.put(peer, window, to, window, from, BYTES, SignalInc{ARRIVED}, None{}, block));
    }
    TRY(gin.waitSignal(ARRIVED, uint64_t(round + 1) * ranks, block));
    for (uint64_t i = block.thread_rank(); i < ranks * WORDS; i += block.size()) {
      if (received[i] != word(round, i / WORDS, rank, i % WORDS)) ++wrong[block.thread_rank()];
    }
    for (uint32_t peer = 0; peer < ranks; peer++) TRY(gin.signal(peer, SignalInc{READ}, block));
    // The blocks have been sent and may be overwritten.
    TRY(gin.flush(block));
  }
}

int main() try {
  auto comm = Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks();
  auto window = comm.allocate(2 * ranks * BYTES, Memory::Host);
  // One count per thread of a block.
  auto counts = comm.allocate(1024 * sizeof(unsigned long long), Memory::Host);
  ContextOptions options;
  options.signals = SIGNALS;
  auto context = comm.context(options);

  LAUNCH(alltoall, context, window.handle(), static_cast<uint64_t*>(window.address()), rank, ranks,
         static_cast<unsigned long long*>(counts.address()));
  context.check();

  unsigned long long wrong = 0;
  for (int i = 0; i < 1024; i++) wrong += static_cast<unsigned long long*>(counts.host_address())[i];
  std::printf("rank %u of %u: %d rounds, %llu words differ\n", rank, ranks, ROUNDS, wrong);
  comm.barrier();
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
