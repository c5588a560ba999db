#include "pair.h"

#include <sys/socket.h>
#include <unistd.h>

int pair_rank;
extern int pair_socket;

void pair_swap(const void *mine, void *theirs, size_t len) {
  CHECK(write(pair_socket, mine, len) == (ssize_t)len, "the other process is gone");
  CHECK(recv(pair_socket, theirs, len, MSG_WAITALL) == (ssize_t)len, "the other process is gone");
}

void pair_barrier(void) {
  char out = 0, in;
  pair_swap(&out, &in, 1);
}

static const uint64_t events[MAX_COUNTERS] = {FI_SEND, FI_RECV, FI_READ, FI_WRITE, FI_REMOTE_READ, FI_REMOTE_WRITE};

void pair_open(struct pair *pair, const struct wish *wish) {
  memset(pair, 0, sizeof *pair);
  struct fi_info *hints = fi_allocinfo();
  CHECK(hints, "no memory");
  hints->fabric_attr->prov_name = strdup("softefa");
  hints->fabric_attr->name = strdup(wish->fabric);
  hints->ep_attr->type = FI_EP_RDM;
  hints->caps = wish->caps;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->tx_attr->inject_size = wish->inject;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &pair->info));
  fi_freeinfo(hints);
  OK(fi_fabric(pair->info->fabric_attr, &pair->fabric, NULL));
  OK(fi_domain(pair->fabric, pair->info, &pair->domain, NULL));
  struct fi_av_attr av = {.type = FI_AV_TABLE};
  OK(fi_av_open(pair->domain, &av, &pair->av, NULL));
  struct fi_cq_attr cq = {.size = 512, .format = wish->format, .wait_obj = wish->wait};
  OK(fi_cq_open(pair->domain, &cq, &pair->tx, NULL));
  OK(fi_cq_open(pair->domain, &cq, &pair->rx, NULL));
  OK(fi_endpoint(pair->domain, pair->info, &pair->ep, NULL));
  OK(fi_ep_bind(pair->ep, &pair->av->fid, 0));
  OK(fi_ep_bind(pair->ep, &pair->tx->fid, FI_TRANSMIT | wish->cq_flags));
  if (!(wish->cq_flags & FI_RECV)) OK(fi_ep_bind(pair->ep, &pair->rx->fid, FI_RECV));
  struct fi_cntr_attr attr = {.events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC};
  for (int i = 0; i < MAX_COUNTERS; i++) {
    if (!(wish->counters & events[i])) continue;
    OK(fi_cntr_open(pair->domain, &attr, &pair->counters[i], NULL));
    OK(fi_ep_bind(pair->ep, &pair->counters[i]->fid, events[i]));
  }
  OK(fi_enable(pair->ep));
  char mine[32] = {0}, theirs[32];
  size_t len = sizeof mine;
  OK(fi_getname(&pair->ep->fid, mine, &len));
  CHECK(len == sizeof mine, "an address of %zu bytes", len);
  pair_swap(mine, theirs, sizeof mine);
  CHECK(fi_av_insert(pair->av, mine, 1, &pair->self, 0, NULL) == 1, "own address");
  CHECK(fi_av_insert(pair->av, theirs, 1, &pair->peer, 0, NULL) == 1, "the other's address");
  pair_barrier();
}

void pair_close(struct pair *pair) {
  pair_barrier();
  pair_leave(pair);
}

void pair_leave(struct pair *pair) {
  OK(fi_close(&pair->ep->fid));
  for (int i = 0; i < MAX_COUNTERS; i++)
    if (pair->counters[i]) OK(fi_close(&pair->counters[i]->fid));
  OK(fi_close(&pair->tx->fid));
  OK(fi_close(&pair->rx->fid));
  OK(fi_close(&pair->av->fid));
  OK(fi_close(&pair->domain->fid));
  OK(fi_close(&pair->fabric->fid));
  fi_freeinfo(pair->info);
}

struct fid_cntr *pair_counter(struct pair *pair, uint64_t event) {
  for (int i = 0; i < MAX_COUNTERS; i++)
    if (events[i] == event) return pair->counters[i];
  return NULL;
}

void pair_progress(struct pair *pair) {
  (void)fi_cq_read(pair->tx, NULL, 0);
  (void)fi_cq_read(pair->rx, NULL, 0);
}

struct fi_cq_tagged_entry pair_wait(struct fid_cq *cq, fi_addr_t *source) {
  struct fi_cq_tagged_entry entry = {0};
  fi_addr_t from = FI_ADDR_NOTAVAIL;
  ssize_t rc;
  do rc = fi_cq_readfrom(cq, &entry, 1, &from);
  while (rc == -FI_EAGAIN);
  if (rc == -FI_EAVAIL) {
    struct fi_cq_err_entry error = {0};
    char text[80];
    OK(fi_cq_readerr(cq, &error, 0));
    CHECK(false, "a completion failed: %s, %s", fi_strerror(error.err),
          fi_cq_strerror(cq, error.prov_errno, error.err_data, text, sizeof text));
  }
  CHECK(rc == 1, "fi_cq_readfrom gave %zd", rc);
  if (source) *source = from;
  return entry;
}

struct fi_cq_err_entry pair_wait_error(struct fid_cq *cq) {
  struct fi_cq_tagged_entry entry;
  ssize_t rc;
  do rc = fi_cq_read(cq, &entry, 1);
  while (rc == -FI_EAGAIN);
  CHECK(rc == -FI_EAVAIL, "an error was expected, fi_cq_read gave %zd", rc);
  char room[8];
  struct fi_cq_err_entry error = {.err_data = room, .err_data_size = sizeof room};
  CHECK(fi_cq_readerr(cq, &error, 0) == 1, "fi_cq_readerr");
  CHECK(error.err_data == room && error.err_data_size == 0, "the room for more is ours");
  CHECK(fi_cq_readerr(cq, &error, 0) == -FI_EAGAIN, "an error is read once");
  return error;
}

void pair_wait_count(struct pair *pair, struct fid_cntr *counter, uint64_t value) {
  while (fi_cntr_read(counter) < value) pair_progress(pair);
}

struct fid_mr *pair_register(struct pair *pair, void *buf, size_t len, uint64_t access) {
  struct fid_mr *mr;
  OK(fi_mr_reg(pair->domain, buf, len, access, 0, 0, 0, &mr, NULL));
  return mr;
}

void pair_fill(void *buf, size_t len, uint32_t seed) {
  unsigned char *bytes = buf;
  for (size_t i = 0; i < len; i++) bytes[i] = (unsigned char)((i * 2654435761u + seed * 40503u) >> 7);
}

bool pair_matches(const void *buf, size_t len, uint32_t seed) {
  const unsigned char *bytes = buf;
  for (size_t i = 0; i < len; i++)
    if (bytes[i] != (unsigned char)((i * 2654435761u + seed * 40503u) >> 7)) return false;
  return true;
}
