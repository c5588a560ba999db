/* ferrogin: the host API for C. It opens a communicator without NCCL, and gives windows and contexts to kernels.
 *
 * Functions that return an int return FERROGIN_OK or another ferrogin_status; functions that return a pointer return NULL if
 * they fail. ferrogin_error has the text. Handles are numbers: a wrong or closed one is an error. Any thread may call any
 * function. Collective functions are called by all ranks in the same order; a rank that fails in one fails it on all ranks.
 * No call waits longer for a rank than the seconds of FERROGIN_TIMEOUT, and the time in which the failure of that rank
 * spreads.
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
    FERROGIN_INVALID_USAGE = 5,    /* the machine, the settings or the order of calls do not allow the call */
    FERROGIN_REMOTE_ERROR = 6      /* another rank failed, ended, or did not answer in time */
} ferrogin_status;

typedef struct ferrogin_comm ferrogin_comm;       /* the ranks of a job, connected */
typedef struct ferrogin_window ferrogin_window;   /* memory that the kernels of all ranks can name */
typedef struct ferrogin_context ferrogin_context; /* queues that kernels post on */

/* Why the calling thread's last failed call, of ferrogin_* or fgin_*, failed, and what to do. Valid until its next error; "" without one. */
const char *ferrogin_error(void);

/* The release of the library, such as "0.1.0". */
const char *ferrogin_version(void);

/* Options of open; NULL is the default. A struct begins with its size, by which the library knows the fields of the caller's
 * header: ferrogin_options options = {FERROGIN_OPTIONS}; */
typedef struct ferrogin_options {
    uint64_t size;
    /* The card, or the group of cards below one PCI switch. 0: the nearest to the GPU that is current on this thread, or the
     * first without a GPU. Any other number counts them from 1, in the order of their PCI addresses. */
    uint32_t card;
    uint32_t reserved;
} ferrogin_options;
#define FERROGIN_OPTIONS sizeof(ferrogin_options)

/* Copies bytes at own of every rank to all, by rank, as MPI_Allgather does. Returns 0, or another value if it failed. */
typedef int (*ferrogin_allgather)(void *arg, const void *own, void *all, size_t bytes);

/* Collective: opens a communicator as rank of ranks, with the caller's exchange, which is called once. */
int ferrogin_open(uint32_t rank, uint32_t ranks, ferrogin_allgather allgather, void *arg, const ferrogin_options *options,
                  ferrogin_comm **out);

/* Collective: the ranks meet at host:port of rank 0. A text without a port is the name of an abstract Unix socket, for ranks
 * of one host and one user. Any process that can connect to host:port can take the place of a rank. */
int ferrogin_open_at(const char *address, uint32_t rank, uint32_t ranks, const ferrogin_options *options,
                     ferrogin_comm **out);

/* Collective: the rank, the number of ranks and the address come from mpirun, torchrun, or FERROGIN_RANK, FERROGIN_NRANKS and
 * FERROGIN_BOOTSTRAP: see docs/host-api.md. */
int ferrogin_open_env(const ferrogin_options *options, ferrogin_comm **out);

int ferrogin_rank(const ferrogin_comm *comm, uint32_t *rank, uint32_t *ranks);

/* Collective: returns when all ranks have called it. It orders no operation of kernels: flush them before. */
int ferrogin_barrier(ferrogin_comm *comm);

/* Closes the contexts and windows that are still open, and the communicator. Peers may use this rank's windows until they
 * return from a barrier. */
int ferrogin_close(ferrogin_comm *comm);

typedef enum ferrogin_memory {
    FERROGIN_MEMORY_HOST = 1,  /* host memory; allocated beside a GPU it is pinned, and kernels can access it */
    FERROGIN_MEMORY_DEVICE = 2 /* memory of the device that kernels run on (FERROGIN_DEVICE=cuda or cpu) */
} ferrogin_memory;

/* Collective: allocates zeroed memory on each rank, and registers it. */
int ferrogin_window_allocate(ferrogin_comm *comm, size_t bytes, uint32_t memory, ferrogin_window **out);

/* Collective: registers the caller's memory, which stays allocated until the window is freed. */
int ferrogin_window_register(ferrogin_comm *comm, void *address, size_t bytes, uint32_t memory, ferrogin_window **out);

/* Collective: registers the caller's memory, which is at offset in the dma-buf fd. The caller may close fd afterwards. */
int ferrogin_window_register_dma_buf(ferrogin_comm *comm, void *address, size_t bytes, int fd, uint64_t offset,
                                     ferrogin_window **out);

/* The window for kernels. */
fgin_window ferrogin_window_handle(const ferrogin_window *window);

/* The address of the first byte for kernels, and for the host; the host has none for GPU memory. */
void *ferrogin_window_address(const ferrogin_window *window);
void *ferrogin_window_host_address(const ferrogin_window *window);

/* Deregisters the window, and frees memory that ferrogin_window_allocate allocated. It fails, and the window stays open,
 * while requests of the communicator's contexts are not complete. */
int ferrogin_window_free(ferrogin_window *window);

/* Options of ferrogin_context_create; NULL is the default: ferrogin_context_options options = {FERROGIN_CONTEXT_OPTIONS}; */
typedef struct ferrogin_context_options {
    uint64_t size;
    uint32_t contexts;      /* contexts, each with its own signals, counters and queues; 0 is 1 */
    uint32_t signals;       /* signals of each context */
    uint32_t counters;      /* counters of each context */
    uint32_t depth;         /* requests in flight on each queue; 0 is 1024 */
    uint32_t traffic_class; /* InfiniBand traffic class, whose upper six bits are the DSCP; 0 is the default class */
    uint32_t timeout_ms;    /* the limit of one wait, after which it returns FGIN_TIMEOUT; 0 is FERROGIN_WAIT_TIMEOUT (60 s) */
} ferrogin_context_options;
#define FERROGIN_CONTEXT_OPTIONS sizeof(ferrogin_context_options)

/* For timeout_ms: waits have no limit. */
#define FERROGIN_NO_TIMEOUT UINT32_MAX

/* Collective. */
int ferrogin_context_create(ferrogin_comm *comm, const ferrogin_context_options *options, ferrogin_context **out);

/* The handle for kernels: the first argument of fgin_open and of ferrogin::Gin. */
void *ferrogin_context_handle(const ferrogin_context *context);

/* Context number id for CPU threads: fgin_open with the handle, and an error if kernels run on a GPU. Valid until the context is
 * destroyed. */
int ferrogin_context_device(const ferrogin_context *context, uint32_t id, const fgin_context **out);

/* FERROGIN_OK, or an error after a request of the context has failed. The failure is written to standard error once. */
int ferrogin_context_check(const ferrogin_context *context);

/* No kernel may use the contexts any more. */
int ferrogin_context_destroy(ferrogin_context *context);

#ifdef __cplusplus
}
#endif

#endif /* FERROGIN_HOST_H */
