// Calls the kernels in gin_kernel.cu as functions: every operation refuses a null context.
#include <ferrogin/gin.cuh>

#include <stdio.h>

extern "C" void gin_all(void* handle, uint32_t peer, fgin_window dst, fgin_window src, uint64_t bytes, int* status);

int main() {
  ferrogin::Gin<> gin(nullptr, 0);
  fgin_request request = {};
  uint64_t count = 0;
  int refused[] = {
    gin.status(),
    gin.put(0, nullptr, 0, nullptr, 0, 8),
    gin.putValue(0, nullptr, 0, 1, ferrogin::SignalInc{65535}),
    gin.get(0, nullptr, 0, nullptr, 0, 8),
    gin.signal(0, ferrogin::SignalInc{70000}, ferrogin::Block{}),
    gin.flush(),
    gin.flushAsync(request),
    gin.wait(request),
    gin.readSignal(0, count),
    gin.waitSignal(0, 1),
    gin.resetSignal(0),
    gin.readCounter(0, count),
    gin.waitCounter(0, 1),
    gin.resetCounter(0),
  };
  int all = 0, wrong = 0;
  for (int status : refused) wrong += status != FGIN_INVALID_ARGUMENT;
  gin_all(nullptr, 0, nullptr, nullptr, 8, &all);
  if (wrong || all != FGIN_INVALID_ARGUMENT) {
    printf("%d operations took a context that is none; together they say %d\n", wrong, all);
    return 1;
  }
  return 0;
}
