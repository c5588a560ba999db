/* ferrogin: the GIN device API for C and for everything that can call C.
 *
 * Every function returns FGIN_OK or another fgin_status. Each wait also checks the abort flag, the endpoint's error counter and the
 * context's time limit: 60 s in contexts of the host API, none in those of NCCL, whose kernels have limits of their own. Any thread
 * may call any function.
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
    FGIN_UNSUPPORTED = 2,      /* this handle or card cannot do it, or the handle is of another version */
    FGIN_ABORTED = 3,          /* the host raised the abort flag */
    FGIN_TIMEOUT = 4,          /* the time limit passed */
    FGIN_CARD_ERROR = 5,       /* a work request completed in error; the host's log names it */
    FGIN_POISONED = 6          /* an earlier operation failed after its reservation: destroy the context */
} fgin_status;

/* The name of a status, such as "FGIN_TIMEOUT", in host programs. ferrogin_error() of ferrogin/host.h explains the last failure of this thread. */
const char *fgin_status_name(int status);

/* One GIN context. */
typedef struct fgin_context fgin_context;

/* A registered window: what regMrSym gave as ginHandle (ncclGinWindow_t). */
typedef void *fgin_window;

/* The signal and the counter of an operation, combined with |, or FGIN_NONE. Ids are at most 65533; an operation refuses ids
 * that are out of range. n is below 2^32; the signal of 0 is none. Where signals are emulated (FERROGIN_SIGNALS=emulated), the call waits
 * for its own bytes if n is above 4096. */
typedef uint64_t fgin_action;
#define FGIN_NONE ((fgin_action)0)
#define FGIN_ID_(id) ((uint64_t)(id) < 65534u ? (fgin_action)(id) + 1 : (fgin_action)65535)
#define FGIN_SIGNAL_ADD(id, n) ((fgin_action)(uint32_t)(n) << 32 | FGIN_ID_(id))
#define FGIN_SIGNAL_INC(id) FGIN_SIGNAL_ADD(id, 1)
#define FGIN_COUNTER(id) (FGIN_ID_(id) << 16)

/* Flags: FGIN_AGGREGATE or not, and the threads that may use the same context while the call lasts: all threads (GPU), those
 * of one CTA, or no other thread (THREAD), which is cheaper. CTA costs what GPU does. Calls in different modes may follow one another.
 * FGIN_AGGREGATE leaves the doorbell to the next operation without it on the same queue, or to a flush. Every counter has a
 * queue, every signal that the card counts has one for operations without a counter, values have one, and other operations have one. */
#define FGIN_DEFAULT 0u
#define FGIN_AGGREGATE 2u
#define FGIN_SHARING_GPU 0u
#define FGIN_SHARING_CTA 0x100u
#define FGIN_SHARING_THREAD 0x200u

/* The signal shows after all earlier operations of this context to that peer have arrived, those of other threads included: of all lanes
 * of a warp after __syncwarp. Without it the signal shows after its own bytes. FGIN_UNSUPPORTED where the card counts signals
 * (FERROGIN_SIGNALS=card). Without a signal, and for fgin_get, it has no meaning. */
#define FGIN_STRONG 0x400u

/* The context context_id of the array that createContext returned in ncclNetDeviceHandle->handle. */
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

/* Carries out action on peer, without bytes. */
FGIN_API int fgin_signal(const fgin_context *ctx, uint32_t peer, fgin_action action, uint32_t flags);

/* Signals in memory of a window, where signals are emulated (FERROGIN_SIGNALS=emulated); otherwise FGIN_UNSUPPORTED. They add amount,
 * modulo 2^64 and in one step, to the 8 bytes of word at word_off on peer, a multiple of 8. An amount of 0 is no signal. The owner reads
 * them by acquire loads and resets them by stores. counter is FGIN_COUNTER(id) or FGIN_NONE. A call whose signal has to wait for
 * earlier operations, as one with FGIN_STRONG or with bytes, returns after their completion. */
FGIN_API int fgin_put_signal_at(const fgin_context *ctx, uint32_t peer, fgin_window dst, uint64_t dst_off,
                                fgin_window src, uint64_t src_off, uint64_t bytes, fgin_window word, uint64_t word_off,
                                uint64_t amount, fgin_action counter, uint32_t flags);
FGIN_API int fgin_put_value_signal_at(const fgin_context *ctx, uint32_t peer, fgin_window dst, uint64_t dst_off,
                                      uint64_t value, uint32_t bytes, fgin_window word, uint64_t word_off,
                                      uint64_t amount, uint32_t flags);
FGIN_API int fgin_signal_at(const fgin_context *ctx, uint32_t peer, fgin_window word, uint64_t word_off,
                            uint64_t amount, uint32_t flags);

/* fgin_put, fgin_put_value and fgin_signal by several lanes of a warp, each with its own arguments and its own result. All lanes of the mask lanes make the call
 * together. The operations that go to one queue share a reservation, a fence and a doorbell, or a few where the card's batch is
 * shorter; one with an emulated signal is posted alone. Invalid arguments fail their lane alone. In the mode THREAD, no thread but
 * these lanes uses the context. On the CPU a warp has one thread, and the mask is ignored. */
FGIN_API int fgin_warp_put(const fgin_context *ctx, uint32_t lanes, uint32_t peer, fgin_window dst, uint64_t dst_off,
                           fgin_window src, uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags);
FGIN_API int fgin_warp_put_value(const fgin_context *ctx, uint32_t lanes, uint32_t peer, fgin_window dst,
                                 uint64_t dst_off, uint64_t value, uint32_t bytes, fgin_action action, uint32_t flags);
FGIN_API int fgin_warp_signal(const fgin_context *ctx, uint32_t lanes, uint32_t peer, fgin_action action,
                              uint32_t flags);

/* Rings the doorbells that earlier operations with FGIN_AGGREGATE left, on all queues, and waits for nothing. */
FGIN_API int fgin_ring(const fgin_context *ctx);

/* Waits until every earlier post on this context has completed. */
FGIN_API int fgin_flush(const fgin_context *ctx);
/* The part of a flush that thread rank of a group of size threads does; the flush has ended when all have done their parts. */
FGIN_API int fgin_flush_part(const fgin_context *ctx, uint32_t rank, uint32_t size);

/* A flush in two steps. fgin_flush_async rings aggregated operations and writes to *out which posts have to complete. The wait
 * ends when these have, whatever is posted meanwhile. A request needs no release, and any thread may wait for it. */
typedef struct fgin_request {
    uint32_t words[32];
} fgin_request;
FGIN_API int fgin_flush_async(const fgin_context *ctx, fgin_request *out);
FGIN_API int fgin_wait_request(const fgin_context *ctx, const fgin_request *request);
/* *done becomes 1 where fgin_wait_request would return at once, otherwise 0. */
FGIN_API int fgin_test_request(const fgin_context *ctx, const fgin_request *request, int *done);

/* Later waits of this context fail after ns nanoseconds with FGIN_TIMEOUT; 0 is no limit. */
FGIN_API int fgin_set_timeout(const fgin_context *ctx, uint64_t ns);

/* Signals: the count since the last reset, modulo 2^31; least is compared modulo 2^31. Emulated signals are the sum of the amounts, in
 * 64 bits. A reset is one store of 0. */
FGIN_API int fgin_read_signal(const fgin_context *ctx, uint32_t id, uint64_t *out);
FGIN_API int fgin_wait_signal(const fgin_context *ctx, uint32_t id, uint64_t least);
FGIN_API int fgin_reset_signal(const fgin_context *ctx, uint32_t id);

/* Counters: the completed operations that named it since the last reset, modulo 2^31. */
FGIN_API int fgin_read_counter(const fgin_context *ctx, uint32_t id, uint64_t *out);
FGIN_API int fgin_wait_counter(const fgin_context *ctx, uint32_t id, uint64_t least);
FGIN_API int fgin_reset_counter(const fgin_context *ctx, uint32_t id);

#ifdef __cplusplus
}
#endif

#endif /* FERROGIN_GIN_H */
