// Ring all-gather: every rank has a block, and every rank gets all blocks. In each of ranks - 1 steps, a rank passes on
// the block that it received in the previous step. Each step has its own signal: several blocks from a neighbour may be
// in flight, the card delivers them in any order, and a signal counts puts without saying which.
#include "example.h"

using namespace ferrogin;

constexpr uint64_t WORDS = 4096, BYTES = WORDS * sizeof(uint64_t);

FGIN_API uint64_t word(uint64_t rank, uint64_t i) {
  return (rank + 1) << 32 | i;
}

// The window has all ranks' blocks.
KERNEL allgather(Outcome* outcome, void* handle, fgin_window window, uint64_t* blocks, uint32_t rank, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  for (uint64_t i = block.thread_rank(); i < WORDS; i += block.size()) blocks[rank * WORDS + i] = word(rank, i);
  for (uint32_t step = 0; step + 1 < ranks; step++) {
    // The block to pass on comes from the rank `step` places back.
    uint64_t at = (rank + ranks - step) % ranks * BYTES;
    if (step > 0) TRY(gin.waitSignal(step - 1, 1, block));
    TRY(gin.put((rank + 1) % ranks, window, at, window, at, BYTES, SignalInc{step}, None{}, block));
  }
  if (ranks > 1) TRY(gin.waitSignal(ranks - 2, 1, block));
  TRY(gin.flush(block));
}

int main() try {
  auto comm = Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks();
  auto window = comm.allocate(ranks * BYTES, Memory::Host);
  ContextOptions options;
  options.signals = ranks - 1;
  auto context = comm.context(options);

  auto* blocks = static_cast<uint64_t*>(window.host_address());
  LAUNCH(allgather, context, window.handle(), static_cast<uint64_t*>(window.address()), rank, ranks);
  context.check();

  uint64_t wrong = 0;
  for (uint64_t i = 0; i < ranks * WORDS; i++) wrong += blocks[i] != word(i / WORDS, i % WORDS);
  std::printf("rank %u of %u: %u blocks, %llu words differ\n", rank, ranks, ranks, 0ull + wrong);
  comm.barrier();
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
