// Each rank writes a value into the window of the next rank, and waits for the value of the rank before.
#include <ferrogin/gin.cuh>
#include <ferrogin/host.hpp>

#include <cstdio>
#include <stdexcept>

int main() try {
  auto comm = ferrogin::Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks();
  auto window = comm.allocate(4096, ferrogin::Memory::Host);
  ferrogin::ContextOptions options;
  options.signals = 1;
  auto context = comm.context(options);

  // A kernel makes these calls with the same two handles; here a CPU thread does.
  ferrogin::Gin<> gin(context.handle(), 0);
  auto check = [](int status) {
    if (status != FGIN_OK) throw std::runtime_error(ferrogin_error());
  };
  check(gin.putValue((rank + 1) % ranks, window.handle(), 0, uint64_t{100} + rank, ferrogin::SignalInc{0}));
  check(gin.waitSignal(0, 1));
  check(gin.flush());

  auto value = *static_cast<volatile uint64_t*>(window.host_address());
  std::printf("rank %u of %u received %llu\n", rank, ranks, static_cast<unsigned long long>(value));
  comm.barrier();
  return value != 100 + (rank + ranks - 1) % ranks;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
