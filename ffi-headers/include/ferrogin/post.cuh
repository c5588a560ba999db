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
  uint64_t word;
  uint32_t what;
};
fgin_hot_rest fgin_hot_put(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t src, uint64_t src_off,
                           uint64_t bytes, uint32_t named, uint32_t aggregate);
fgin_hot_rest fgin_hot_put_value(uint64_t ctx, uint32_t peer, uint64_t dst, uint64_t dst_off, uint64_t value,
                                 uint32_t bytes, uint32_t raises, uint32_t signal, uint32_t aggregate);
fgin_hot_rest fgin_hot_signal(uint64_t ctx, uint32_t peer, uint32_t raises, uint32_t signal, uint32_t aggregate);
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

// What an operation announces: ids, and whether they are meant.
struct Named {
  bool raises, counts;
  uint32_t signal, amount, counter;

  // In the word an id has 16 bits, one more than it is: the largest stands for those that are too large, and is itself.
  FGIN_DEVICE static uint32_t slot_of(bool is_meant, uint32_t id) {
    return !is_meant ? 0 : id < 65534 ? id + 1 : 65535;
  }

  // For what a hot path leaves, which has looked at the id.
  FGIN_DEVICE uint32_t slot() const {
    return raises ? signal + 1 : 0;
  }

  FGIN_DEVICE uint32_t slots() const {
    return slot_of(raises, signal) | slot_of(counts, counter) << 16;
  }

  FGIN_DEVICE fgin_action action() const {
    return fgin_action(amount) << 32 | slots();
  }
};

#ifdef FGIN_HAS_HOT_PATHS

// Shared by the GPU, and a signal that is raised by one if any: what the hot paths are for. They leave 0 when all is done.
FGIN_DEVICE bool is_usual(Named named, uint32_t flags) {
  return !(flags & (FGIN_SHARING_CTA | FGIN_SHARING_THREAD)) && (named.amount == 1 || !named.raises);
}

// What fgin_rest_* want to know in one word.
FGIN_DEVICE uint64_t meta(uint32_t peer, uint32_t what, uint32_t flags, uint32_t named) {
  return peer | what << 24 | uint32_t((flags & FGIN_AGGREGATE) != 0) << 31 | uint64_t(named) << 32;
}

FGIN_DEVICE uint64_t address(const void* p) {
  return reinterpret_cast<uint64_t>(p);
}

#endif

FGIN_DEVICE int put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                    uint64_t src_off, uint64_t bytes, Named named, uint32_t flags) {
#ifdef FGIN_HAS_HOT_PATHS
  if (is_usual(named, flags)) {
    uint64_t word, what;
    uint32_t names = named.slots();
    fgin_hot_put(word, what, address(ctx), peer, address(dst), dst_off, address(src), src_off, bytes, names,
                 flags & FGIN_AGGREGATE);
    if (!uint32_t(what)) return FGIN_OK;
    return fgin_rest_put(ctx, dst, dst_off, src, src_off, bytes, word, meta(peer, uint32_t(what), flags, names));
  }
#endif
  return fgin_put(ctx, peer, dst, dst_off, src, src_off, bytes, named.action(), flags);
}

FGIN_DEVICE int put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                          uint32_t bytes, Named named, uint32_t flags) {
#ifdef FGIN_HAS_HOT_PATHS
  if (is_usual(named, flags) && !named.counts) {
    uint64_t word, what;
    fgin_hot_put_value(word, what, address(ctx), peer, address(dst), dst_off, value, bytes, named.raises, named.signal,
                       flags & FGIN_AGGREGATE);
    if (!uint32_t(what)) return FGIN_OK;
    return fgin_rest_put_value(ctx, dst, dst_off, value, word, meta(peer, uint32_t(what), flags, named.slot() | bytes << 16));
  }
#endif
  return fgin_put_value(ctx, peer, dst, dst_off, value, bytes, named.action(), flags);
}

FGIN_DEVICE int signal(const fgin_context* ctx, uint32_t peer, Named named, uint32_t flags) {
#ifdef FGIN_HAS_HOT_PATHS
  if (is_usual(named, flags) && !named.counts) {
    uint64_t word, what;
    fgin_hot_signal(word, what, address(ctx), peer, named.raises, named.signal, flags & FGIN_AGGREGATE);
    if (!uint32_t(what)) return FGIN_OK;
    return fgin_rest_signal(ctx, word, meta(peer, uint32_t(what), flags, named.slot()));
  }
#endif
  return fgin_signal(ctx, peer, named.action(), flags);
}

}  // namespace detail
}  // namespace ferrogin

#endif  // FERROGIN_POST_CUH
