// ferrogin: how the C++ headers post. In a kernel, the fast path is inline (fast_path.cuh); what it leaves to do and
// every other operation are calls. On the CPU, every operation is a call. For tests, FGIN_FAST_PATH_CALLS makes the CPU
// call the functions that a kernel inlines. Lanes of a warp that post at the same time post together.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef FERROGIN_POST_CUH
#define FERROGIN_POST_CUH

#include "gin.h"

#include <stdint.h>

#ifdef __CUDACC__
#define FGIN_DEVICE __device__ __forceinline__
#else
#define FGIN_DEVICE inline
#endif

#if defined(__CUDA_ARCH__) || defined(FGIN_FAST_PATH_CALLS)
#define FGIN_HAS_FAST_PATH 1

// The calls behind the fast path: the first finishes a request, the second carries out an operation that doesn't take
// the fast path. The arguments are the fast path's results and the low half of `bytes`.
extern "C" FGIN_API int fgin_continue(uint64_t poster, uint64_t word, uint64_t remote, uint64_t local, uint64_t keys,
                                      uint32_t bytes, uint32_t next);
extern "C" FGIN_API int fgin_fallback(uint64_t poster, uint64_t word, uint64_t remote, uint64_t local, uint64_t keys,
                                      uint32_t bytes, uint32_t next);

#endif

#ifdef __CUDA_ARCH__

#include "fast_path.cuh"

#elif defined(FGIN_FAST_PATH_CALLS)

extern "C" {
struct fgin_continuation {
  uint64_t next, word, poster, remote, local, keys;
};
fgin_continuation fgin_fast_put(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t src, uint64_t src_off,
                              uint64_t bytes, uint32_t has_signal, uint32_t signal, uint32_t has_counter, uint32_t counter,
                              uint32_t flags);
fgin_continuation fgin_fast_put_value(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t value,
                                    uint32_t bytes, uint32_t has_signal, uint32_t signal, uint32_t flags);
fgin_continuation fgin_fast_signal(uint64_t ctx, uint32_t peer, uint32_t has_signal, uint32_t signal, uint32_t flags);
uint64_t fgin_fast_flush(uint64_t ctx, uint32_t rank, uint32_t size, uint64_t abort, uint32_t clock, uint64_t limit);
}

#define FGIN_FAST_PATH_CALL(name)                                                                                           \
  template <typename... Args>                                                                                               \
  inline void name(uint64_t& next, uint64_t& word, uint64_t& poster, uint64_t& remote, uint64_t& local, uint64_t& keys,     \
                   Args... args) {                                                                                          \
    fgin_continuation left = ::name(args...);                                                                               \
    next = left.next, word = left.word, poster = left.poster, remote = left.remote, local = left.local, keys = left.keys;   \
  }
namespace ferrogin {
namespace detail {
FGIN_FAST_PATH_CALL(fgin_fast_put)
FGIN_FAST_PATH_CALL(fgin_fast_put_value)
FGIN_FAST_PATH_CALL(fgin_fast_signal)
inline void fgin_fast_flush(uint64_t& status, uint64_t ctx, uint32_t rank, uint32_t size, uint64_t abort, uint32_t clock,
                            uint64_t limit) {
  status = ::fgin_fast_flush(ctx, rank, size, abort, clock, limit);
}
}  // namespace detail
}  // namespace ferrogin

#endif

namespace ferrogin {
namespace detail {

// The ids of an operation's signal and counter, and whether it has them.
struct ActionIds {
  bool has_signal, has_counter;
  uint32_t signal, amount, counter;

  // A slot is an id plus one, in 16 bits; 0 means none. The largest slot stands for all larger ids, which no context
  // has.
  FGIN_DEVICE static uint32_t slot_of(bool exists, uint32_t id) {
    return !exists ? 0 : id < 65534 ? id + 1 : 65535;
  }

  FGIN_DEVICE uint32_t slots() const {
    return slot_of(has_signal, signal) | slot_of(has_counter, counter) << 16;
  }

  FGIN_DEVICE fgin_action action() const {
    return fgin_action(amount) << 32 | slots();
  }
};

// A signal in a window's memory, and its operation's counter, if any.
struct WordSignal {
  fgin_window window;
  uint64_t offset, amount;
  bool has_counter;
  uint32_t counter;

  FGIN_DEVICE fgin_action counter_action() const {
    return fgin_action(ActionIds::slot_of(has_counter, counter)) << 16;
  }
};

#ifdef FGIN_HAS_FAST_PATH

// The fast path takes operations in GPU and CTA mode that raise at most a weak signal, by one. It's the same code in
// both: block scope would save three cache invalidations, which the system fences make anyway, and no load, atomic
// operation or fence.
FGIN_DEVICE bool takes_fast_path(ActionIds ids, uint32_t flags) {
  return !(flags & (FGIN_SHARING_THREAD | FGIN_STRONG)) && (ids.amount == 1 || !ids.has_signal);
}

// The flags of fgin_fast_*: the aggregate flag, and 1 if other lanes of this warp got here at the same time: they post
// together.
FGIN_DEVICE uint32_t fast_flags(uint32_t flags) {
  uint32_t active = 1;
#ifdef __CUDA_ARCH__
  asm volatile("activemask.b32 %0;" : "=r"(active));
#endif
  return (flags & FGIN_AGGREGATE) | ((active & (active - 1)) != 0);
}

FGIN_DEVICE uint64_t address(const void* p) {
  return reinterpret_cast<uint64_t>(p);
}

// What the fast path returns.
struct FastPath {
  uint64_t next, word, poster, remote, local, keys;

  FGIN_DEVICE int finish(uint64_t bytes) const {
    if (!uint32_t(next)) return FGIN_OK;
    // The low 3 bits are the step: up to 4, the request takes the fast path.
    if ((uint32_t(next) & 7) > 4) return fgin_fallback(poster, word, remote, local, keys, uint32_t(bytes), uint32_t(next));
    return fgin_continue(poster, word, remote, local, keys, uint32_t(bytes), uint32_t(next));
  }
};

#endif

FGIN_DEVICE int put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                    uint64_t src_off, uint64_t bytes, ActionIds ids, uint32_t flags, uint32_t lanes = 0) {
  if (lanes) return fgin_warp_put(ctx, lanes, peer, dst, dst_off, src, src_off, bytes, ids.action(), flags);
#ifdef FGIN_HAS_FAST_PATH
  if (takes_fast_path(ids, flags)) {
    FastPath f;
    fgin_fast_put(f.next, f.word, f.poster, f.remote, f.local, f.keys, address(ctx), peer, address(dst), dst_off, address(src),
                  src_off, bytes, ids.has_signal, ids.signal, ids.has_counter, ids.counter, fast_flags(flags));
    return f.finish(bytes);
  }
#endif
  return fgin_put(ctx, peer, dst, dst_off, src, src_off, bytes, ids.action(), flags);
}

FGIN_DEVICE int put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                          uint32_t bytes, ActionIds ids, uint32_t flags, uint32_t lanes = 0) {
  if (lanes) return fgin_warp_put_value(ctx, lanes, peer, dst, dst_off, value, bytes, ids.action(), flags);
#ifdef FGIN_HAS_FAST_PATH
  if (takes_fast_path(ids, flags) && !ids.has_counter) {
    FastPath f;
    fgin_fast_put_value(f.next, f.word, f.poster, f.remote, f.local, f.keys, address(ctx), peer, address(dst), dst_off, value,
                        bytes, ids.has_signal, ids.signal, fast_flags(flags));
    return f.finish(bytes);
  }
#endif
  return fgin_put_value(ctx, peer, dst, dst_off, value, bytes, ids.action(), flags);
}

FGIN_DEVICE int signal(const fgin_context* ctx, uint32_t peer, ActionIds ids, uint32_t flags, uint32_t lanes = 0) {
  if (lanes) return fgin_warp_signal(ctx, lanes, peer, ids.action(), flags);
#ifdef FGIN_HAS_FAST_PATH
  if (takes_fast_path(ids, flags) && !ids.has_counter) {
    FastPath f;
    fgin_fast_signal(f.next, f.word, f.poster, f.remote, f.local, f.keys, address(ctx), peer, ids.has_signal, ids.signal,
                     fast_flags(flags));
    return f.finish(0);
  }
#endif
  return fgin_signal(ctx, peer, ids.action(), flags);
}

// What ends a flush besides a card error: nothing, the context's time limit, or a number of clock64() cycles.
enum class Clock : uint32_t { None = 0, Context = 1, Cycles = 2 };

// Does the part of a flush that falls to thread `rank` of `size`. In a kernel, a non-null `abort` can end it too.
FGIN_DEVICE int flush(const fgin_context* ctx, uint32_t rank, uint32_t size, const uint32_t* abort = nullptr,
                      Clock clock = Clock::Context, uint64_t limit = 0) {
#ifdef FGIN_HAS_FAST_PATH
  uint64_t status;
  fgin_fast_flush(status, address(ctx), rank, size, address(abort), uint32_t(clock), limit);
  return int(status);
#else
  (void)abort, (void)clock, (void)limit;
  return fgin_flush_part(ctx, rank, size);
#endif
}

// Every lane raises its own signal.

FGIN_DEVICE int put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                    uint64_t src_off, uint64_t bytes, WordSignal to, uint32_t flags, uint32_t = 0) {
  return fgin_put_signal_at(ctx, peer, dst, dst_off, src, src_off, bytes, to.window, to.offset, to.amount, to.counter_action(), flags);
}

FGIN_DEVICE int put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                          uint32_t bytes, WordSignal to, uint32_t flags, uint32_t = 0) {
  return fgin_put_value_signal_at(ctx, peer, dst, dst_off, value, bytes, to.window, to.offset, to.amount, flags);
}

FGIN_DEVICE int signal(const fgin_context* ctx, uint32_t peer, WordSignal to, uint32_t flags, uint32_t = 0) {
  return fgin_signal_at(ctx, peer, to.window, to.offset, to.amount, flags);
}

}  // namespace detail
}  // namespace ferrogin

#endif  // FERROGIN_POST_CUH
