// Each rank's kernel writes a value into the window of the next rank, and waits for the value of the rank before.
#include "example.h"

using namespace ferrogin;

KERNEL pass_on(Outcome* outcome, void* handle, fgin_window window, uint32_t next, uint64_t value) {
  Gin<> gin(handle, 0);
  TRY(gin.putValue(next, window, 0, value, SignalInc{0}, Block{}));
  TRY(gin.waitSignal(0, 1, Block{}));
  TRY(gin.flush(Block{}));
}

int main() try {
  auto comm = Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks();
  auto window = comm.allocate(sizeof(uint64_t), Memory::Host);
  ContextOptions options;
  options.signals = 1;
  auto context = comm.context(options);
  LAUNCH(pass_on, context, window.handle(), (rank + 1) % ranks, 100 + rank);
  context.check();

  auto value = *static_cast<volatile uint64_t*>(window.host_address());
  std::printf("rank %u of %u received %llu\n", rank, ranks, 0ull + value);
  comm.barrier();
  return value != 100 + (rank + ranks - 1) % ranks;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
