/* ferrogin: the GIN device API for C, and for any language that can call C.
 *
 * Every function returns FGIN_OK or another fgin_status. Waits also check the abort flag, the endpoint's error counter and the
 * context's time limit: 60 s in contexts of the host API, none under NCCL, whose kernels have limits of their own. Any thread may
 * call any function.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef FERROGIN_GIN_H
#define FERROGIN_GIN_H

#include <stdint.h>

/* In CUDA C++ the functions come from libferrogin_device.so on the CPU and from the relocatable objects on the GPU. */
#ifdef __CUDACC__
#define FGIN_API __host__ __device__
#else
#define FGIN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fgin_status {
    FGIN_OK = 0,
    FGIN_INVALID_ARGUMENT = 1, /* peer, signal, counter, size or window out of range */
    FGIN_UNSUPPORTED = 2,      /* this handle or card can't do it, or the handle is from another version */
    FGIN_ABORTED = 3,          /* the host raised the abort flag */
    FGIN_TIMEOUT = 4,          /* the time limit passed */
    FGIN_CARD_ERROR = 5,       /* a work request completed in error; the host's log names it */
    FGIN_POISONED = 6,         /* an earlier operation failed after its reservation: destroy the context */
    FGIN_PEER_LOST = 7         /* with FERROGIN_ISOLATE: the peer is lost; or a rank is, and that isn't acknowledged yet */
} fgin_status;

/* Host programs only: the name of a status, such as "FGIN_TIMEOUT". ferrogin_error() in ferrogin/host.h explains this thread's last
 * failure. */
const char *fgin_status_name(int status);

/* One GIN context. */
typedef struct fgin_context fgin_context;

/* A registered window: the ginHandle that regMrSym returned (ncclGinWindow_t). */
typedef void *fgin_window;

/* An operation's signal and counter, combined with |, or FGIN_NONE. Ids go up to 65533; operations refuse ids that are out of range.
 * n is below 2^32; with 0, no signal is raised. With emulated signals (FERROGIN_SIGNALS=emulated), a call with n above 4096 waits for
 * its own bytes. */
typedef uint64_t fgin_action;
#define FGIN_NONE ((fgin_action)0)
#define FGIN_ID_(id) ((uint64_t)(id) < 65534u ? (fgin_action)(id) + 1 : (fgin_action)65535)
#define FGIN_SIGNAL_ADD(id, n) ((fgin_action)(uint32_t)(n) << 32 | FGIN_ID_(id))
#define FGIN_SIGNAL_INC(id) FGIN_SIGNAL_ADD(id, 1)
#define FGIN_COUNTER(id) (FGIN_ID_(id) << 16)

/* Flags. FGIN_AGGREGATE leaves the doorbell to the next operation without it on the same queue, or to a flush. Each counter has a
 * queue; each signal that the card counts has one, for operations without a counter; values have one; everything else has one.
 * FGIN_SHARING_* says which threads may use the context during the call: all (GPU), those of one CTA, or only the caller (THREAD).
 * CTA costs as much as GPU; THREAD takes no atomic operation where they take three. Calls in different modes may follow one another. */
#define FGIN_DEFAULT 0u
#define FGIN_AGGREGATE 2u
#define FGIN_SHARING_GPU 0u
#define FGIN_SHARING_CTA 0x100u
#define FGIN_SHARING_THREAD 0x200u

/* The signal becomes visible after all earlier operations of this context to that peer, including other threads' (all lanes of a warp
 * after __syncwarp). Without this flag, it becomes visible after its own bytes. FGIN_UNSUPPORTED where the card counts signals
 * (FERROGIN_SIGNALS=card). Ignored without a signal, and by fgin_get. */
#define FGIN_STRONG 0x400u

/* Opens context number context_id. handle is ncclNetDeviceHandle->handle, or ferrogin_context_handle() of the host API. */
FGIN_API int fgin_open(void *handle, uint32_t context_id, const fgin_context **out);

/* Writes bytes from src at src_off on this rank to dst at dst_off on peer. */
FGIN_API int fgin_put(const fgin_context *ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                      uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags);

/* Writes the low bytes (1, 2, 4 or 8) of value to dst at dst_off on peer; action may not name a counter. */
FGIN_API int fgin_put_value(const fgin_context *ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                            uint32_t bytes, fgin_action action, uint32_t flags);

/* Reads bytes from remote at remote_off on peer to local at local_off; they have arrived after fgin_flush. */
FGIN_API int fgin_get(const fgin_context *ctx, uint32_t peer, fgin_window remote, uint64_t remote_off,
                      fgin_window local, uint64_t local_off, uint64_t bytes, uint32_t flags);

/* Raises the signal of action on peer, without bytes. */
FGIN_API int fgin_signal(const fgin_context *ctx, uint32_t peer, fgin_action action, uint32_t flags);

/* Signals in a window's memory, with emulated signals (FERROGIN_SIGNALS=emulated); otherwise FGIN_UNSUPPORTED. Each adds amount, modulo
 * 2^64 and in a single step, to the 8 bytes of word at word_off on peer; word_off is a multiple of 8. With an amount of 0, no signal
 * is raised. The owner reads the word with acquire loads and resets it with stores. counter is FGIN_COUNTER(id) or FGIN_NONE. If the
 * signal has to wait for earlier operations (FGIN_STRONG, or a call with bytes), the call returns after they have completed. */
FGIN_API int fgin_put_signal_at(const fgin_context *ctx, uint32_t peer, fgin_window dst, uint64_t dst_off,
                                fgin_window src, uint64_t src_off, uint64_t bytes, fgin_window word, uint64_t word_off,
                                uint64_t amount, fgin_action counter, uint32_t flags);
FGIN_API int fgin_put_value_signal_at(const fgin_context *ctx, uint32_t peer, fgin_window dst, uint64_t dst_off,
                                      uint64_t value, uint32_t bytes, fgin_window word, uint64_t word_off,
                                      uint64_t amount, uint32_t flags);
FGIN_API int fgin_signal_at(const fgin_context *ctx, uint32_t peer, fgin_window word, uint64_t word_off,
                            uint64_t amount, uint32_t flags);

/* fgin_put, fgin_put_value and fgin_signal by several lanes of a warp, each with its own arguments and result. All lanes of the mask
 * make the call together. Operations on the same queue share a reservation, a fence and a doorbell, or a few if the card's batch is
 * shorter; those with an emulated signal do if the hardware runs their lanes together. Invalid arguments fail only their lane. In the
 * mode THREAD, only these lanes may use the context. On the CPU a warp has one thread, and the mask is ignored. */
FGIN_API int fgin_warp_put(const fgin_context *ctx, uint32_t lanes, uint32_t peer, fgin_window dst, uint64_t dst_off,
                           fgin_window src, uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags);
FGIN_API int fgin_warp_put_value(const fgin_context *ctx, uint32_t lanes, uint32_t peer, fgin_window dst,
                                 uint64_t dst_off, uint64_t value, uint32_t bytes, fgin_action action, uint32_t flags);
FGIN_API int fgin_warp_signal(const fgin_context *ctx, uint32_t lanes, uint32_t peer, fgin_action action,
                              uint32_t flags);

/* Rings the doorbells that earlier operations with FGIN_AGGREGATE left, on all queues. Doesn't wait. */
FGIN_API int fgin_ring(const fgin_context *ctx);

/* Waits until every earlier post on this context has completed. */
FGIN_API int fgin_flush(const fgin_context *ctx);
/* Waits like fgin_flush, but doesn't report lost ranks (FERROGIN_ISOLATE): every earlier post has completed, or failed because of one. */
FGIN_API int fgin_settle(const fgin_context *ctx);
/* One thread's part of a flush: rank is the thread's number in a group of size threads. The flush is done when all parts are. */
FGIN_API int fgin_flush_part(const fgin_context *ctx, uint32_t rank, uint32_t size);

/* A flush in two steps. fgin_flush_async rings the doorbell for aggregated operations and records in *out which posts have to
 * complete. The wait returns once they have, whatever is posted meanwhile. A request needs no release; any thread may wait for it. */
typedef struct fgin_request {
    uint32_t words[32];
} fgin_request;
FGIN_API int fgin_flush_async(const fgin_context *ctx, fgin_request *out);
FGIN_API int fgin_wait_request(const fgin_context *ctx, const fgin_request *request);
/* Sets *done to 1 if fgin_wait_request would return at once, otherwise to 0. */
FGIN_API int fgin_test_request(const fgin_context *ctx, const fgin_request *request, int *done);

/* Later waits on this context return FGIN_TIMEOUT after ns nanoseconds; 0 means no limit. */
FGIN_API int fgin_set_timeout(const fgin_context *ctx, uint64_t ns);

/* Signals: the count since the last reset, modulo 2^31; least is compared modulo 2^31. Emulated signals are the sum of the amounts,
 * in 64 bits. A reset is a single store of 0. */
FGIN_API int fgin_read_signal(const fgin_context *ctx, uint32_t id, uint64_t *out);
FGIN_API int fgin_wait_signal(const fgin_context *ctx, uint32_t id, uint64_t least);
FGIN_API int fgin_reset_signal(const fgin_context *ctx, uint32_t id);

/* Counters: how many operations that name the counter have completed since the last reset, modulo 2^31. */
FGIN_API int fgin_read_counter(const fgin_context *ctx, uint32_t id, uint64_t *out);
FGIN_API int fgin_wait_counter(const fgin_context *ctx, uint32_t id, uint64_t least);
FGIN_API int fgin_reset_counter(const fgin_context *ctx, uint32_t id);

#ifdef __cplusplus
}
#endif

#endif /* FERROGIN_GIN_H */
