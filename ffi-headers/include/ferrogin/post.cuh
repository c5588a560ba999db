// ferrogin: how the C++ headers post. In a kernel the fast path is inline (fast_path.cuh); its continuation, and every other
// operation, is a call. On the CPU every operation is a call. With FGIN_FAST_PATH_CALLS, for tests, the CPU calls the functions
// that a kernel has inline.
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

extern "C" {
FGIN_API int fgin_continue_put(const fgin_context* ctx, fgin_window dst, uint64_t dst_off, fgin_window src,
                           uint64_t src_off, uint64_t bytes, uint64_t word, uint64_t operation);
FGIN_API int fgin_continue_put_value(const fgin_context* ctx, fgin_window dst, uint64_t dst_off, uint64_t value,
                                 uint64_t word, uint64_t operation);
FGIN_API int fgin_continue_signal(const fgin_context* ctx, uint64_t word, uint64_t operation);
}

#endif

#ifdef __CUDA_ARCH__

#include "fast_path.cuh"

#elif defined(FGIN_FAST_PATH_CALLS)

extern "C" {
struct fgin_continuation {
  uint64_t word;
  uint32_t kind;
};
fgin_continuation fgin_fast_put(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t src, uint64_t src_off,
                           uint64_t bytes, uint32_t ids, uint32_t aggregate);
fgin_continuation fgin_fast_put_value(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t value,
                                 uint32_t bytes, uint32_t has_signal, uint32_t signal, uint32_t aggregate);
fgin_continuation fgin_fast_signal(uint64_t ctx, uint32_t peer, uint32_t has_signal, uint32_t signal, uint32_t aggregate);
}

#define FGIN_FAST_PATH_CALL(name)                                     \
  template <typename... Args>                                         \
  inline void name(uint64_t& word, uint64_t& kind, Args... args) {    \
    fgin_continuation next = ::name(args...);                         \
    word = next.word;                                                 \
    kind = next.kind;                                                 \
  }
namespace ferrogin {
namespace detail {
FGIN_FAST_PATH_CALL(fgin_fast_put)
FGIN_FAST_PATH_CALL(fgin_fast_put_value)
FGIN_FAST_PATH_CALL(fgin_fast_signal)
}  // namespace detail
}  // namespace ferrogin

#endif

namespace ferrogin {
namespace detail {

// The signal and the counter of an operation: ids, and whether there are any.
struct ActionIds {
  bool has_signal, has_counter;
  uint32_t signal, amount, counter;

  // A slot is an id plus one, in 16 bits; 0 is none. The largest slot stands for every larger id, and no context has it.
  FGIN_DEVICE static uint32_t slot_of(bool exists, uint32_t id) {
    return !exists ? 0 : id < 65534 ? id + 1 : 65535;
  }

  // The slot for a continuation: its fast path has checked the id.
  FGIN_DEVICE uint32_t slot() const {
    return has_signal ? signal + 1 : 0;
  }

  FGIN_DEVICE uint32_t slots() const {
    return slot_of(has_signal, signal) | slot_of(has_counter, counter) << 16;
  }

  FGIN_DEVICE fgin_action action() const {
    return fgin_action(amount) << 32 | slots();
  }
};

#ifdef FGIN_HAS_FAST_PATH

// The fast path takes operations in GPU mode that raise a signal by at most one. Its continuation is 0 when nothing remains to
// be done.
FGIN_DEVICE bool takes_fast_path(ActionIds ids, uint32_t flags) {
  return !(flags & (FGIN_SHARING_CTA | FGIN_SHARING_THREAD)) && (ids.amount == 1 || !ids.has_signal);
}

// The operation in one word, for fgin_continue_*; `ids` are slots, or a slot and the number of bytes.
FGIN_DEVICE uint64_t packed_operation(uint32_t peer, uint32_t kind, uint32_t flags, uint32_t ids) {
  return peer | kind << 24 | uint32_t((flags & FGIN_AGGREGATE) != 0) << 31 | uint64_t(ids) << 32;
}

FGIN_DEVICE uint64_t address(const void* p) {
  return reinterpret_cast<uint64_t>(p);
}

#endif

FGIN_DEVICE int put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                    uint64_t src_off, uint64_t bytes, ActionIds ids, uint32_t flags) {
#ifdef FGIN_HAS_FAST_PATH
  if (takes_fast_path(ids, flags)) {
    uint64_t word, kind;
    uint32_t slots = ids.slots();
    fgin_fast_put(word, kind, address(ctx), peer, address(dst), dst_off, address(src), src_off, bytes, slots,
                 flags & FGIN_AGGREGATE);
    if (!uint32_t(kind)) return FGIN_OK;
    return fgin_continue_put(ctx, dst, dst_off, src, src_off, bytes, word,
                             packed_operation(peer, uint32_t(kind), flags, slots));
  }
#endif
  return fgin_put(ctx, peer, dst, dst_off, src, src_off, bytes, ids.action(), flags);
}

FGIN_DEVICE int put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                          uint32_t bytes, ActionIds ids, uint32_t flags) {
#ifdef FGIN_HAS_FAST_PATH
  if (takes_fast_path(ids, flags) && !ids.has_counter) {
    uint64_t word, kind;
    fgin_fast_put_value(word, kind, address(ctx), peer, address(dst), dst_off, value, bytes, ids.has_signal, ids.signal,
                       flags & FGIN_AGGREGATE);
    if (!uint32_t(kind)) return FGIN_OK;
    return fgin_continue_put_value(ctx, dst, dst_off, value, word,
                                   packed_operation(peer, uint32_t(kind), flags, ids.slot() | bytes << 16));
  }
#endif
  return fgin_put_value(ctx, peer, dst, dst_off, value, bytes, ids.action(), flags);
}

FGIN_DEVICE int signal(const fgin_context* ctx, uint32_t peer, ActionIds ids, uint32_t flags) {
#ifdef FGIN_HAS_FAST_PATH
  if (takes_fast_path(ids, flags) && !ids.has_counter) {
    uint64_t word, kind;
    fgin_fast_signal(word, kind, address(ctx), peer, ids.has_signal, ids.signal, flags & FGIN_AGGREGATE);
    if (!uint32_t(kind)) return FGIN_OK;
    return fgin_continue_signal(ctx, word, packed_operation(peer, uint32_t(kind), flags, ids.slot()));
  }
#endif
  return fgin_signal(ctx, peer, ids.action(), flags);
}

}  // namespace detail
}  // namespace ferrogin

#endif  // FERROGIN_POST_CUH
