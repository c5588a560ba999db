// Sources that must not compile: -DREFUSED=N selects one, and run.sh checks the compiler's message.
#if REFUSED == 5
#include <nccl_device.h>
#endif
#if REFUSED >= 4
#include <ferrogin/nccl_gin.cuh>
#else
#include <ferrogin/gin.cuh>
#endif

struct Sixteen {
  uint64_t words[2];
};

struct Three {
  char bytes[3];
};

__global__ void refused([[maybe_unused]] void* handle, [[maybe_unused]] void* win) {
#if REFUSED == 1
  ferrogin::Gin<>(handle, 0).putValue(1, win, 0, Sixteen{});
#elif REFUSED == 2
  ferrogin::Gin<>(handle, 0).putValue(1, win, 0, 1, ferrogin::CounterInc{0});
#elif REFUSED == 3
  ferrogin::Gin<>(handle, 0).put(1, win, 0, win, 0, 8, ferrogin::None{}, ferrogin::SignalInc{0});
#elif REFUSED == 4
  ncclGinCtx ctx{};
  ncclGinApi_PutValue<NCCL_NET_DEVICE_GIN_EFA_GDA>::call(ctx, ncclCoopThread(), 1, win, 0, Three{}, {},
                                                         ncclGinSignalInc, 0, false, nullptr, cuda::thread_scope_thread,
                                                         cuda::thread_scope_thread);
#endif
}
