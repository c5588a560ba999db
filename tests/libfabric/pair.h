// Two processes with one endpoint each, for all tests.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Fails the test, and prints where and with which values.
#define CHECK(condition, ...)                                           \
  do {                                                                  \
    if (!(condition)) {                                                 \
      fprintf(stderr, "rank %d, %s:%d: %s: ", pair_rank, __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                     \
      fprintf(stderr, "\n");                                            \
      exit(1);                                                          \
    }                                                                   \
  } while (0)
#define OK(call)                                                        \
  do {                                                                  \
    long long rc_ = (call);                                             \
    CHECK(rc_ >= 0, "%s gave %lld (%s)", #call, rc_, fi_strerror((int)-rc_)); \
  } while (0)
// For calls that may return -FI_EAGAIN.
#define POST(pair, call)                                                \
  do {                                                                  \
    long long rc_;                                                      \
    while ((rc_ = (call)) == -FI_EAGAIN) pair_progress(pair);           \
    CHECK(rc_ == 0, "%s gave %lld (%s)", #call, rc_, fi_strerror((int)-rc_)); \
  } while (0)

// What a test requires.
struct wish {
  const char *fabric;
  uint64_t caps;
  enum fi_cq_format format;
  enum fi_wait_obj wait;
  // FI_SEND, FI_REMOTE_WRITE, ...: a counter for each.
  uint64_t counters;
  // More flags for the send queue; FI_RECV: it takes receive completions too.
  uint64_t cq_flags;
  // Inline bytes per operation.
  size_t inject;
};

#define MAX_COUNTERS 6

struct pair {
  struct fi_info *info;
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_av *av;
  struct fid_ep *ep;
  struct fid_cq *tx, *rx;
  struct fid_cntr *counters[MAX_COUNTERS];
  fi_addr_t peer, self;
};

extern int pair_rank;

// Opens an endpoint, and exchanges addresses with the other process.
void pair_open(struct pair *pair, const struct wish *wish);
void pair_close(struct pair *pair);
// Closes the endpoint after the other process has exited.
void pair_leave(struct pair *pair);
// A barrier between the two processes, and an exchange of `len` bytes.
void pair_barrier(void);
void pair_swap(const void *mine, void *theirs, size_t len);
// The counter for one event.
struct fid_cntr *pair_counter(struct pair *pair, uint64_t event);
// Drives the provider's progress.
void pair_progress(struct pair *pair);
// Waits for one completion without an error.
struct fi_cq_tagged_entry pair_wait(struct fid_cq *cq, fi_addr_t *source);
// Waits for one completion with an error.
struct fi_cq_err_entry pair_wait_error(struct fid_cq *cq);
// Waits until a counter has at least this value.
void pair_wait_count(struct pair *pair, struct fid_cntr *counter, uint64_t value);
// Registers memory for all operations.
struct fid_mr *pair_register(struct pair *pair, void *buf, size_t len, uint64_t access);
// Bytes that tell messages apart.
void pair_fill(void *buf, size_t len, uint32_t seed);
bool pair_matches(const void *buf, size_t len, uint32_t seed);

// The tests, by file.
void test_messages(void);
void test_tagged(void);
void test_direct_messages(void);
void test_order(void);
void test_rma(void);
void test_direct_rma(void);
void test_wide_requests(void);
void test_rma_errors(void);
void test_counters(void);
void test_direct_counters(void);
void test_sread(void);
void test_threshold(void);
void test_wait_fd(void);
void test_direct_wait_fd(void);
void test_multi_recv(void);
void test_cancel(void);
void test_cancel_multi_recv(void);
void test_shared_queue(void);
void test_dead_peer(void);
void test_hints(void);
void test_addresses(void);
void test_bad_calls(void);
void test_events(void);
