// Messages over libfabric's protocol, and directly over the card.
#include "pair.h"

#include <unistd.h>

enum { LONGEST = 1 << 20 };
static char out[LONGEST], in[LONGEST];

static const size_t lengths[] = {0, 1, 8, 100, 4096, 8856, 8857, 8928, 65536, LONGEST};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static void expect(struct pair *pair, uint64_t flags, size_t len, uint32_t seed, void *context) {
  fi_addr_t source;
  struct fi_cq_tagged_entry entry = pair_wait(pair->rx, &source);
  CHECK(entry.op_context == context, "another context");
  CHECK((entry.flags & flags) == flags, "flags %#lx instead of %#lx", (long)entry.flags, (long)flags);
  CHECK(entry.len == len, "%zu bytes instead of %zu", entry.len, len);
  CHECK(source == pair->peer, "from %#lx instead of %#lx", (long)source, (long)pair->peer);
  CHECK(pair_matches(in, len, seed), "%zu bytes differ", len);
}

static void one_way(struct pair *pair, bool sender) {
  char contexts[LENGTHS];
  for (int i = 0; i < LENGTHS; i++) {
    size_t len = lengths[i];
    if (sender) {
      pair_fill(out, len, i);
      POST(pair, fi_send(pair->ep, out, len, NULL, pair->peer, &contexts[i]));
      CHECK(pair_wait(pair->tx, NULL).op_context == &contexts[i], "another context");
    } else {
      // Every second message arrives before its receive.
      if (i % 2) pair_progress(pair);
      POST(pair, fi_recv(pair->ep, in, LONGEST, NULL, FI_ADDR_UNSPEC, &contexts[i]));
      expect(pair, FI_RECV | FI_MSG, len, i, &contexts[i]);
    }
  }
}

static void other_calls(struct pair *pair) {
  struct fid_mr *mr = pair_register(pair, out, LONGEST, FI_SEND);
  void *descs[3] = {fi_mr_desc(mr), NULL, fi_mr_desc(mr)};
  struct iovec parts[3] = {{out, 10}, {out + 10, 20000}, {out + 20010, 5}};
  struct fi_msg msg = {parts, descs, 3, pair->peer, NULL, 0x1234};
  char context;
  pair_fill(out, LONGEST, 99);
  if (pair_rank == 0) {
    POST(pair, fi_sendv(pair->ep, parts, descs, 2, pair->peer, &context));
    pair_wait(pair->tx, NULL);
    msg.context = &context;
    POST(pair, fi_sendmsg(pair->ep, &msg, FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE));
    pair_wait(pair->tx, NULL);
    POST(pair, fi_inject(pair->ep, out, pair->info->tx_attr->inject_size, pair->peer));
    POST(pair, fi_senddata(pair->ep, out, 7, NULL, 0xabcdef01, pair->peer, &context));
    pair_wait(pair->tx, NULL);
    POST(pair, fi_injectdata(pair->ep, out, 3, 5, pair->peer));
    CHECK(fi_inject(pair->ep, out, pair->info->tx_attr->inject_size + 1, pair->peer) == -FI_EINVAL, "too much");
    CHECK(fi_sendmsg(pair->ep, &msg, FI_PEEK) == -FI_EBADFLAGS, "a flag of receives");
  } else {
    const struct {
      size_t len;
      uint64_t data;
    } expected[] = {{20010, 0}, {20015, 0x1234}, {pair->info->tx_attr->inject_size, 0}, {7, 0xabcdef01}, {3, 5}};
    for (int i = 0; i < 5; i++) {
      struct iovec halves[2] = {{in, 4}, {in + 4, LONGEST - 4}};
      POST(pair, fi_recvv(pair->ep, halves, NULL, 2, pair->peer, &context));
      struct fi_cq_tagged_entry entry = pair_wait(pair->rx, NULL);
      CHECK(entry.len == expected[i].len, "%zu bytes instead of %zu", entry.len, expected[i].len);
      CHECK(pair_matches(in, entry.len, 99), "message %d differs", i);
      bool has = entry.flags & FI_REMOTE_CQ_DATA;
      CHECK(has == (expected[i].data != 0) && (!has || entry.data == expected[i].data), "data %#lx", (long)entry.data);
    }
  }
  OK(fi_close(&mr->fid));
}

static void truncated(struct pair *pair) {
  char context;
  for (int i = 0; i < 2; i++) {
    size_t len = i ? 100000 : 1000;
    if (pair_rank == 0) {
      POST(pair, fi_send(pair->ep, out, len, NULL, pair->peer, &context));
      pair_wait(pair->tx, NULL);
    } else {
      POST(pair, fi_recv(pair->ep, in, 600, NULL, FI_ADDR_UNSPEC, &context));
      struct fi_cq_err_entry error = pair_wait_error(pair->rx);
      CHECK(error.err == FI_ETRUNC && error.olen == len - 600 && error.op_context == &context,
            "error %d, %zu bytes too many", error.err, error.olen);
    }
  }
}

// With FI_MORE, the provider may delay the doorbell until the last message; if none follows, the message goes out at
// the next poll.
static void with_more(struct pair *pair) {
  enum { COUNT = 40 };
  static uint32_t numbers[COUNT];
  for (uint32_t i = 0; i < COUNT; i++) {
    bool alone = i == COUNT - 1;
    if (pair_rank == 0) {
      numbers[i] = i;
      struct iovec part = {&numbers[i], 4};
      struct fi_msg msg = {&part, NULL, 1, pair->peer, &numbers[i], 0};
      uint64_t more = alone || i % 4 ? FI_MORE : 0;
      POST(pair, fi_sendmsg(pair->ep, &msg, FI_INJECT | more));
      if (!more || alone)
        for (int left = alone ? 3 : i ? 4 : 1; left; left--) pair_wait(pair->tx, NULL);
    } else {
      uint32_t number = ~0u;
      POST(pair, fi_recv(pair->ep, &number, 4, NULL, FI_ADDR_UNSPEC, NULL));
      pair_wait(pair->rx, NULL);
      CHECK(number == i, "message %u came as number %u", number, i);
    }
  }
}

// More messages at once than fit in any queue, so that order and retries matter.
static void many(struct pair *pair) {
  enum { COUNT = 3000 };
  static uint32_t numbers[COUNT];
  if (pair_rank == 0) {
    int done = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
      ssize_t rc;
      numbers[i] = i;
      while ((rc = fi_send(pair->ep, &numbers[i], 4, NULL, pair->peer, &numbers[i])) == -FI_EAGAIN) {
        struct fi_cq_tagged_entry entry;
        if (fi_cq_read(pair->tx, &entry, 1) == 1) done++;
      }
      CHECK(rc == 0, "fi_send gave %zd", rc);
    }
    while (done < COUNT) {
      pair_wait(pair->tx, NULL);
      done++;
    }
  } else {
    for (uint32_t i = 0; i < COUNT; i++) {
      uint32_t number = ~0u;
      POST(pair, fi_recv(pair->ep, &number, 4, NULL, FI_ADDR_UNSPEC, NULL));
      pair_wait(pair->rx, NULL);
      CHECK(number == i, "message %u came as number %u", number, i);
    }
  }
}

void test_messages(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG | FI_SOURCE, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  one_way(&pair, pair_rank == 0);
  one_way(&pair, pair_rank == 1);
  other_calls(&pair);
  pair_barrier();
  truncated(&pair);
  with_more(&pair);
  many(&pair);
  pair_close(&pair);
}

void test_tagged(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV, FI_CQ_FORMAT_TAGGED, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  char context[2];
  if (pair_rank == 0) {
    pair_fill(out, 70000, 1);
    POST(&pair, fi_tsend(pair.ep, out, 70000, NULL, pair.peer, 0x11, &context));
    POST(&pair, fi_tsenddata(pair.ep, out, 10, NULL, 77, pair.peer, 0x22, &context));
    POST(&pair, fi_tinject(pair.ep, out, 20, pair.peer, 0x33));
    POST(&pair, fi_tsend(pair.ep, out, 30, NULL, pair.peer, 0x44, &context));
    for (int i = 0; i < 3; i++) pair_wait(pair.tx, NULL);
  } else {
    // In reverse: order matters only among messages that match the same receive.
    POST(&pair, fi_trecv(pair.ep, in, LONGEST, NULL, pair.peer, 0x44, 0, &context[0]));
    CHECK(pair_wait(pair.rx, NULL).len == 30, "the message with tag 0x44");
    POST(&pair, fi_trecv(pair.ep, in, LONGEST, NULL, pair.self, 0x22, 0, &context[1]));
    POST(&pair, fi_trecv(pair.ep, in, LONGEST, NULL, pair.peer, 0x02, 0xf0, &context[0]));
    struct fi_cq_tagged_entry entry = pair_wait(pair.rx, NULL);
    CHECK(entry.tag == 0x22 && entry.data == 77 && entry.op_context == &context[0], "tag %#lx", (long)entry.tag);
    OK(fi_cancel(&pair.ep->fid, &context[1]));
    CHECK(pair_wait_error(pair.rx).err == FI_ECANCELED, "nobody sent to itself");
    struct fi_msg_tagged peek = {.addr = pair.peer, .tag = 0x33, .context = context};
    POST(&pair, fi_trecvmsg(pair.ep, &peek, FI_PEEK));
    CHECK(pair_wait(pair.rx, NULL).len == 20, "a look at the message with tag 0x33");
    peek.tag = 0x99;
    POST(&pair, fi_trecvmsg(pair.ep, &peek, FI_PEEK));
    CHECK(pair_wait_error(pair.rx).err == FI_ENOMSG, "there is no tag 0x99");
    peek.tag = 0x33;
    POST(&pair, fi_trecvmsg(pair.ep, &peek, FI_PEEK | FI_DISCARD));
    pair_wait(pair.rx, NULL);
    POST(&pair, fi_trecvmsg(pair.ep, &peek, FI_PEEK));
    CHECK(pair_wait_error(pair.rx).err == FI_ENOMSG, "it was thrown away");
    POST(&pair, fi_trecv(pair.ep, in, LONGEST, NULL, pair.peer, 0, ~0ull, &context[0]));
    entry = pair_wait(pair.rx, NULL);
    CHECK(entry.tag == 0x11 && entry.len == 70000 && pair_matches(in, 70000, 1), "tag %#lx", (long)entry.tag);
  }
  pair_close(&pair);
}

void test_direct_messages(void) {
  struct pair pair;
  struct wish wish = {"efa-direct", FI_MSG | FI_SOURCE, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  size_t longest = pair.info->ep_attr->max_msg_size;
  CHECK(longest == 8928, "a packet of %zu bytes", longest);
  struct fid_mr *sent = pair_register(&pair, out, LONGEST, FI_SEND);
  struct fid_mr *received = pair_register(&pair, in, LONGEST, FI_RECV);
  void *from = fi_mr_desc(sent), *into = fi_mr_desc(received);
  char context;
  for (int i = 0; i < LENGTHS && lengths[i] <= longest; i++) {
    size_t len = lengths[i];
    if (pair_rank == 0) {
      // The receiver is late, so the card retries.
      pair_fill(out, len, i);
      struct iovec halves[2] = {{out, len / 3}, {out + len / 3, len - len / 3}};
      void *descs[2] = {from, from};
      POST(&pair, fi_sendv(pair.ep, halves, descs, 2, pair.peer, &context));
      CHECK(pair_wait(pair.tx, NULL).op_context == &context, "another context");
    } else {
      POST(&pair, fi_recv(pair.ep, in, longest, into, FI_ADDR_UNSPEC, &context));
      expect(&pair, FI_RECV | FI_MSG, len, i, &context);
    }
  }
  if (pair_rank == 0) {
    CHECK(fi_send(pair.ep, out, longest + 1, from, pair.peer, NULL) == -FI_EMSGSIZE, "more than a packet");
    char said[512] = "";
    FILE *log = tmpfile();
    int standard_error = dup(STDERR_FILENO);
    CHECK(log && standard_error >= 0 && dup2(fileno(log), STDERR_FILENO) >= 0, "no log");
    ssize_t rc = fi_send(pair.ep, out, 100, NULL, pair.peer, NULL);
    dup2(standard_error, STDERR_FILENO);
    rewind(log);
    said[fread(said, 1, sizeof(said) - 1, log)] = 0;
    CHECK(rc == -FI_EINVAL && strstr(said, "fi_send") && strstr(said, "fi_mr_desc"), "fi_send gave %zd and said: %s", rc, said);
    fclose(log);
    close(standard_error);
    CHECK(fi_tsend(pair.ep, out, 8, from, pair.peer, 1, NULL) == -FI_ENOSYS, "the card knows no tags");
    POST(&pair, fi_injectdata(pair.ep, out, 32, 0xfeedface, pair.peer));
    // The card doesn't preserve order, so the longer message could take the first receive.
    pair_barrier();
    POST(&pair, fi_send(pair.ep, out, 200, from, pair.peer, &context));
    struct fi_cq_err_entry error = pair_wait_error(pair.tx);
    CHECK(error.err == FI_EMSGSIZE && error.prov_errno == 11, "error %d (%d)", error.err, error.prov_errno);
  } else {
    POST(&pair, fi_recv(pair.ep, in, 64, into, FI_ADDR_UNSPEC, NULL));
    struct fi_cq_tagged_entry entry = pair_wait(pair.rx, NULL);
    CHECK(entry.flags & FI_REMOTE_CQ_DATA && entry.data == 0xfeedface && entry.len == 32, "inline with data");
    pair_barrier();
    POST(&pair, fi_recv(pair.ep, in, 64, into, FI_ADDR_UNSPEC, &context));
    struct fi_cq_err_entry error = pair_wait_error(pair.rx);
    CHECK(error.op_context == &context && error.err == FI_EMSGSIZE, "error %d", error.err);
  }
  pair_barrier();
  OK(fi_close(&sent->fid));
  OK(fi_close(&received->fid));
  pair_close(&pair);
}

// One process asks, the other replies. Send and receive completions go to one queue.
void test_order(void) {
  static const size_t sizes[] = {0, 64, 9000, 100000};
  struct pair pair;
  struct wish wish = {"efa", FI_MSG, FI_CQ_FORMAT_MSG, FI_WAIT_NONE, 0, FI_RECV, 0};
  pair_open(&pair, &wish);
  for (int i = 0; i < 200; i++) {
    bool asks = pair_rank == (i == 0);
    POST(&pair, fi_recv(pair.ep, in, LONGEST, NULL, FI_ADDR_UNSPEC, NULL));
    if (!asks) CHECK(pair_wait(pair.tx, NULL).flags & FI_RECV, "exchange %d", i);
    POST(&pair, fi_send(pair.ep, out, sizes[i % 4], NULL, pair.peer, NULL));
    CHECK(pair_wait(pair.tx, NULL).flags & FI_SEND, "exchange %d of %zu bytes: the reply came first", i, sizes[i % 4]);
    if (asks) CHECK(pair_wait(pair.tx, NULL).flags & FI_RECV, "exchange %d", i);
  }
  pair_close(&pair);
}

void test_multi_recv(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG | FI_MULTI_RECV, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  enum { COUNT = 40, ROOM = 100000 };
  char context;
  if (pair_rank == 0) {
    for (int i = 0; i < COUNT; i++) {
      // Some are long enough for the rendezvous protocol.
      size_t len = i % 5 == 4 ? 20000 : 500;
      pair_fill(out, len, i);
      POST(&pair, fi_send(pair.ep, out, len, NULL, pair.peer, NULL));
      pair_wait(pair.tx, NULL);
    }
  } else {
    size_t least = 25000;
    OK(fi_setopt(&pair.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof least));
    struct iovec whole = {in, ROOM};
    struct fi_msg msg = {&whole, NULL, 1, FI_ADDR_UNSPEC, &context, 0};
    int returned = 1;
    for (int i = 0; i < COUNT; i++) {
      if (returned) POST(&pair, fi_recvmsg(pair.ep, &msg, FI_MULTI_RECV));
      struct fi_cq_tagged_entry entry = pair_wait(pair.rx, NULL);
      CHECK((char *)entry.buf >= in && (char *)entry.buf + entry.len <= in + ROOM, "outside of the buffer");
      CHECK(pair_matches(entry.buf, entry.len, i), "message %d differs", i);
      returned = (entry.flags & FI_MULTI_RECV) != 0;
    }
  }
  pair_close(&pair);
}

void test_cancel(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  char contexts[3];
  for (int i = 0; i < 3; i++) POST(&pair, fi_recv(pair.ep, in, 8, NULL, FI_ADDR_UNSPEC, &contexts[i]));
  OK(fi_cancel(&pair.ep->fid, &contexts[0]));
  struct fi_cq_err_entry error = pair_wait_error(pair.rx);
  CHECK(error.err == FI_ECANCELED && error.op_context == &contexts[0], "error %d", error.err);
  CHECK(fi_cancel(&pair.ep->fid, &contexts[0]) == -FI_ENOENT, "it is gone");
  pair_barrier();
  POST(&pair, fi_send(pair.ep, "12345678", 8, NULL, pair.peer, NULL));
  CHECK(pair_wait(pair.rx, NULL).op_context == &contexts[1], "the oldest that is left");
  CHECK(!memcmp(in, "12345678", 8), "its bytes");
  pair_wait(pair.tx, NULL);
  pair_close(&pair);
}

static long resident_pages(void) {
  long size, resident;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld %ld", &size, &resident) == 2, "statm");
  fclose(file);
  return resident;
}

// A cancelled multi-receive buffer is the application's again, and leaves nothing behind.
void test_cancel_multi_recv(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG | FI_MULTI_RECV, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  char context;
  struct iovec whole = {in, 10000};
  struct fi_msg msg = {&whole, NULL, 1, FI_ADDR_UNSPEC, &context, 0};
  enum { WARM = 20000, COUNT = 80000 };
  long before = 0;
  for (int i = 0; i < COUNT; i++) {
    OK(fi_recvmsg(pair.ep, &msg, FI_MULTI_RECV));
    OK(fi_cancel(&pair.ep->fid, &context));
    struct fi_cq_err_entry error = pair_wait_error(pair.rx);
    CHECK(error.err == FI_ECANCELED && error.flags & FI_MULTI_RECV, "flags %#llx", (unsigned long long)error.flags);
    if (i == WARM) before = resident_pages();
  }
  CHECK(resident_pages() - before < 500, "%ld pages are left behind", resident_pages() - before);
  pair_barrier();
  pair_close(&pair);
}

// The receiver dies after a message is announced: the sender gets an error for that message and for the next one.
void test_dead_peer(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG, FI_CQ_FORMAT_DATA, FI_WAIT_UNSPEC, FI_SEND, 0, 0};
  pair_open(&pair, &wish);
  char context;
  if (pair_rank == 1) {
    pair_barrier();
    struct fi_cq_data_entry entry;
    // Gives the announcement time to arrive.
    CHECK(fi_cq_sread(pair.rx, &entry, 1, NULL, 200) == -FI_EAGAIN, "nothing was posted");
    _exit(0);
  }
  POST(&pair, fi_send(pair.ep, out, LONGEST, NULL, pair.peer, &context));
  pair_barrier();
  struct fi_cq_err_entry error = pair_wait_error(pair.tx);
  CHECK(error.op_context == &context && error.prov_errno != 0, "error %d (%d)", error.err, error.prov_errno);
  POST(&pair, fi_send(pair.ep, out, 8, NULL, pair.peer, &context));
  error = pair_wait_error(pair.tx);
  CHECK(error.op_context == &context && error.prov_errno != 0, "error %d (%d)", error.err, error.prov_errno);
  CHECK(fi_cntr_readerr(pair_counter(&pair, FI_SEND)) == 2, "both are counted");
  pair_leave(&pair);
}

// An endpoint that closes returns the room that its receives have in the queue.
void test_shared_queue(void) {
  struct pair pair;
  struct wish wish = {"efa-direct", FI_MSG, FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  struct fi_cq_attr attr = {.size = 64, .format = FI_CQ_FORMAT_CONTEXT};
  struct fid_cq *cq;
  OK(fi_cq_open(pair.domain, &attr, &cq, NULL));
  static struct fi_context2 contexts[1 << 16];
  static char buf[64];
  struct fid_mr *mr = pair_register(&pair, buf, sizeof(buf), FI_RECV);
  int room = 0;
  for (int round = 0; round < 3; round++) {
    struct fid_ep *ep;
    OK(fi_endpoint(pair.domain, pair.info, &ep, NULL));
    OK(fi_ep_bind(ep, &pair.av->fid, 0));
    OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    OK(fi_enable(ep));
    int posted = 0;
    while (posted < 1 << 16 && fi_recv(ep, buf, sizeof(buf), fi_mr_desc(mr), FI_ADDR_UNSPEC, &contexts[posted]) == 0) posted++;
    CHECK(posted >= 64 && (round == 0 || posted == room), "%d receives in round %d, %d in the first", posted, round, room);
    room = posted;
    OK(fi_close(&ep->fid));
  }
  OK(fi_close(&mr->fid));
  OK(fi_close(&cq->fid));
  pair_close(&pair);
}
