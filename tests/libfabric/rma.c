// Remote memory, and counters.
#include "pair.h"

enum { LEN = 1 << 20 };
static char local[LEN], target[LEN];

struct window {
  uint64_t addr, key;
};

static struct window swap_windows(struct fid_mr *mr) {
  struct window mine = {(uint64_t)(uintptr_t)target, fi_mr_key(mr)}, theirs;
  pair_swap(&mine, &theirs, sizeof mine);
  return theirs;
}

#define ALL (FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)

static void wait_bytes(struct pair *pair, size_t len, uint32_t seed) {
  while (!pair_matches(target, len, seed)) pair_progress(pair);
}

static void write_and_read(const char *fabric) {
  struct pair pair;
  struct wish wish = {fabric, FI_MSG | FI_RMA, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 0};
  bool direct = !strcmp(fabric, "efa-direct");
  pair_open(&pair, &wish);
  struct fid_mr *mine = pair_register(&pair, target, LEN, ALL);
  struct fid_mr *source = pair_register(&pair, local, LEN, ALL);
  // The protocol registers memory itself; the card needs it registered.
  void *desc = direct ? fi_mr_desc(source) : NULL;
  struct window there = swap_windows(mine);
  char context;
  const size_t lengths[] = {1, 8, 5000, 70000, LEN};
  for (int i = 0; i < 5; i++) {
    size_t len = lengths[i];
    if (pair_rank == 0) {
      pair_fill(local, len, i);
      POST(&pair, fi_write(pair.ep, local, len, desc, pair.peer, there.addr, there.key, &context));
      struct fi_cq_tagged_entry entry = pair_wait(pair.tx, NULL);
      CHECK(entry.op_context == &context && entry.flags & FI_WRITE && entry.flags & FI_RMA, "the write's entry");
      memset(local, 0, len);
      POST(&pair, fi_read(pair.ep, local, len, desc, pair.peer, there.addr, there.key, &context));
      entry = pair_wait(pair.tx, NULL);
      CHECK(entry.flags & FI_READ && pair_matches(local, len, i), "%zu bytes read back", len);
    } else {
      wait_bytes(&pair, len, i);
    }
    pair_barrier();
  }
  if (pair_rank == 0) {
    pair_fill(local, LEN, 50);
    POST(&pair, fi_writedata(pair.ep, local, 100000, desc, 0xcafe, pair.peer, there.addr, there.key, &context));
    pair_wait(pair.tx, NULL);
    if (!direct) {
      POST(&pair, fi_inject_writedata(pair.ep, local, 8, 0xbeef, pair.peer, there.addr, there.key));
      struct iovec parts[2] = {{local, 1000}, {local + 1000, 64000}};
      struct fi_rma_iov where = {there.addr, 65000, there.key};
      struct fi_msg_rma msg = {parts, NULL, 2, pair.peer, &where, 1, &context, 0xf00d};
      POST(&pair, fi_writemsg(pair.ep, &msg, FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE));
      pair_wait(pair.tx, NULL);
    } else {
      CHECK(fi_inject_write(pair.ep, local, 8, pair.peer, there.addr, there.key) == -FI_EINVAL,
            "writes of 64-byte requests carry nothing inline");
    }
  } else {
    const uint64_t data[] = {0xcafe, 0xbeef, 0xf00d};
    for (int i = 0; i < (direct ? 1 : 3); i++) {
      struct fi_cq_tagged_entry entry = pair_wait(pair.rx, NULL);
      CHECK(entry.flags & FI_REMOTE_CQ_DATA && entry.flags & FI_REMOTE_WRITE, "flags %#lx", (long)entry.flags);
      CHECK(entry.data == data[i], "data %#lx", (long)entry.data);
      CHECK(i || entry.len == 100000, "%zu bytes", entry.len);
    }
    CHECK(pair_matches(target, 100000, 50), "what came with the data");
  }
  pair_barrier();
  OK(fi_close(&mine->fid));
  OK(fi_close(&source->fid));
  pair_close(&pair);
}

void test_rma(void) { write_and_read("efa"); }
void test_direct_rma(void) { write_and_read("efa-direct"); }

// An application that asks for more inline bytes than 64-byte requests hold gets them in writes too.
void test_wide_requests(void) {
  struct pair pair;
  struct wish wish = {"efa-direct", FI_MSG | FI_RMA, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 80};
  pair_open(&pair, &wish);
  CHECK(pair.info->tx_attr->inject_size == 80 && pair.info->tx_attr->size <= 2048, "wide requests, half as many");
  struct fid_mr *mine = pair_register(&pair, target, LEN, ALL | FI_RECV);
  struct window there = swap_windows(mine);
  if (pair_rank == 0) {
    pair_fill(local, 80, 7);
    POST(&pair, fi_inject_write(pair.ep, local, 80, pair.peer, there.addr, there.key));
    memset(local, 0, 80);
    pair_barrier();
    pair_fill(local, 80, 8);
    POST(&pair, fi_inject_writedata(pair.ep, local, 80, 21, pair.peer, there.addr, there.key));
    CHECK(fi_inject_write(pair.ep, local, 81, pair.peer, there.addr, there.key) == -FI_EINVAL, "too much");
    POST(&pair, fi_inject(pair.ep, local, 80, pair.peer));
  } else {
    wait_bytes(&pair, 80, 7);
    pair_barrier();
    struct fi_cq_tagged_entry entry = pair_wait(pair.rx, NULL);
    CHECK(entry.data == 21 && entry.len == 80 && pair_matches(target, 80, 8), "inline with data");
    POST(&pair, fi_recv(pair.ep, target + 4096, 80, fi_mr_desc(mine), FI_ADDR_UNSPEC, NULL));
    pair_wait(pair.rx, NULL);
    CHECK(pair_matches(target + 4096, 80, 8), "inline send");
  }
  pair_barrier();
  OK(fi_close(&mine->fid));
  pair_close(&pair);
}

void test_rma_errors(void) {
  const char *fabrics[] = {"efa", "efa-direct"};
  for (int i = 0; i < 2; i++) {
    struct pair pair;
    struct wish wish = {fabrics[i], FI_MSG | FI_RMA, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, FI_WRITE | FI_READ, 0, 0};
    pair_open(&pair, &wish);
    struct fid_mr *source = pair_register(&pair, local, LEN, ALL);
    struct fid_mr *read_only = pair_register(&pair, target, 4096, FI_REMOTE_READ);
    struct window there = swap_windows(read_only);
    void *desc = fi_mr_desc(source);
    if (pair_rank == 0) {
      char context;
      const struct {
        bool read;
        uint64_t addr, key;
        const char *what;
      } wrong[] = {{false, there.addr, there.key ^ 0x10000, "another key"},
                   {false, there.addr, there.key, "no right to write"},
                   {true, there.addr + 4096 - 4, there.key, "beyond the end"}};
      for (int j = 0; j < 3; j++) {
        __typeof__(wrong[j]) at = wrong[j];
        if (at.read)
          POST(&pair, fi_read(pair.ep, local, 8, desc, pair.peer, at.addr, at.key, &context));
        else
          POST(&pair, fi_write(pair.ep, local, 8, desc, pair.peer, at.addr, at.key, &context));
        struct fi_cq_err_entry error = pair_wait_error(pair.tx);
        char text[100];
        const char *why = fi_cq_strerror(pair.tx, error.prov_errno, error.err_data, text, sizeof text);
        CHECK(error.op_context == &context && error.prov_errno == 7 && strlen(why) > 5, "%s: status %d, %s",
              at.what, error.prov_errno, why);
        const char *again = fi_cq_strerror(pair.tx, error.prov_errno, error.err_data, NULL, 0);
        CHECK(!strcmp(why, again), "without room for the text: %s", again);
      }
      POST(&pair, fi_read(pair.ep, local, 8, desc, pair.peer, there.addr, there.key, &context));
      pair_wait(pair.tx, NULL);
      // Requests that the card refuses are counted too.
      void *nothing = (void *)0x123456;
      POST(&pair, fi_write(pair.ep, local, 8, nothing, pair.peer, there.addr, there.key, &context));
      struct fi_cq_err_entry error = pair_wait_error(pair.tx);
      CHECK(error.op_context == &context && error.prov_errno == 5, "a local key: status %d", error.prov_errno);
      CHECK(fi_cntr_readerr(pair_counter(&pair, FI_WRITE)) == 3, "errors are counted");
      CHECK(fi_cntr_readerr(pair_counter(&pair, FI_READ)) == 1, "by what failed");
      CHECK(fi_cntr_read(pair_counter(&pair, FI_WRITE)) == 0, "and nothing else");
      pair_wait_count(&pair, pair_counter(&pair, FI_READ), 1);
    }
    pair_barrier();
    OK(fi_close(&source->fid));
    OK(fi_close(&read_only->fid));
    pair_close(&pair);
  }
}

static void count(const char *fabric) {
  struct pair pair;
  uint64_t all = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  struct wish wish = {fabric, FI_MSG | FI_RMA | FI_RMA_EVENT, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, all,
                      FI_SELECTIVE_COMPLETION, 0};
  pair_open(&pair, &wish);
  struct fid_mr *mine = pair_register(&pair, target, LEN, ALL | FI_SEND | FI_RECV);
  struct fid_mr *source = pair_register(&pair, local, LEN, ALL | FI_SEND | FI_RECV);
  struct window there = swap_windows(mine);
  void *desc = fi_mr_desc(source);
  enum { TIMES = 50 };
  for (int i = 0; i < TIMES; i++) POST(&pair, fi_recv(pair.ep, target, 64, fi_mr_desc(mine), FI_ADDR_UNSPEC, NULL));
  pair_barrier();
  for (int i = 0; i < TIMES; i++) {
    POST(&pair, fi_send(pair.ep, local, 8, desc, pair.peer, NULL));
    POST(&pair, fi_write(pair.ep, local, 8, desc, pair.peer, there.addr + 64, there.key, NULL));
    POST(&pair, fi_read(pair.ep, local, 8, desc, pair.peer, there.addr + 128, there.key, NULL));
  }
  const uint64_t events[] = {FI_SEND, FI_RECV, FI_READ, FI_WRITE, FI_REMOTE_READ, FI_REMOTE_WRITE};
  for (int i = 0; i < 6; i++) {
    struct fid_cntr *counter = pair_counter(&pair, events[i]);
    OK(fi_cntr_wait(counter, TIMES, -1));
    CHECK(fi_cntr_read(counter) == TIMES, "counter %d is %lu", i, (long)fi_cntr_read(counter));
    CHECK(fi_cntr_readerr(counter) == 0, "counter %d has errors", i);
  }
  struct fi_cq_tagged_entry entry;
  CHECK(fi_cq_read(pair.tx, &entry, 1) == -FI_EAGAIN, "nobody asked for completions");
  struct fid_cntr *counter = pair_counter(&pair, FI_SEND);
  OK(fi_cntr_add(counter, 10));
  pair_wait_count(&pair, counter, TIMES + 10);
  OK(fi_cntr_set(counter, 3));
  while (fi_cntr_read(counter) != 3) pair_progress(&pair);
  CHECK(fi_cntr_wait(counter, 4, 10) == -FI_ETIMEDOUT, "nothing is under way");
  OK(fi_cntr_seterr(counter, 2));
  OK(fi_cntr_adderr(counter, 5));
  while (fi_cntr_readerr(counter) != 7) pair_progress(&pair);
  pair_barrier();
  OK(fi_close(&mine->fid));
  OK(fi_close(&source->fid));
  pair_close(&pair);
}

void test_counters(void) { count("efa"); }
void test_direct_counters(void) { count("efa-direct"); }
