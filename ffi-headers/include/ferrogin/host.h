/* ferrogin: the host API for C. Opens a communicator without NCCL, and creates windows and contexts for kernels.
 *
 * Functions that return an int return FERROGIN_OK or another ferrogin_status; functions that return a pointer return NULL on
 * failure. ferrogin_error says why. Handles are numbers; using a wrong or closed one is an error. Any thread may call any
 * function. All ranks call collective functions in the same order; if one rank fails in one, it fails on all ranks. No call
 * waits longer than FERROGIN_TIMEOUT seconds for a rank that is stopped, or that hasn't connected. A rank that is only late to a
 * collective call is waited for.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef FERROGIN_HOST_H
#define FERROGIN_HOST_H

#include <ferrogin/gin.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers of ncclResult_t. */
typedef enum ferrogin_status {
    FERROGIN_OK = 0,
    FERROGIN_CUDA_ERROR = 1,       /* a CUDA driver call failed */
    FERROGIN_SYSTEM_ERROR = 2,     /* a system call or a libfabric call failed */
    FERROGIN_INTERNAL_ERROR = 3,   /* a bug in ferrogin */
    FERROGIN_INVALID_ARGUMENT = 4, /* an argument has an invalid value, or a handle is closed */
    FERROGIN_INVALID_USAGE = 5,    /* the machine, the settings or the order of calls don't allow the call */
    FERROGIN_REMOTE_ERROR = 6      /* another rank failed, exited, or didn't answer in time */
} ferrogin_status;

typedef struct ferrogin_comm ferrogin_comm;       /* the ranks of a job, connected */
typedef struct ferrogin_window ferrogin_window;   /* memory that all ranks' kernels can address */
typedef struct ferrogin_context ferrogin_context; /* queues that kernels post on */

/* Why the calling thread's last failed call of ferrogin_* or fgin_* failed, and what to do. Valid until the thread's next error; ""
 * if there was none. */
const char *ferrogin_error(void);

/* The release of the library, such as "0.1.0". */
const char *ferrogin_version(void);

/* Options of the open functions; NULL for the defaults. An options struct begins with its size, which tells the library which fields
 * the caller's header has: ferrogin_options options = {FERROGIN_OPTIONS}; */
typedef struct ferrogin_options {
    uint64_t size;
    /* The card, or group of cards below one PCI switch. 0: the one closest to this thread's current GPU; without a GPU, the first.
     * Other numbers count from 1, in the order of PCI addresses. */
    uint32_t card;
    uint32_t reserved;
} ferrogin_options;
#define FERROGIN_OPTIONS sizeof(ferrogin_options)

/* Gathers bytes from own of every rank into all, in rank order, as MPI_Allgather does. Returns 0, or another value on failure. */
typedef int (*ferrogin_allgather)(void *arg, const void *own, void *all, size_t bytes);

/* Collective: opens a communicator as rank of ranks, through the caller's allgather, which is called once. */
int ferrogin_open(uint32_t rank, uint32_t ranks, ferrogin_allgather allgather, void *arg, const ferrogin_options *options,
                  ferrogin_comm **out);

/* Collective: the ranks meet at rank 0's host:port. Without a port, address is the name of an abstract Unix socket, for ranks on one
 * host and of one user. Unless FERROGIN_SECRET is set, any process that can connect to host:port can take a rank's place. */
int ferrogin_open_at(const char *address, uint32_t rank, uint32_t ranks, const ferrogin_options *options,
                     ferrogin_comm **out);

/* Collective: takes rank, number of ranks and address from mpirun, torchrun, or FERROGIN_RANK, FERROGIN_NRANKS and
 * FERROGIN_BOOTSTRAP: see docs/host-api.md. */
int ferrogin_open_env(const ferrogin_options *options, ferrogin_comm **out);

int ferrogin_rank(const ferrogin_comm *comm, uint32_t *rank, uint32_t *ranks);

/* The LSA team: the ranks of this rank's node, whose kernels load from and store to each other's windows (NCCL's term: load/store
 * accessible). A node is a host, or a part of it that FERROGIN_NODE names. Returns this rank's number in the team, from 0 in the order of
 * ranks, and the number of ranks in it; the second function returns the rank of a number. */
int ferrogin_lsa_rank(const ferrogin_comm *comm, uint32_t *lsa_rank, uint32_t *lsa_ranks);
int ferrogin_lsa_world_rank(const ferrogin_comm *comm, uint32_t lsa_rank, uint32_t *rank);

/* Collective: returns when all ranks have called it. It doesn't order kernels' operations: flush before it. */
int ferrogin_barrier(ferrogin_comm *comm);

/* Closes the communicator, and its contexts and windows that are still open; contexts as by ferrogin_context_destroy. Peers may be using this
 * rank's windows until all ranks have passed a barrier. */
int ferrogin_close(ferrogin_comm *comm);

typedef enum ferrogin_memory {
    FERROGIN_MEMORY_HOST = 1,  /* host memory; with a GPU, allocated memory is pinned and kernels can access it */
    FERROGIN_MEMORY_DEVICE = 2 /* memory of the device that kernels run on (FERROGIN_DEVICE=cuda or cpu) */
} ferrogin_memory;

/* Collective: allocates and registers zeroed memory on each rank. */
int ferrogin_window_allocate(ferrogin_comm *comm, size_t bytes, uint32_t memory, ferrogin_window **out);

/* Collective: registers the caller's memory, which must stay allocated until the window is freed. */
int ferrogin_window_register(ferrogin_comm *comm, void *address, size_t bytes, uint32_t memory, ferrogin_window **out);

/* Collective: registers the caller's memory, which is at offset in the dma-buf fd. The caller may close fd afterwards. */
int ferrogin_window_register_dma_buf(ferrogin_comm *comm, void *address, size_t bytes, int fd, uint64_t offset,
                                     ferrogin_window **out);

/* The window, as kernels name it. */
fgin_window ferrogin_window_handle(const ferrogin_window *window);

/* The address of the first byte for kernels, and for the host; NULL for the host if it's GPU memory. */
void *ferrogin_window_address(const ferrogin_window *window);
void *ferrogin_window_host_address(const ferrogin_window *window);

/* The address at which kernels load from and store to the window of another rank of the LSA team; a host address, if kernels run on CPU
 * threads. Consecutive LSA ranks have equal distances. Fails unless all ranks of the team allocated the window, in memory of their
 * devices, and the GPUs have peer access to each other. The memory of another rank's window stays until this rank has freed its own. */
void *ferrogin_window_lsa_address(const ferrogin_window *window, uint32_t lsa_rank);

/* The bytes of the window on a rank, which that rank chose. */
int ferrogin_window_size(const ferrogin_window *window, uint32_t rank, size_t *bytes);

/* Deregisters the window, and frees the memory if ferrogin_window_allocate allocated it. While requests of the communicator's contexts
 * are incomplete, it fails and the window stays open. */
int ferrogin_window_free(ferrogin_window *window);

/* Options of ferrogin_context_create; NULL for the defaults: ferrogin_context_options options = {FERROGIN_CONTEXT_OPTIONS}; */
typedef struct ferrogin_context_options {
    uint64_t size;
    uint32_t contexts;      /* how many contexts, each with its own signals, counters and queues; 0 means 1 */
    uint32_t signals;       /* signals per context */
    uint32_t counters;      /* counters per context */
    uint32_t depth;         /* requests in flight per queue; 0 means 1024 */
    uint32_t traffic_class; /* InfiniBand traffic class, whose upper six bits are the DSCP; 0 means the default class */
    uint32_t timeout_ms;    /* how long a wait may take before it returns FGIN_TIMEOUT; 0 means FERROGIN_WAIT_TIMEOUT (60 s) */
    uint32_t on_peer_failure; /* FERROGIN_ABORT or FERROGIN_ISOLATE; 0 means FERROGIN_ON_PEER_FAILURE (abort) */
    uint32_t reserved;
} ferrogin_context_options;
#define FERROGIN_CONTEXT_OPTIONS sizeof(ferrogin_context_options)

/* For on_peer_failure, the same on all ranks. With FERROGIN_ABORT, a rank that ends, or a request that fails, ends the context. With
 * FERROGIN_ISOLATE, a lost rank ends only the requests to it. */
#define FERROGIN_ABORT 1u
#define FERROGIN_ISOLATE 2u

/* For timeout_ms: waits have no time limit. */
#define FERROGIN_NO_TIMEOUT UINT32_MAX

/* Collective. */
int ferrogin_context_create(ferrogin_comm *comm, const ferrogin_context_options *options, ferrogin_context **out);

/* The handle for kernels: the first argument of fgin_open and of ferrogin::Gin. */
void *ferrogin_context_handle(const ferrogin_context *context);

/* Opens context number id for CPU threads, as fgin_open does with the handle; fails if kernels run on a GPU. Valid until the context
 * is destroyed. */
int ferrogin_context_device(const ferrogin_context *context, uint32_t id, const fgin_context **out);

/* Returns an error once a request of the context has failed, otherwise FERROGIN_OK. The failure is printed on standard error once. */
int ferrogin_context_check(const ferrogin_context *context);

/* With FERROGIN_ISOLATE: the lost ranks, in order. Writes up to max of them, and their number to n. A rank that a wait's FGIN_PEER_LOST is
 * about is among them. */
int ferrogin_lost_ranks(const ferrogin_context *context, uint32_t *ranks, uint32_t max, uint32_t *n);

/* With FERROGIN_ISOLATE: acknowledges the loss of these n ranks. Waits return FGIN_PEER_LOST until all losses are acknowledged; posts to a
 * lost rank always do. Fails, and acknowledges none, if one of the ranks isn't lost. */
int ferrogin_acknowledge_lost(ferrogin_context *context, const uint32_t *ranks, uint32_t n);

/* Waits until what kernels have posted on the contexts is delivered, then destroys them. Kernels must no longer use the contexts. A failure to
 * deliver is printed on standard error. */
int ferrogin_context_destroy(ferrogin_context *context);

#ifdef __cplusplus
}
#endif

#endif /* FERROGIN_HOST_H */
