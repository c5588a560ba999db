// Blocking waits for completions.
#include "pair.h"

#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

static char buffer[1 << 17];

static struct fid_mr *open_registered(struct pair *pair, const char *fabric, enum fi_wait_obj wait) {
  struct wish wish = {fabric, FI_MSG, FI_CQ_FORMAT_MSG, wait, 0, 0, 0};
  pair_open(pair, &wish);
  return pair_register(pair, buffer, sizeof buffer, FI_SEND | FI_RECV);
}

// Makes it likely that the other side is already waiting. The test passes either way.
static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL); }

static void *interrupt(void *cq) {
  nap();
  fi_cq_signal(cq);
  return NULL;
}

struct sender {
  struct fid_ep *ep;
  fi_addr_t to;
  void *desc;
};

static void *send_later(void *of) {
  struct sender *sender = of;
  nap();
  CHECK(fi_send(sender->ep, buffer, 8, sender->desc, sender->to, NULL) == 0, "the second message");
  return NULL;
}

// A queue with a threshold returns from a wait once it has that many entries: here those of a message, and of another
// one that comes later.
static void threshold(const char *fabric) {
  struct pair pair;
  struct fid_mr *mr = open_registered(&pair, fabric, FI_WAIT_UNSPEC);
  struct fi_cq_attr attr = {.format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_UNSPEC, .wait_cond = FI_CQ_COND_THRESHOLD};
  struct fid_cq *cq;
  struct sender sender = {.desc = fi_mr_desc(mr)};
  OK(fi_cq_open(pair.domain, &attr, &cq, NULL));
  OK(fi_endpoint(pair.domain, pair.info, &sender.ep, NULL));
  OK(fi_ep_bind(sender.ep, &pair.av->fid, 0));
  OK(fi_ep_bind(sender.ep, &cq->fid, FI_TRANSMIT | FI_RECV));
  OK(fi_enable(sender.ep));
  char name[64];
  size_t len = sizeof name;
  OK(fi_getname(&sender.ep->fid, name, &len));
  CHECK(fi_av_insert(pair.av, name, 1, &sender.to, 0, NULL) == 1, "its own address");
  for (int i = 0; i < 2; i++) OK(fi_recv(sender.ep, buffer + 1024, 1024, sender.desc, FI_ADDR_UNSPEC, NULL));
  OK(fi_send(sender.ep, buffer, 8, sender.desc, sender.to, NULL));
  struct fi_cq_msg_entry entries[8];
  size_t wanted = 2;
  CHECK(fi_cq_sread(cq, entries, 8, &wanted, -1) == 2, "a send and a receive");
  wanted = 1;
  CHECK(fi_cq_sread(cq, entries, 8, &wanted, 20) == -FI_EAGAIN, "nothing comes");
  OK(fi_recv(sender.ep, buffer + 1024, 1024, sender.desc, FI_ADDR_UNSPEC, NULL));
  OK(fi_send(sender.ep, buffer, 8, sender.desc, sender.to, NULL));
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, send_later, &sender), "no thread");
  wanted = 4;
  CHECK(fi_cq_sread(cq, entries, 8, &wanted, -1) == 4, "two sends and two receives");
  pthread_join(thread, NULL);
  OK(fi_close(&sender.ep->fid));
  OK(fi_close(&cq->fid));
  OK(fi_close(&mr->fid));
  pair_close(&pair);
}

void test_threshold(void) {
  threshold("efa");
  threshold("efa-direct");
}

void test_sread(void) {
  struct pair pair;
  struct fid_mr *mr = open_registered(&pair, "efa", FI_WAIT_UNSPEC);
  struct fi_cq_msg_entry entry;
  CHECK(fi_cq_sread(pair.rx, &entry, 1, NULL, 20) == -FI_EAGAIN, "nothing comes");
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, interrupt, pair.rx), "no thread");
  CHECK(fi_cq_sread(pair.rx, &entry, 1, NULL, -1) == -FI_EAGAIN, "somebody called");
  pthread_join(thread, NULL);
  int fd;
  CHECK(fi_control(&pair.rx->fid, FI_GETWAIT, &fd) < 0, "there is no descriptor to give");
  for (int i = 0; i < 20; i++) {
    size_t len = i % 2 ? sizeof buffer : 16;
    if ((i + pair_rank) % 2) {
      if (i < 4) nap();
      POST(&pair, fi_send(pair.ep, buffer, len, NULL, pair.peer, NULL));
      CHECK(fi_cq_sread(pair.tx, &entry, 1, NULL, -1) == 1, "the send");
    } else {
      POST(&pair, fi_recv(pair.ep, buffer, sizeof buffer, NULL, FI_ADDR_UNSPEC, NULL));
      CHECK(fi_cq_sread(pair.rx, &entry, 1, NULL, -1) == 1 && entry.len == len, "message %d", i);
    }
  }
  OK(fi_close(&mr->fid));
  pair_close(&pair);
}

// Waits as fi_trywait(3) describes.
static struct fi_cq_msg_entry wait_on(struct pair *pair, struct fid_cq *cq) {
  struct fi_cq_msg_entry entry;
  int fd;
  OK(fi_control(&cq->fid, FI_GETWAIT, &fd));
  for (;;) {
    ssize_t rc = fi_cq_read(cq, &entry, 1);
    if (rc == 1) return entry;
    CHECK(rc == -FI_EAGAIN, "fi_cq_read gave %zd", rc);
    struct fid *fids[1] = {&cq->fid};
    int may = fi_trywait(pair->fabric, fids, 1);
    CHECK(may == 0 || may == -FI_EAGAIN, "fi_trywait gave %d", may);
    if (may) continue;
    struct pollfd polled = {fd, POLLIN, 0};
    CHECK(poll(&polled, 1, -1) == 1, "poll");
  }
}

static void by_descriptor(const char *fabric) {
  struct pair pair;
  struct fid_mr *mr = open_registered(&pair, fabric, FI_WAIT_FD);
  void *desc = fi_mr_desc(mr);
  size_t room = strcmp(fabric, "efa") ? 8928 : sizeof buffer;
  for (int i = 0; i < 40; i++) {
    size_t len = i % 2 ? room : 16;
    if ((i + pair_rank) % 2) {
      if (i < 4) nap();
      POST(&pair, fi_send(pair.ep, buffer, len, desc, pair.peer, NULL));
      wait_on(&pair, pair.tx);
    } else {
      POST(&pair, fi_recv(pair.ep, buffer, room, desc, FI_ADDR_UNSPEC, NULL));
      CHECK(wait_on(&pair, pair.rx).len == len, "message %d", i);
    }
  }
  OK(fi_close(&mr->fid));
  pair_close(&pair);
}

void test_wait_fd(void) { by_descriptor("efa"); }
void test_direct_wait_fd(void) { by_descriptor("efa-direct"); }
