// ferrogin: the EFA_GDA backend of NCCL's device API, releases 2.31 and 2.32.
//
// Include it after <nccl.h> and before NCCL's device headers; ferrogin/nccl_gin.cuh does both. It replaces NCCL's own
// EFA backend: it defines every ncclGinApi_* of EFA_GDA, and the include guard of NCCL's file.
//
// The operations are those of ferrogin/gin.h, on the handles that the ferrogin plugin returned. NCCL's functions return
// nothing, so misuse (a peer, signal or counter out of range, a VA signal where the card counts signals, another
// plugin's handle) ends the kernel with FGIN_ON_MISUSE(status). After a card error, an abort or a deadline, the
// operation returns, and queryLastError reports it to the host.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef FERROGIN_NCCL_GIN_BACKEND_CUH
#define FERROGIN_NCCL_GIN_BACKEND_CUH

#include <nccl.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 31, 0)
#error "ferrogin: needs the headers of NCCL 2.31 or newer"
#endif

#ifdef _NCCL_DEVICE_GIN_EFA_GDA_H_
#error "ferrogin: NCCL's EFA backend is already here: include <ferrogin/nccl_gin.cuh> before <nccl_device.h>"
#endif
#define _NCCL_DEVICE_GIN_EFA_GDA_H_

#include "gin.h"
#include "layout.h"
#include "post.cuh"

#include <nccl_device/gin/gin_device_common.h>
#include <nccl_device/gin/efa_gda/gin_efa_gda_dev.h>

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// If scratch_pad in the context's handle is 1, clears it and calls fgin_ring.
extern "C" FGIN_API int fgin_ring_waiting(const fgin_context* ctx);

#define FGIN_ASSERT_TYPE(type, bytes, alignment) \
  static_assert(sizeof(type) == bytes && alignof(type) == alignment, "ferrogin and NCCL differ in " #type);
#define FGIN_ASSERT_FIELD(type, field, offset) \
  static_assert(offsetof(type, field) == offset, "ferrogin and NCCL differ in " #type "." #field);
FGIN_HANDLE_LAYOUTS(FGIN_ASSERT_TYPE, FGIN_ASSERT_FIELD)

#ifdef __CUDACC__

// What happens on misuse.
#ifndef FGIN_ON_MISUSE
#ifdef __CUDA_ARCH__
#define FGIN_ON_MISUSE(status) __trap()
#else
#define FGIN_ON_MISUSE(status) abort()
#endif
#endif

namespace ferrogin {
namespace nccl {

static_assert(FGIN_SHARING_CTA == NCCL_GIN_RESOURCE_SHARING_CTA << 8, "sharing modes have NCCL's numbers");
static_assert(FGIN_SHARING_THREAD == NCCL_GIN_RESOURCE_SHARING_THREAD << 8, "sharing modes have NCCL's numbers");

NCCL_DEVICE_INLINE void check(int status) {
  if (status == FGIN_INVALID_ARGUMENT || status == FGIN_UNSUPPORTED) FGIN_ON_MISUSE(status);
}

// Loads a word that the host wrote before the kernel started.
template <typename T>
NCCL_DEVICE_INLINE T constant(const char* at) {
#ifdef __CUDA_ARCH__
  return __ldg(reinterpret_cast<const T*>(at));
#else
  return *reinterpret_cast<const T*>(at);
#endif
}

// fgin_open, inline: the header before the handles points to the contexts.
NCCL_DEVICE_INLINE const fgin_context* context(const ncclGinCtx& ctx) {
  const char* header = static_cast<const char*>(ctx.handle) - FGIN_HEADER_SIZE;
  // Reads both words at once, because a load takes longer than a comparison.
  bool is_ferrogin = (constant<unsigned long long>(header + FGIN_HEADER_MAGIC_OFFSET) == FGIN_HEADER_MAGIC) &
              (constant<unsigned>(header + FGIN_HEADER_VERSION_OFFSET) == FGIN_HEADER_VERSION);
  if (!is_ferrogin) FGIN_ON_MISUSE(FGIN_UNSUPPORTED);
  auto contexts = constant<unsigned long long>(header + FGIN_HEADER_CONTEXTS_OFFSET);
  return reinterpret_cast<const fgin_context*>(contexts + size_t(ctx.contextId) * FGIN_CONTEXT_SIZE);
}

NCCL_DEVICE_INLINE nccl_ofi_gin_gdaki_dev_handle& handle(const ncclGinCtx& ctx) {
  return static_cast<nccl_ofi_gin_gdaki_dev_handle*>(ctx.handle)[ctx.contextId];
}

// Returns the word of this rank's indexed signal, in a context with emulated signals.
NCCL_DEVICE_INLINE uint64_t* word_of(const ncclGinCtx& ctx, ncclGinSignal_t signal) {
  auto* fgin = reinterpret_cast<const char*>(context(ctx));
  auto* emulated = reinterpret_cast<const char*>(constant<unsigned long long>(fgin + FGIN_CONTEXT_EMULATED_OFFSET));
  if (!emulated || signal >= constant<unsigned>(emulated + FGIN_EMULATED_N_SIGNALS_OFFSET)) {
    FGIN_ON_MISUSE(FGIN_INVALID_ARGUMENT);
    return nullptr;
  }
  return reinterpret_cast<uint64_t*>(constant<unsigned long long>(emulated + FGIN_EMULATED_WORDS_OFFSET)) + signal;
}

static_assert(FGIN_AGGREGATE == ncclGinOptFlagsAggregateRequests, "the flag has NCCL's number");

NCCL_DEVICE_INLINE uint32_t flags(const ncclGinCtx& ctx, uint32_t optFlags) {
  return uint32_t(ctx.resourceSharingMode) << 8 | (optFlags & FGIN_AGGREGATE);
}

// In NCCL, an aggregated request waits for the next plain request, whatever signal or counter that one names. In
// ferrogin, each signal and counter has its own queue. So a word in the handle that NCCL's code doesn't use says that
// requests are waiting, and a plain request then rings the doorbells of all queues. A request that was aggregated
// earlier in program order has set the word before the plain one is posted.
struct Waiting {
  uint32_t* word;
  uint32_t seen = 0;

  NCCL_DEVICE_INLINE Waiting(const ncclGinCtx& ctx, uint32_t optFlags) : word(&handle(ctx).scratch_pad) {
    if (optFlags & FGIN_AGGREGATE) return;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
#else
    seen = __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
  }

  // Called once the request is posted.
  NCCL_DEVICE_INLINE void posted(const fgin_context* fgin, uint32_t optFlags) {
    if (optFlags & FGIN_AGGREGATE) {
#ifdef __CUDA_ARCH__
      asm volatile("st.release.gpu.global.b32 [%0], %1;" : : "l"(word), "r"(1) : "memory");
#else
      __atomic_store_n(word, 1, __ATOMIC_RELEASE);
#endif
    } else if (seen) {
      (void)fgin_ring_waiting(fgin);
    }
  }
};

NCCL_DEVICE_INLINE detail::ActionIds action_ids(const ncclGinSignalDescriptor& signal, uint64_t amount, bool hasCounter,
                                                ncclGinCounter_t counter) {
  detail::ActionIds ids;
  ids.has_signal = false;
  ids.signal = ids.amount = 0;
  ids.has_counter = hasCounter;
  ids.counter = counter;
  if (signal.type != NCCL_GIN_SIGNAL_TYPE_INDEXED) return ids;
  ids.has_signal = true;
  ids.signal = signal.indexedSignal.signalId;
  ids.amount = uint32_t(amount);
  return ids;
}

// Posts an operation with its signal and counter: through `at` for a VA signal, which needs emulated signals, and
// through `here` otherwise. A strong signal means that everything before it has completed. EFA keeps no order, so this
// flushes before a strong indexed signal, and posts nothing if the flush fails; the loss of another rank
// (FERROGIN_ON_PEER_FAILURE=isolate) is no failure. For a VA signal, `at` does the waiting.
template <typename Here, typename At>
NCCL_DEVICE_INLINE void post(const ncclGinCtx& ctx, const ncclGinSignalDescriptor& signal, ncclGinSignalOp_t op, uint64_t arg,
                             bool hasCounter, ncclGinCounter_t counter, uint32_t optFlags, Here here, At at) {
  const fgin_context* fgin = context(ctx);
  uint64_t amount = op == ncclGinSignalInc ? 1 : arg;
  if (signal.type == NCCL_GIN_SIGNAL_TYPE_INDEXED && amount > UINT32_MAX) {
    FGIN_ON_MISUSE(FGIN_INVALID_ARGUMENT);
    return;
  }
  auto ids = action_ids(signal, amount, hasCounter, counter);
  uint32_t all = flags(ctx, optFlags);
  bool is_va = signal.type == NCCL_GIN_SIGNAL_TYPE_VA;
  bool is_strong = signal.type != NCCL_GIN_SIGNAL_TYPE_NONE && signal.isStrong;
  if (is_strong && !is_va && fgin_settle(fgin) != FGIN_OK) return;
  Waiting waiting(ctx, optFlags);
  check(is_va ? at(fgin, amount, ids.action(), is_strong ? all | FGIN_STRONG : all) : here(fgin, ids, all));
  waiting.posted(fgin, optFlags);
}

// Flushes as NCCL does: until every post has completed, `*abortFlag` is raised, or the cycles have passed. A card error
// and the plugin's abort flag end it too. The threads of the group divide the flush.
template <bool HasTimeout, typename Coop>
NCCL_DEVICE_INLINE ncclResult_t flush(const ncclGinCtx& ctx, Coop& coop, uint32_t* abortFlag, uint64_t timeoutCycles) {
  coop.sync();
  int status = detail::flush(context(ctx), coop.thread_rank(), coop.size(), abortFlag,
                             HasTimeout ? detail::Clock::Cycles : detail::Clock::None, timeoutCycles);
  coop.sync();
  return HasTimeout && status == FGIN_TIMEOUT ? ncclTimeout : ncclSuccess;
}

}  // namespace nccl
}  // namespace ferrogin

template <>
struct ncclGinApi_Put<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  template <typename Coop>
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, Coop coop, int peer, bool hasWins, ncclGinWindow_t dstWin,
                                      size_t dstOff, ncclGinWindow_t srcWin, size_t srcOff, size_t bytes,
                                      ncclGinSignalDescriptor signal, ncclGinSignalOp_t signalOp, uint64_t signalOpArg,
                                      bool hasCounter, ncclGinCounter_t counterId, bool, ncclGinDescriptorSmem*,
                                      cuda::thread_scope, cuda::thread_scope, uint32_t optFlags = ncclGinOptFlagsDefault) {
    coop.sync();
    if (coop.thread_rank() == 0) {
      auto rank = uint32_t(peer);
      auto word = signal.vaSignal;
      ferrogin::nccl::post(
        ctx, signal, signalOp, signalOpArg, hasCounter, counterId, optFlags,
        [&](const fgin_context* fgin, const ferrogin::detail::ActionIds& ids, uint32_t all) {
          return hasWins ? ferrogin::detail::put(fgin, rank, dstWin, dstOff, srcWin, srcOff, bytes, ids, all) :
                           ferrogin::detail::signal(fgin, rank, ids, all);
        },
        [&](const fgin_context* fgin, uint64_t amount, fgin_action counter, uint32_t all) {
          return hasWins ? fgin_put_signal_at(fgin, rank, dstWin, dstOff, srcWin, srcOff, bytes, word.signalWindow,
                                              word.signalOffset, amount, counter, all) :
                           fgin_signal_at(fgin, rank, word.signalWindow, word.signalOffset, amount, all);
        });
    }
    coop.sync();
  }
};

template <>
struct ncclGinApi_PutValue<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  template <typename Coop, typename T>
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, Coop coop, int peer, ncclGinWindow_t dstWin, size_t dstOff,
                                      T srcData, ncclGinSignalDescriptor signal, ncclGinSignalOp_t signalOp,
                                      uint64_t signalOpArg, bool, ncclGinDescriptorSmem*, cuda::thread_scope,
                                      cuda::thread_scope, uint32_t optFlags = ncclGinOptFlagsDefault) {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8,
                  "putValue writes 1, 2, 4 or 8 bytes: use put for other sizes");
    coop.sync();
    if (coop.thread_rank() == 0) {
      auto rank = uint32_t(peer);
      auto word = signal.vaSignal;
      uint64_t value = 0;
      memcpy(&value, &srcData, sizeof(T) <= sizeof(value) ? sizeof(T) : sizeof(value));
      ferrogin::nccl::post(
        ctx, signal, signalOp, signalOpArg, false, 0, optFlags,
        [&](const fgin_context* fgin, const ferrogin::detail::ActionIds& ids, uint32_t all) {
          return ferrogin::detail::put_value(fgin, rank, dstWin, dstOff, value, sizeof(T), ids, all);
        },
        [&](const fgin_context* fgin, uint64_t amount, fgin_action, uint32_t all) {
          return fgin_put_value_signal_at(fgin, rank, dstWin, dstOff, value, sizeof(T), word.signalWindow,
                                          word.signalOffset, amount, all);
        });
    }
    coop.sync();
  }
};

template <>
struct ncclGinApi_Get<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  template <typename Coop>
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, Coop coop, int peer, ncclGinWindow_t remoteWin, size_t remoteOff,
                                      ncclGinWindow_t localWin, size_t localOff, size_t bytes, bool,
                                      ncclGinDescriptorSmem*, uint32_t optFlags = ncclGinOptFlagsDefault) {
    using namespace ferrogin::nccl;
    coop.sync();
    if (coop.thread_rank() == 0) {
      const fgin_context* fgin = context(ctx);
      uint32_t all = flags(ctx, optFlags);
      Waiting waiting(ctx, optFlags);
      check(fgin_get(fgin, uint32_t(peer), remoteWin, remoteOff, localWin, localOff, bytes, all));
      waiting.posted(fgin, optFlags);
    }
    coop.sync();
  }
};

// NCCL's request has room for two words, but a flush has a number per endpoint. So flushAsync rings the doorbells of
// aggregated requests, and wait() waits for every post before the wait, which is at least what NCCL asks for.
template <>
struct ncclGinApi_FlushAsync<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, uint32_t, ncclGinRequest_t* outRequest, bool,
                                      ncclGinDescriptorSmem*, uint32_t) {
    ferrogin::nccl::check(fgin_ring(ferrogin::nccl::context(ctx)));
    *outRequest = {};
  }
};

template <>
struct ncclGinApi_Wait<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, ncclGinRequest_t&, bool, ncclGinDescriptorSmem*,
                                      cuda::memory_order, uint32_t* abortFlag) {
    ncclCoopThread thread;
    (void)ferrogin::nccl::flush<false>(ctx, thread, abortFlag, 0);
  }
  NCCL_DEVICE_INLINE static ncclResult_t call(ncclGinCtx ctx, ncclGinRequest_t&, bool, ncclGinDescriptorSmem*,
                                              cuda::memory_order, uint32_t* abortFlag, uint64_t timeoutCycles) {
    ncclCoopThread thread;
    return ferrogin::nccl::flush<true>(ctx, thread, abortFlag, timeoutCycles);
  }
};

template <>
struct ncclGinApi_Flush<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  template <typename Coop>
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, Coop coop, bool, ncclGinDescriptorSmem*, cuda::memory_order,
                                      uint32_t* abortFlag) {
    (void)ferrogin::nccl::flush<false>(ctx, coop, abortFlag, 0);
  }
  template <typename Coop>
  NCCL_DEVICE_INLINE static ncclResult_t call(ncclGinCtx ctx, Coop coop, bool, ncclGinDescriptorSmem*,
                                              cuda::memory_order, uint32_t* abortFlag, uint64_t timeoutCycles) {
    return ferrogin::nccl::flush<true>(ctx, coop, abortFlag, timeoutCycles);
  }
};

// With true, NCCL's barriers would skip their flush, even if the communicator's requirements make their signals weak.
template <>
struct ncclGinApi_SupportsStrongSignal<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static bool call(ncclGinCtx) {
    return false;
  }
};

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
template <>
struct ncclGinApi_FlushesAllPutsOnAnySignal<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static bool call(ncclGinCtx) {
    return false;
  }
};
#endif

template <>
struct ncclGinApi_GetSignalPtr<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static ncclGinOffsetPtr call(ncclGinCtx ctx, ncclGinSignal_t signalId) {
    nccl_ofi_gin_gdaki_dev_handle& dev = ferrogin::nccl::handle(ctx);
    if (!dev.signal_handles) return {ferrogin::nccl::word_of(ctx, signalId), 0};
    if (signalId >= uint32_t(dev.nSignals)) FGIN_ON_MISUSE(FGIN_INVALID_ARGUMENT);
    nccl_ofi_gin_gdaki_dev_counter_handle* signal = dev.signal_handles[signalId];
    return {signal->cntr_value, signal->cntr_offset};
  }
};

template <>
struct ncclGinApi_GetCounterPtr<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static ncclGinOffsetPtr call(ncclGinCtx ctx, ncclGinCounter_t counterId) {
    nccl_ofi_gin_gdaki_dev_handle& dev = ferrogin::nccl::handle(ctx);
    if (counterId >= uint32_t(dev.nCounters)) FGIN_ON_MISUSE(FGIN_INVALID_ARGUMENT);
    nccl_ofi_gin_gdaki_dev_counter_handle* counter = dev.counter_handles[counterId];
    return {counter->cntr_value, counter->cntr_offset};
  }
};

template <>
struct ncclGinApi_ResetSignal<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, ncclGinSignalDescriptor signal) {
    if (signal.type == NCCL_GIN_SIGNAL_TYPE_VA) {
      auto* rails = static_cast<nccl_ofi_gin_gdaki_mr_handle**>(signal.vaSignal.signalWindow);
      auto address = rails[ferrogin::nccl::handle(ctx).rail_id]->local_addr + signal.vaSignal.signalOffset;
      // The kernel may use another 64-bit type for the word, whose accesses the compiler would move past this store.
      asm volatile("" ::: "memory");
      *reinterpret_cast<volatile uint64_t*>(address) = 0;
      asm volatile("" ::: "memory");
      return;
    }
    ferrogin::nccl::check(fgin_reset_signal(ferrogin::nccl::context(ctx), signal.indexedSignal.signalId));
  }
};

template <>
struct ncclGinApi_ResetCounter<NCCL_NET_DEVICE_GIN_EFA_GDA> {
  NCCL_DEVICE_INLINE static void call(ncclGinCtx ctx, ncclGinCounter_t counterId) {
    ferrogin::nccl::check(fgin_reset_counter(ferrogin::nccl::context(ctx), counterId));
  }
};

// Replaces the struct of NCCL's GDAKI backend: DeepEP casts a context's handle to it, and loads the address of the
// signal words from `signals_table.buffer`. Only emulated signals have words there: a card's counters lie apart, wrap
// at 2^31 and start anywhere.
struct ferrogin_signals_of_context {
  struct Words {
    uint64_t* at;

    NCCL_DEVICE_INLINE uint64_t** operator&() {
      auto* first = reinterpret_cast<char*>(this) - offsetof(nccl_ofi_gin_gdaki_dev_handle, scratch_remote_addrs);
      // A context with emulated signals has no queue for NCCL.
      if (reinterpret_cast<nccl_ofi_gin_gdaki_dev_handle*>(first)->data.qp) {
        printf("ferrogin: this kernel casts a context to NCCL's GDAKI struct to poll its signals, which the card counts: set "
               "FERROGIN_SIGNALS=emulated on all ranks, or let the kernel call readSignal\n");
        FGIN_ON_MISUSE(FGIN_UNSUPPORTED);
      }
      return &at;
    }
  };

  char before[offsetof(nccl_ofi_gin_gdaki_dev_handle, scratch_remote_addrs)];
  struct {
    Words buffer;
  } signals_table;
  char after[sizeof(nccl_ofi_gin_gdaki_dev_handle) - offsetof(nccl_ofi_gin_gdaki_dev_handle, scratch_remote_addrs) - sizeof(Words)];
};
static_assert(sizeof(ferrogin_signals_of_context) == sizeof(nccl_ofi_gin_gdaki_dev_handle), "an array of handles");

#endif  // __CUDACC__

#endif  // FERROGIN_NCCL_GIN_BACKEND_CUH
