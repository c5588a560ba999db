// A kernel whose operation fails, in the way that the argument names: what must be printed is in tests/all/failures.rs.
#include "example.h"

#include <string>

using namespace ferrogin;

enum : uint32_t { WAIT, PEER, SIGNAL, OUTSIDE, NARROW };

KERNEL fails(Outcome* outcome, void* handle, fgin_window window, char* memory, uint32_t how) {
  Gin<> gin(handle, 0);
  // No window is this large.
  if (how == OUTSIDE) memory[uint64_t{1} << 40] = 1;
#ifdef __CUDACC__
  if (how == NARROW && threadIdx.x < 32) {
    Gin<Sharing::Thread> alone(handle, 0);
    for (int i = 0; i < 8; i++) TRY(alone.put(0, window, 0, window, 8, 8));
  }
#endif
  if (how == WAIT) TRY(gin.waitSignal(0, 3, Block{}));
  if (how == PEER) TRY(gin.put(99, window, 0, window, 8, 8, None{}, None{}, Block{}));
  if (how == SIGNAL) TRY(gin.put(0, window, 0, window, 8, 8, SignalInc{7}, None{}, Block{}));
}

int main(int count, char** arguments) try {
  auto comm = Comm::open();
  auto window = comm.allocate(64, Memory::Host);
  ContextOptions options;
  options.signals = 1;
  options.timeout_ms = 20;
  auto context = comm.context(options);
  std::string how = count > 1 ? arguments[1] : "";
  uint32_t number = how == "wait" ? WAIT : how == "peer" ? PEER : how == "outside" ? OUTSIDE : how == "narrow" ? NARROW : SIGNAL;
  LAUNCH(fails, context, window.handle(), static_cast<char*>(window.address()), number);
  std::printf("the kernel did not fail\n");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
