// A kernel whose operation fails, in the way that the argument names: what must be printed is in tests/all/failures.rs.
#include "example.h"

#include <string>

using namespace ferrogin;

enum : uint32_t { WAIT, PEER, SIGNAL };

KERNEL fails(Outcome* outcome, void* handle, fgin_window window, uint32_t how) {
  Gin<> gin(handle, 0);
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
  LAUNCH(fails, context, window.handle(), how == "wait" ? WAIT : how == "peer" ? PEER : SIGNAL);
  std::printf("the kernel did not fail\n");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
