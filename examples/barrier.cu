// A barrier between the kernels of all ranks, without the host. In round r of log2(ranks) rounds, a rank signals the
// rank 2^r ahead and waits for the signal from the rank 2^r behind. Each round has its own signal, which counts the
// barriers, so nothing needs a reset. Between barriers, every rank writes a value to every other rank, and after each
// barrier it checks that all values have arrived.
#include "example.h"

using namespace ferrogin;

constexpr int BARRIERS = 50;
constexpr uint32_t ROUNDS = 6;

KERNEL barriers(Outcome* outcome, void* handle, fgin_window window, volatile uint64_t* values, uint32_t rank, uint32_t ranks,
                unsigned long long* wrong) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  for (int n = 1; n <= BARRIERS; n++) {
    // Values alternate between two places: a fast rank already writes the next ones while a slow rank is still reading.
    uint64_t place = n % 2 * ranks;
    for (uint32_t peer = 0; peer < ranks; peer++) {
      TRY(gin.putValue(peer, window, (place + rank) * sizeof(uint64_t), uint64_t(n), None{}, block));
    }
    // A completed write has arrived. Without the flush, the signals below could overtake the values.
    TRY(gin.flush(block));
    for (uint32_t round = 0, distance = 1; distance < ranks; round++, distance *= 2) {
      TRY(gin.signal((rank + distance) % ranks, SignalInc{round}, block));
      TRY(gin.waitSignal(round, n, block));
    }
    for (uint32_t peer = block.thread_rank(); peer < ranks; peer += block.size()) {
      if (values[place + peer] != uint64_t(n)) ++wrong[block.thread_rank()];
    }
    block.sync();
  }
  TRY(gin.flush(block));
}

int main() try {
  auto comm = Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks();
  if (ranks > 1u << ROUNDS) {
    std::fprintf(stderr, "%u ranks: this example has signals for at most %u\n", ranks, 1u << ROUNDS);
    return 1;
  }
  auto window = comm.allocate(2 * ranks * sizeof(uint64_t), Memory::Host);
  // One count per thread of a block.
  auto counts = comm.allocate(1024 * sizeof(unsigned long long), Memory::Host);
  ContextOptions options;
  options.signals = ROUNDS;
  auto context = comm.context(options);

  LAUNCH(barriers, context, window.handle(), static_cast<volatile uint64_t*>(window.address()), rank, ranks,
         static_cast<unsigned long long*>(counts.address()));
  context.check();

  unsigned long long wrong = 0;
  for (int i = 0; i < 1024; i++) wrong += static_cast<unsigned long long*>(counts.host_address())[i];
  std::printf("rank %u of %u: %d barriers, %llu values were late\n", rank, ranks, BARRIERS, wrong);
  comm.barrier();
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
