// Every operation in ferrogin/gin.cuh, with every kind of group. Both nvcc and a host compiler compile it.
#include <ferrogin/gin.cuh>

#ifdef __CUDACC__
#include <cooperative_groups.h>
#endif

#include "kernels.h"

using namespace ferrogin;

// The caller's own group: any type with these three functions.
struct Pair {
  FGIN_DEVICE unsigned thread_rank() const {
    return Thread().thread_rank();
  }
  FGIN_DEVICE unsigned size() const {
    return 1;
  }
  FGIN_DEVICE void sync() const {}
};

// A kernel for each operation, in each sharing mode.
#define POSTS(name, sharing)                                                                                                \
  KERNEL void name##_put_value(const fgin_context* ctx, uint32_t peer, fgin_window win, uint64_t off, int value,            \
                               uint32_t signal) {                                                                           \
    Gin<sharing>(ctx).putValue(peer, win, off, value, SignalInc{signal});                                                   \
  }                                                                                                                         \
  KERNEL void name##_put_value_plain(const fgin_context* ctx, uint32_t peer, fgin_window win, uint64_t off, int value) {    \
    Gin<sharing>(ctx).putValue(peer, win, off, value);                                                                      \
  }                                                                                                                         \
  KERNEL void name##_put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,        \
                         uint64_t src_off, uint64_t bytes, uint32_t signal) {                                               \
    Gin<sharing>(ctx).put(peer, dst, dst_off, src, src_off, bytes, SignalInc{signal});                                      \
  }                                                                                                                         \
  KERNEL void name##_put_plain(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,  \
                               uint64_t src_off, uint64_t bytes) {                                                          \
    Gin<sharing>(ctx).put(peer, dst, dst_off, src, src_off, bytes);                                                         \
  }                                                                                                                         \
  KERNEL void name##_signal(const fgin_context* ctx, uint32_t peer, uint32_t signal) {                                      \
    Gin<sharing>(ctx).signal(peer, SignalInc{signal});                                                                      \
  }

POSTS(gin, Sharing::Gpu)
POSTS(cta, Sharing::Cta)
POSTS(thread, Sharing::Thread)

KERNEL void gin_flush(const fgin_context* ctx) {
  Gin<> gin(ctx);
  gin.flush();
}

KERNEL void gin_all(void* handle, uint32_t peer, fgin_window dst, fgin_window src, uint64_t bytes, int* status) {
  Gin<Sharing::Gpu> gin(handle, 0);
  Gin<Sharing::Cta> block_gin(gin.context());
  uint64_t count = 0;
  fgin_request request;
  int all = gin.status();
  all |= gin.put(peer, dst, 0, src, 0, bytes);
  all |= gin.put(peer, dst, 0, src, 0, bytes, SignalAdd{1, 3}, CounterInc{0});
  all |= gin.put(peer, dst, 0, src, 0, bytes, None{}, CounterInc{1}, Warp{}, FGIN_AGGREGATE);
  all |= block_gin.put(peer, dst, 0, src, 0, bytes, SignalInc{1}, None{}, Block{}, FGIN_DEFAULT, Scope::Block,
                       Scope::System);
  all |= gin.putValue(peer, dst, 0, uint8_t(1));
  all |= gin.putValue(peer, dst, 2, uint16_t(2), SignalInc{0}, Warp{});
  all |= gin.putValue(peer, dst, 4, 3.0f, SignalAdd{0, 2}, Block{}, FGIN_AGGREGATE);
  all |= gin.putValue(peer, dst, 8, uint64_t(4), SignalInc{0}, Pair{});
  all |= gin.get(peer, dst, 0, src, 0, bytes);
  all |= gin.signal(peer, SignalInc{0});
#ifdef __CUDACC__
  auto tile = cooperative_groups::tiled_partition<8>(cooperative_groups::this_thread_block());
  all |= gin.signal(peer, SignalAdd{1, 0}, tile);
  all |= gin.putValue(peer, dst, 16, 5, None{}, cooperative_groups::this_thread_block());
#endif
  all |= gin.putValue(peer, dst, 24, 6, SignalInc{0}, Lanes{});
  all |= gin.put(peer, dst, 0, src, 0, bytes, None{}, CounterInc{0}, Lanes{1}, FGIN_AGGREGATE);
  all |= block_gin.signal(peer, SignalAdd{1, 2}, Lanes{});
  all |= gin.put(peer, dst, 0, src, 0, bytes, StrongSignalInc{0}, CounterInc{0});
  all |= gin.putValue(peer, dst, 0, uint8_t(1), StrongSignalAdd{0, 5}, Warp{});
  all |= gin.put(peer, dst, 0, src, 0, bytes, VASignalInc{dst, 8}, CounterInc{1}, Block{}, FGIN_AGGREGATE);
  all |= gin.put(peer, dst, 0, src, 0, bytes, StrongVASignalAdd{dst, 8, 1ull << 40});
  all |= gin.putValue(peer, dst, 24, 6, VASignalAdd{dst, 8, 3}, Lanes{});
  all |= gin.signal(peer, StrongVASignalInc{dst, 8});
  all |= gin.ring(Warp{});
  bool done = false;
  all |= gin.setTimeout(1000000000);
  all |= gin.flushAsync(request);
  all |= gin.test(request, done);
  all |= gin.wait(request);
  all |= gin.flush(Block{});
  all |= gin.readSignal(0, count);
  all |= gin.waitSignal(0, count, Warp{});
  all |= gin.resetSignal(0);
  all |= gin.readCounter(0, count);
  all |= gin.waitCounter(0, count);
  all |= gin.resetCounter(0);
  *status = all;
}
