// ferrogin: how the C++ headers post. In a kernel the usual post is inline (hot.cuh); what it leaves to do, and everything
// else, is a call. On the CPU everything is a call; FGIN_HOT_CALLS, for tests, makes it those that a kernel has inline.
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

#if defined(__CUDA_ARCH__) || defined(FGIN_HOT_CALLS)
#define FGIN_HAS_HOT_PATHS 1

extern "C" {
FGIN_API int fgin_rest_put(const fgin_context* ctx, fgin_window dst, uint64_t dst_off, fgin_window src,
                           uint64_t src_off, uint64_t bytes, uint64_t word, uint64_t meta);
FGIN_API int fgin_rest_put_value(const fgin_context* ctx, fgin_window dst, uint64_t dst_off, uint64_t value,
                                 uint64_t word, uint64_t meta);
FGIN_API int fgin_rest_signal(const fgin_context* ctx, uint64_t word, uint64_t meta);
}

#endif

#ifdef __CUDA_ARCH__

#include "hot.cuh"

#elif defined(FGIN_HOT_CALLS)

extern "C" {
struct fgin_hot_rest {
  uint64_t word, what;
};
fgin_hot_rest fgin_hot_put(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t src, uint64_t src_off,
                           uint64_t bytes, uint32_t named, uint32_t aggregate);
fgin_hot_rest fgin_hot_put_value(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t value,
                                 uint32_t bytes, uint32_t slot, uint32_t aggregate);
fgin_hot_rest fgin_hot_signal(uint64_t ctx, uint32_t peer, uint32_t slot, uint32_t aggregate);
}

#define FGIN_HOT_CALL(name)                                           \
  template <typename... Args>                                         \
  inline void name(uint64_t& word, uint64_t& what, Args... args) {    \
    fgin_hot_rest rest = ::name(args...);                             \
    word = rest.word;                                                 \
    what = rest.what;                                                 \
  }
namespace ferrogin {
namespace detail {
FGIN_HOT_CALL(fgin_hot_put)
FGIN_HOT_CALL(fgin_hot_put_value)
FGIN_HOT_CALL(fgin_hot_signal)
}  // namespace detail
}  // namespace ferrogin

#endif

namespace ferrogin {
namespace detail {

// What an operation announces: slots are an id + 1, or 0 for none.
struct Named {
  uint32_t signal;
  uint32_t amount;
  uint32_t counter;

  // In the word every slot has 16 bits: the largest stands for those that are too large, and is itself.
  FGIN_DEVICE static fgin_action narrow(uint32_t slot) {
    return slot < 65535 ? slot : 65535;
  }

  FGIN_DEVICE fgin_action action() const {
    return fgin_action(amount) << 32 | narrow(signal) | narrow(counter) << 16;
  }
};

// The slot of an id; the largest stands for those that are too large.
FGIN_DEVICE uint32_t slot_of(uint32_t id) {
  return id + (id != UINT32_MAX);
}

#ifdef FGIN_HAS_HOT_PATHS

// Below it, what a hot path leaves is a status.
constexpr uint64_t first_rest = 16;

// Shared by the GPU, and a signal that is raised by one if any: what the hot paths are for.
FGIN_DEVICE bool is_usual(Named named, uint32_t flags) {
  return !(flags & (FGIN_SHARING_CTA | FGIN_SHARING_THREAD)) && (named.amount == 1 || !named.signal);
}

// What fgin_rest_* want to know in one word.
FGIN_DEVICE uint64_t meta(uint32_t peer, uint64_t what, uint32_t flags, uint32_t named) {
  return peer | what << 24 | uint64_t((flags & FGIN_AGGREGATE) != 0) << 31 | uint64_t(named) << 32;
}

FGIN_DEVICE uint64_t address(const void* p) {
  return reinterpret_cast<uint64_t>(p);
}

#endif

FGIN_DEVICE int put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                    uint64_t src_off, uint64_t bytes, Named named, uint32_t flags) {
#ifdef FGIN_HAS_HOT_PATHS
  if (is_usual(named, flags)) {
    if (!ctx) return FGIN_INVALID_ARGUMENT;
    uint64_t word, what;
    uint32_t names = uint32_t(named.action());
    fgin_hot_put(word, what, address(ctx), peer, address(dst), dst_off, address(src), src_off, bytes, names,
                 flags & FGIN_AGGREGATE);
    if (what < first_rest) return int(what);
    return fgin_rest_put(ctx, dst, dst_off, src, src_off, bytes, word, meta(peer, what, flags, names));
  }
#endif
  return fgin_put(ctx, peer, dst, dst_off, src, src_off, bytes, named.action(), flags);
}

FGIN_DEVICE int put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                          uint32_t bytes, Named named, uint32_t flags) {
#ifdef FGIN_HAS_HOT_PATHS
  if (is_usual(named, flags) && !named.counter) {
    if (!ctx) return FGIN_INVALID_ARGUMENT;
    uint64_t word, what;
    fgin_hot_put_value(word, what, address(ctx), peer, address(dst), dst_off, value, bytes, named.signal,
                       flags & FGIN_AGGREGATE);
    if (what < first_rest) return int(what);
    return fgin_rest_put_value(ctx, dst, dst_off, value, word, meta(peer, what, flags, named.signal | bytes << 16));
  }
#endif
  return fgin_put_value(ctx, peer, dst, dst_off, value, bytes, named.action(), flags);
}

FGIN_DEVICE int signal(const fgin_context* ctx, uint32_t peer, Named named, uint32_t flags) {
#ifdef FGIN_HAS_HOT_PATHS
  if (is_usual(named, flags) && !named.counter) {
    if (!ctx) return FGIN_INVALID_ARGUMENT;
    uint64_t word, what;
    fgin_hot_signal(word, what, address(ctx), peer, named.signal, flags & FGIN_AGGREGATE);
    if (what < first_rest) return int(what);
    return fgin_rest_signal(ctx, word, meta(peer, what, flags, named.signal));
  }
#endif
  return fgin_signal(ctx, peer, named.action(), flags);
}

}  // namespace detail
}  // namespace ferrogin

#endif  // FERROGIN_POST_CUH
