// ferrogin: the GIN device API for CUDA C++, and for host C++ on the software card.
//
//   ferrogin::Gin<> gin(handle, context_id);
//   gin.putValue(peer, window, offset, value, ferrogin::SignalInc{0});
//   gin.flush();
//
// Every operation takes a coop: the threads that call it together. The coop synchronises before and after the
// operation. The thread of rank 0 carries it out; for a flush(), the threads divide the work. The card sees what any of
// the threads wrote before the call. A coop is Thread, Warp, Block, or any other type with thread_rank(), size() and
// sync(), such as the groups of cooperative_groups.
//
// Single threads of a warp that make the same call at the same time post together, unless the mode is THREAD: those
// whose operations use the same queue share a reservation, a fence and a doorbell. With Lanes instead of a coop, all
// lanes are guaranteed to do so, each with its own operation.
//
// The result is an fgin_status: the operation's in the threads that carried it out, FGIN_OK in the others. Link kernels
// with the relocatable object of libferrogin_device for their architecture (-rdc=true), and host programs with
// libferrogin_device.so.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef FERROGIN_GIN_CUH
#define FERROGIN_GIN_CUH

#include "gin.h"
#include "post.cuh"

#include <stddef.h>
#include <stdint.h>

namespace ferrogin {

// Coops. On the CPU a warp and a block have one thread.

struct Thread {
  FGIN_DEVICE unsigned thread_rank() const {
    return 0;
  }
  FGIN_DEVICE unsigned size() const {
    return 1;
  }
  FGIN_DEVICE void sync() const {}
};

#ifdef __CUDACC__

struct Warp {
  FGIN_DEVICE unsigned thread_rank() const {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % warpSize;
  }
  FGIN_DEVICE unsigned size() const {
    return warpSize;
  }
  FGIN_DEVICE void sync() const {
    __syncwarp();
  }
};

struct Block {
  FGIN_DEVICE unsigned thread_rank() const {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  }
  FGIN_DEVICE unsigned size() const {
    return blockDim.x * blockDim.y * blockDim.z;
  }
  FGIN_DEVICE void sync() const {
    __syncthreads();
  }
};

#else

struct Warp : Thread {};
struct Block : Thread {};

#endif

// For put, putValue and signal, instead of a coop: the lanes of a warp that make the call together, each with its own
// operation, arguments and result. All lanes of the mask make the call. In the mode THREAD, only these lanes may use
// the context.
struct Lanes {
  uint32_t mask = 0xffffffffu;
};

// An operation's actions: on the peer (None, or a signal), and on this rank once the source may be reused (None,
// CounterInc). With an id out of range, the operation does nothing and returns FGIN_INVALID_ARGUMENT. A signal covers
// its own operation; a strong one also covers all earlier operations of the context to that peer. Strong and VA signals
// need emulated signals; otherwise the operation returns FGIN_UNSUPPORTED.

struct None {};

struct SignalInc {
  uint32_t signal;
};

// With 0, no signal is raised.
struct SignalAdd {
  uint32_t signal;
  uint32_t value;
};

struct CounterInc {
  uint32_t counter;
};

struct StrongSignalInc {
  uint32_t signal;
};

struct StrongSignalAdd {
  uint32_t signal;
  uint32_t value;
};

// Signals in a window's memory: the 8 bytes at `offset` on the peer, a multiple of 8.
struct VASignalInc {
  fgin_window window;
  uint64_t offset;
};

struct VASignalAdd {
  fgin_window window;
  uint64_t offset;
  uint64_t value;
};

struct StrongVASignalInc {
  fgin_window window;
  uint64_t offset;
};

struct StrongVASignalAdd {
  fgin_window window;
  uint64_t offset;
  uint64_t value;
};

// Which threads use the context: all, those of one block, or one. Cta costs as much as Gpu; Thread takes no atomic
// operation where they take three.
enum class Sharing : uint32_t { Gpu = FGIN_SHARING_GPU, Cta = FGIN_SHARING_CTA, Thread = FGIN_SHARING_THREAD };

// The scope of a release before a put, already made or required; widest first.
enum class Scope : uint32_t { System, Device, Block, Thread };

namespace detail {

// Depends on its parameter, so that a static_assert fails only where a program uses it.
template <typename>
constexpr bool always_false = false;

template <typename Action>
FGIN_DEVICE ActionIds remote(Action) {
  static_assert(always_false<Action>, "the remote action must be None or a signal");
  return {};
}

FGIN_DEVICE ActionIds remote(None) {
  // Field by field, because nvcc would place a constant in memory and load it.
  ActionIds ids;
  ids.has_signal = ids.has_counter = false;
  ids.signal = ids.amount = ids.counter = 0;
  return ids;
}

FGIN_DEVICE ActionIds remote(SignalInc inc) {
  return {true, false, inc.signal, 1, 0};
}

FGIN_DEVICE ActionIds remote(SignalAdd add) {
  return {true, false, add.signal, add.value, 0};
}

FGIN_DEVICE ActionIds remote(StrongSignalInc inc) {
  return {true, false, inc.signal, 1, 0};
}

FGIN_DEVICE ActionIds remote(StrongSignalAdd add) {
  return {true, false, add.signal, add.value, 0};
}

FGIN_DEVICE WordSignal remote(VASignalInc inc) {
  return {inc.window, inc.offset, 1, false, 0};
}

FGIN_DEVICE WordSignal remote(VASignalAdd add) {
  return {add.window, add.offset, add.value, false, 0};
}

FGIN_DEVICE WordSignal remote(StrongVASignalInc inc) {
  return {inc.window, inc.offset, 1, false, 0};
}

FGIN_DEVICE WordSignal remote(StrongVASignalAdd add) {
  return {add.window, add.offset, add.value, false, 0};
}

template <typename>
constexpr uint32_t strength = 0;
template <>
constexpr uint32_t strength<StrongSignalInc> = FGIN_STRONG;
template <>
constexpr uint32_t strength<StrongSignalAdd> = FGIN_STRONG;
template <>
constexpr uint32_t strength<StrongVASignalInc> = FGIN_STRONG;
template <>
constexpr uint32_t strength<StrongVASignalAdd> = FGIN_STRONG;

template <typename Signal, typename Action>
FGIN_DEVICE void local(Signal&, Action) {
  static_assert(always_false<Action>, "the local action must be None or CounterInc");
}

template <typename Signal>
FGIN_DEVICE void local(Signal&, None) {}

template <typename Signal>
FGIN_DEVICE void local(Signal& signal, CounterInc inc) {
  signal.has_counter = true;
  signal.counter = inc.counter;
}

}  // namespace detail

// One context, in one sharing mode. Copies are views of the same context.
template <Sharing sharing = Sharing::Gpu>
class Gin {
 public:
  // Context number `id`; `handle` is ncclNetDeviceHandle->handle, or Context::handle() of the host API. If it can't be
  // opened, status() says why, and every operation returns FGIN_INVALID_ARGUMENT.
  FGIN_DEVICE Gin(void* handle, uint32_t id) {
    status_ = fgin_open(handle, id, &ctx_);
  }

  // A context from fgin_open.
  FGIN_DEVICE explicit Gin(const fgin_context* ctx)
    : ctx_(ctx), status_(ctx ? FGIN_OK : FGIN_INVALID_ARGUMENT) {}

  FGIN_DEVICE int status() const {
    return status_;
  }
  FGIN_DEVICE const fgin_context* context() const {
    return ctx_;
  }

  // Writes `bytes` from `src` at `srcOff` on this rank to `dst` at `dstOff` on `peer`. The source may be reused after a
  // flush, or once the counter of a CounterInc has counted the operation. `flags` is FGIN_DEFAULT or FGIN_AGGREGATE.
  // Every post fences at system scope before its doorbell, so it covers a release of any scope.
  template <typename Remote = None, typename Local = None, typename Coop = Thread>
  FGIN_DEVICE int put(uint32_t peer, fgin_window dst, uint64_t dstOff, fgin_window src, uint64_t srcOff, uint64_t bytes,
                      Remote remote = {}, Local local = {}, Coop coop = {}, uint32_t flags = FGIN_DEFAULT,
                      Scope /*given*/ = Scope::Thread, Scope /*required*/ = Scope::Device) const {
    return lead(coop, [&](uint32_t lanes) {
      if (!ctx_ && !lanes) return int(FGIN_INVALID_ARGUMENT);
      auto action = detail::remote(remote);
      detail::local(action, local);
      return detail::put(ctx_, peer, dst, dstOff, src, srcOff, bytes, action, with_sharing<Remote>(flags), lanes);
    });
  }

  // Writes `value`, of 1, 2, 4 or 8 bytes, to `dst` at `dstOff` on `peer`.
  template <typename T, typename Remote = None, typename Coop = Thread>
  FGIN_DEVICE int putValue(uint32_t peer, fgin_window dst, uint64_t dstOff, T value, Remote remote = {}, Coop coop = {},
                           uint32_t flags = FGIN_DEFAULT, Scope /*given*/ = Scope::Thread,
                           Scope /*required*/ = Scope::Device) const {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8,
                  "putValue writes 1, 2, 4 or 8 bytes: use put for other sizes");
    static_assert(__is_trivially_copyable(T), "putValue writes the bytes of the value: its type must be trivially copyable");
    return lead(coop, [&](uint32_t lanes) {
      if (!ctx_ && !lanes) return int(FGIN_INVALID_ARGUMENT);
      uint64_t word = 0;
      __builtin_memcpy(&word, &value, sizeof(T) <= sizeof(word) ? sizeof(T) : sizeof(word));
      return detail::put_value(ctx_, peer, dst, dstOff, word, sizeof(T), detail::remote(remote),
                               with_sharing<Remote>(flags), lanes);
    });
  }

  // Reads `bytes` from `remote` at `remoteOff` on `peer` to `local` at `localOff`; they have arrived after a flush.
  template <typename Coop = Thread>
  FGIN_DEVICE int get(uint32_t peer, fgin_window remote, uint64_t remoteOff, fgin_window local, uint64_t localOff,
                      uint64_t bytes, Coop coop = {}, uint32_t flags = FGIN_DEFAULT) const {
    return lead(coop, [&](uint32_t) { return fgin_get(ctx_, peer, remote, remoteOff, local, localOff, bytes, with_sharing<None>(flags)); });
  }

  // Raises a signal of `peer`, without bytes.
  template <typename Remote, typename Coop = Thread>
  FGIN_DEVICE int signal(uint32_t peer, Remote remote, Coop coop = {}, uint32_t flags = FGIN_DEFAULT,
                         Scope /*given*/ = Scope::Thread, Scope /*required*/ = Scope::Device) const {
    return lead(coop, [&](uint32_t lanes) {
      if (!ctx_ && !lanes) return int(FGIN_INVALID_ARGUMENT);
      return detail::signal(ctx_, peer, detail::remote(remote), with_sharing<Remote>(flags), lanes);
    });
  }

  // Rings the doorbells that operations with FGIN_AGGREGATE left, on all queues. Doesn't wait.
  template <typename Coop = Thread>
  FGIN_DEVICE int ring(Coop coop = {}) const {
    return lead(coop, [&](uint32_t) { return fgin_ring(ctx_); });
  }

  // Waits until every earlier post on this context has completed. Each thread of the group waits for some of the
  // endpoints, and gets the status of those.
  template <typename Coop = Thread>
  FGIN_DEVICE int flush(Coop coop = {}) const {
    coop.sync();
    int status = ctx_ ? detail::flush(ctx_, coop.thread_rank(), coop.size()) : int(FGIN_INVALID_ARGUMENT);
    coop.sync();
    return status;
  }

  // A flush in two steps: `request` stands for every post before flushAsync, and wait() waits for them. The group's
  // thread of rank 0 makes both calls, with its own `request`.
  template <typename Coop = Thread>
  FGIN_DEVICE int flushAsync(fgin_request& request, Coop coop = {}) const {
    return lead(coop, [&](uint32_t) { return fgin_flush_async(ctx_, &request); });
  }

  template <typename Coop = Thread>
  FGIN_DEVICE int wait(const fgin_request& request, Coop coop = {}) const {
    return lead(coop, [&](uint32_t) { return fgin_wait_request(ctx_, &request); });
  }

  // Returns whether wait() would return at once.
  FGIN_DEVICE int test(const fgin_request& request, bool& done) const {
    int is_done = 0, status = fgin_test_request(ctx_, &request, &is_done);
    done = is_done;
    return status;
  }

  // Later waits of all threads return FGIN_TIMEOUT after `ns` nanoseconds; 0 means no limit.
  FGIN_DEVICE int setTimeout(uint64_t ns) const {
    return fgin_set_timeout(ctx_, ns);
  }

  // Signals and counters: the count since the last reset, modulo 2^31; waits compare modulo 2^31. Emulated signals have
  // 64 bits.

  FGIN_DEVICE int readSignal(uint32_t signal, uint64_t& out) const {
    return fgin_read_signal(ctx_, signal, &out);
  }
  template <typename Coop = Thread>
  FGIN_DEVICE int waitSignal(uint32_t signal, uint64_t least, Coop coop = {}) const {
    return lead(coop, [&](uint32_t) { return fgin_wait_signal(ctx_, signal, least); });
  }
  FGIN_DEVICE int resetSignal(uint32_t signal) const {
    return fgin_reset_signal(ctx_, signal);
  }
  FGIN_DEVICE int readCounter(uint32_t counter, uint64_t& out) const {
    return fgin_read_counter(ctx_, counter, &out);
  }
  template <typename Coop = Thread>
  FGIN_DEVICE int waitCounter(uint32_t counter, uint64_t least, Coop coop = {}) const {
    return lead(coop, [&](uint32_t) { return fgin_wait_counter(ctx_, counter, least); });
  }
  FGIN_DEVICE int resetCounter(uint32_t counter) const {
    return fgin_reset_counter(ctx_, counter);
  }

 private:
  template <typename Remote>
  FGIN_DEVICE static uint32_t with_sharing(uint32_t flags) {
    return flags | uint32_t(sharing) | detail::strength<Remote>;
  }

  template <typename Coop, typename Op>
  FGIN_DEVICE static int lead(Coop& coop, Op op) {
    coop.sync();
    int status = FGIN_OK;
    if (coop.thread_rank() == 0) status = op(0);
    coop.sync();
    return status;
  }

  // Every lane carries out its own operation.
  template <typename Op>
  FGIN_DEVICE static int lead(Lanes& lanes, Op op) {
    return op(lanes.mask);
  }

  const fgin_context* ctx_ = nullptr;
  int status_;
};

}  // namespace ferrogin

#endif  // FERROGIN_GIN_CUH
