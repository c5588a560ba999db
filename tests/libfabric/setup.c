// Set-up, and invalid calls.
#include "pair.h"

static struct fi_info *hints_for(uint64_t caps) {
  struct fi_info *hints = fi_allocinfo();
  CHECK(hints, "no memory");
  hints->fabric_attr->prov_name = strdup("softefa");
  hints->caps = caps;
  hints->mode = FI_CONTEXT2;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  return hints;
}

// Calls fi_getinfo and frees the hints. Returns the number of infos, or the error.
static int ask(uint32_t version, struct fi_info *hints, struct fi_info **first) {
  struct fi_info *info = NULL;
  int rc = fi_getinfo(version, NULL, NULL, 0, hints, &info);
  fi_freeinfo(hints);
  int count = 0;
  for (struct fi_info *i = info; i; i = i->next) count++;
  if (first)
    *first = info;
  else if (info)
    fi_freeinfo(info);
  return rc ? rc : count;
}

void test_hints(void) {
  const uint32_t versions[] = {FI_VERSION(1, 1), FI_VERSION(1, 5), FI_VERSION(1, 17)};
  for (int i = 0; i < 3; i++)
    CHECK(ask(versions[i], hints_for(FI_MSG), NULL) == 2, "both fabrics do messages, version %d", i);
  CHECK(ask(FI_VERSION(1, 17), hints_for(FI_TAGGED), NULL) == 1, "one has tags");
  struct fi_info *info;
  CHECK(ask(FI_VERSION(1, 17), hints_for(FI_RMA), &info) == 2, "both do remote memory");
  CHECK(!(info->caps & FI_TAGGED), "primary capabilities must be requested");
  CHECK(!strcmp(info->fabric_attr->name, "efa") && !strcmp(info->next->fabric_attr->name, "efa-direct"), "order");
  CHECK(info->next->domain_attr->mr_mode & FI_MR_LOCAL && info->next->mode & FI_CONTEXT2, "what efa-direct needs");
  CHECK(info->next->ep_attr->max_msg_size == 1 << 30, "max_rdma_size");
  CHECK(!strcmp(info->nic->device_attr->device_id, "0xefa3"), "the device of the verbs card: %s", info->nic->device_attr->device_id);
  fi_freeinfo(info);
  struct fi_info *models = hints_for(FI_MSG);
  models->domain_attr->threading = FI_THREAD_DOMAIN;
  models->domain_attr->data_progress = models->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  CHECK(ask(FI_VERSION(1, 17), models, &info) == 2, "models of fewer threads and less progress");
  CHECK(info->domain_attr->threading == FI_THREAD_DOMAIN && info->next->domain_attr->threading == FI_THREAD_DOMAIN, "repeated");
  CHECK(info->next->domain_attr->data_progress == FI_PROGRESS_MANUAL, "repeated");
  fi_freeinfo(info);

  struct fi_info *wrong[10];
  for (int i = 0; i < 10; i++) wrong[i] = hints_for(FI_MSG | FI_RMA);
  wrong[0]->caps |= FI_ATOMIC;
  wrong[1]->ep_attr->type = FI_EP_MSG;
  wrong[2]->domain_attr->mr_mode = 0;
  wrong[3]->addr_format = FI_SOCKADDR_IN;
  wrong[4]->tx_attr->inject_size = 1 << 20;
  wrong[5]->tx_attr->msg_order = FI_ORDER_RAW;
  wrong[6]->domain_attr->cq_data_size = 8;
  wrong[7]->fabric_attr->name = strdup("efa-indirect");
  wrong[8]->domain_attr->name = strdup("softefa99-rdm");
  wrong[9]->tx_attr->comp_order = FI_ORDER_STRICT;
  for (int i = 0; i < 10; i++) CHECK(ask(FI_VERSION(1, 17), wrong[i], NULL) == -FI_ENODATA, "hints %d", i);

  struct fi_info *direct = hints_for(FI_MSG);
  direct->ep_attr->max_msg_size = 100000;
  CHECK(ask(FI_VERSION(1, 17), direct, &info) == 1 && !strcmp(info->fabric_attr->name, "efa"), "more than a packet");
  fi_freeinfo(info);
  direct = hints_for(FI_MSG);
  direct->domain_attr->mr_mode = 0;
  CHECK(ask(FI_VERSION(1, 17), direct, &info) == 1 && !strcmp(info->fabric_attr->name, "efa"), "no FI_MR_LOCAL");
  fi_freeinfo(info);
  direct = hints_for(FI_RMA);
  direct->domain_attr->mr_mode = FI_MR_BASIC;
  CHECK(ask(FI_VERSION(1, 17), direct, &info) > 0 && info->domain_attr->mr_mode == FI_MR_BASIC, "the old word");
  fi_freeinfo(info);
}

void test_addresses(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG, FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  char address[32], again[40];
  size_t len = sizeof again;
  OK(fi_av_lookup(pair.av, pair.peer, again, &len));
  CHECK(len == 32, "%zu bytes", len);
  memcpy(address, again, 32);
  fi_addr_t other;
  CHECK(fi_av_insert(pair.av, address, 1, &other, 0, NULL) == 1 && other == pair.peer, "the same, the same number");
  OK(fi_av_remove(pair.av, &other, 1, 0));
  OK(fi_av_lookup(pair.av, pair.peer, again, &len));
  char text[100];
  len = sizeof text;
  CHECK(fi_av_straddr(pair.av, address, text, &len) && !strncmp(text, "fi_addr_efa://[", 15), "%s", text);
  struct fi_info *hints = hints_for(FI_MSG), *info;
  OK(fi_getinfo(FI_VERSION(1, 17), text, NULL, 0, hints, &info));
  CHECK(info->dest_addrlen == 32 && !memcmp(info->dest_addr, address, 32), "a peer by name");
  fi_freeinfo(info);
  CHECK(fi_getinfo(FI_VERSION(1, 17), "host.example", NULL, 0, hints, &info) == -FI_ENODATA, "not a card");
  fi_freeinfo(hints);
  len = 8;
  OK(fi_av_lookup(pair.av, pair.peer, again, &len));
  CHECK(len == 32, "how much there is");
  char garbage[2][32] = {{1, 2, 3}};
  memcpy(garbage[1], address, 32);
  fi_addr_t two[2];
  int errors[2] = {0, 0};
  CHECK(fi_av_insert(pair.av, garbage, 2, two, FI_SYNC_ERR, errors) == 1, "one of two");
  CHECK(two[0] == FI_ADDR_NOTAVAIL && errors[0] == FI_EINVAL && two[1] == pair.peer && !errors[1], "which one");
  CHECK(fi_av_insert(pair.av, address, 1, two, FI_PEEK, NULL) == -FI_EBADFLAGS, "a flag of something else");
  two[0] = 12345;
  CHECK(fi_av_remove(pair.av, two, 1, 0) == -FI_EINVAL, "never inserted");
  CHECK(fi_av_insertsvc(pair.av, "host", "1", two, 0, NULL) == -FI_ENOSYS, "as the real provider");
  pair_close(&pair);
}

void test_bad_calls(void) {
  const char *fabrics[] = {"efa", "efa-direct"};
  for (int i = 0; i < 2; i++) {
    struct pair pair;
    struct wish wish = {fabrics[i], FI_MSG | FI_RMA, FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE, 0, 0, 0};
    pair_open(&pair, &wish);
    struct fid_ep *ep = pair.ep;
    char byte;
    CHECK(fi_send(ep, NULL, 8, NULL, pair.peer, NULL) == -FI_EINVAL, "no buffer");
    CHECK(fi_send(ep, &byte, 1, NULL, 999, NULL) == -FI_EINVAL, "no such peer");
    CHECK(fi_sendv(ep, NULL, NULL, 2, pair.peer, NULL) == -FI_EINVAL, "no buffers");
    CHECK(fi_sendmsg(ep, NULL, 0) == -FI_EINVAL, "no message");
    CHECK(fi_recvmsg(ep, NULL, 0) == -FI_EINVAL, "no message");
    CHECK(fi_recv(ep, NULL, 8, NULL, FI_ADDR_UNSPEC, NULL) == -FI_EINVAL, "no buffer");
    CHECK(fi_writemsg(ep, NULL, 0) == -FI_EINVAL && fi_readmsg(ep, NULL, 0) == -FI_EINVAL, "no message");
    struct iovec iov = {&byte, 1};
    struct fi_rma_iov where = {0, 2, 0};
    struct fi_msg_rma msg = {&iov, NULL, 1, pair.peer, &where, 1, NULL, 0};
    CHECK(fi_writemsg(ep, &msg, 0) == -FI_EINVAL, "the lengths differ");
    CHECK(fi_writemsg(ep, &msg, FI_TRIGGER) == -FI_EBADFLAGS, "flags");
    CHECK(fi_readmsg(ep, &msg, FI_INJECT) == -FI_EBADFLAGS, "flags");
    CHECK(fi_write(ep, &byte, 1, NULL, pair.peer, 0, 1ull << 40, NULL) == -FI_EINVAL, "keys have 32 bits");
    CHECK(fi_enable(ep) == -FI_EOPBADSTATE, "it is enabled");
    CHECK(fi_ep_bind(ep, &pair.av->fid, 0) == -FI_EOPBADSTATE, "it is enabled");
    CHECK(fi_ep_bind(ep, &pair.domain->fid, 0) < 0, "a domain cannot be bound");
    CHECK(fi_control(&ep->fid, 9999, NULL) == -FI_ENOSYS, "no such command");
    uint64_t flags = FI_TRANSMIT;
    OK(fi_control(&ep->fid, FI_GETOPSFLAG, &flags));
    CHECK(fi_control(&ep->fid, FI_SETOPSFLAG, NULL) == -FI_EINVAL, "no flags");
    int value = 1;
    CHECK(fi_setopt(&ep->fid, 77, 0, &value, sizeof value) == -FI_ENOPROTOOPT, "no such level");
    CHECK(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, 9999, &value, sizeof value) == -FI_ENOPROTOOPT, "no such option");
    CHECK(fi_cq_read(pair.tx, NULL, 1) == -FI_EINVAL, "no room");
    CHECK(fi_close(&pair.domain->fid) == -FI_EBUSY && fi_close(&pair.tx->fid) == -FI_EBUSY, "in use");
    struct fid_ep *fresh;
    OK(fi_endpoint(pair.domain, pair.info, &fresh, NULL));
    CHECK(fi_send(fresh, &byte, 1, NULL, pair.peer, NULL) == -FI_EOPBADSTATE, "not enabled");
    CHECK(fi_enable(fresh) == -FI_ENOAV, "no address vector");
    OK(fi_ep_bind(fresh, &pair.av->fid, 0));
    CHECK(fi_enable(fresh) == -FI_ENOCQ, "no completion queue");
    CHECK(fi_ep_bind(fresh, &pair.tx->fid, 0) == -FI_EINVAL, "for which direction?");
    OK(fi_close(&fresh->fid));
    struct fi_cq_attr attr = {.format = 77};
    struct fid_cq *cq;
    CHECK(fi_cq_open(pair.domain, &attr, &cq, NULL) == -FI_ENOSYS, "no such format");
    attr.format = FI_CQ_FORMAT_CONTEXT;
    attr.wait_cond = (enum fi_cq_wait_cond)7;
    CHECK(fi_cq_open(pair.domain, &attr, &cq, NULL) == -FI_EINVAL, "no such condition");
    attr.wait_cond = FI_CQ_COND_NONE;
    attr.wait_obj = FI_WAIT_MUTEX_COND;
    CHECK(fi_cq_open(pair.domain, &attr, &cq, NULL) == -FI_ENOSYS, "no such wait object");
    attr.wait_obj = FI_WAIT_NONE;
    attr.flags = FI_PEEK;
    CHECK(fi_cq_open(pair.domain, &attr, &cq, NULL) == -FI_EBADFLAGS, "no such flag");
    struct fi_av_attr book = {.type = (enum fi_av_type)7};
    struct fid_av *av;
    CHECK(fi_av_open(pair.domain, &book, &av, NULL) == -FI_EINVAL, "no such type");
    book.type = FI_AV_TABLE;
    book.rx_ctx_bits = 1;
    CHECK(fi_av_open(pair.domain, &book, &av, NULL) == -FI_EINVAL, "no receive contexts");
    book.rx_ctx_bits = 0;
    book.flags = FI_EVENT;
    CHECK(fi_av_open(pair.domain, &book, &av, NULL) == -FI_ENOSYS, "no such flag");
    struct fi_eq_attr events = {.flags = FI_PEEK};
    struct fid_eq *eq;
    CHECK(fi_eq_open(pair.fabric, &events, &eq, NULL) == -FI_EBADFLAGS, "no such flag");
    pair.info->ep_attr->rx_ctx_cnt = 2;
    CHECK(fi_endpoint(pair.domain, pair.info, &fresh, NULL) == -FI_EINVAL, "no receive contexts");
    pair.info->ep_attr->rx_ctx_cnt = 1;
    struct fi_cntr_attr counted = {.events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_FD};
    struct fid_cntr *counter;
    CHECK(fi_cntr_open(pair.domain, &counted, &counter, NULL) == -FI_EOPNOTSUPP, "counters have no descriptor");
    counted.wait_obj = FI_WAIT_YIELD;
    OK(fi_cntr_open(pair.domain, &counted, &counter, NULL));
    CHECK(fi_cntr_wait(counter, (uint64_t)fi_cntr_read(counter) + 1, 1) == -FI_ETIMEDOUT, "nothing counts there");
    OK(fi_close(&counter->fid));
    counted.flags = 1;
    CHECK(fi_cntr_open(pair.domain, &counted, &counter, NULL) == -FI_EOPNOTSUPP, "no such flag");
    counted.flags = 0;
    counted.events = (enum fi_cntr_events)77;
    CHECK(fi_cntr_open(pair.domain, &counted, &counter, NULL) == -FI_EOPNOTSUPP, "no such events");
    char name[64];
    size_t name_len = sizeof name;
    fi_addr_t known = pair.peer;
    OK(fi_getname(&ep->fid, name, &name_len));
    CHECK(fi_av_insert(pair.av, name, 1, &known, FI_AV_USER_ID, NULL) == -FI_EBADFLAGS, "no such flag");
    CHECK(fi_av_insert(pair.av, NULL, 1, &known, 0, NULL) == -FI_EINVAL, "no addresses");
    CHECK(fi_av_insert(pair.av, NULL, 0, NULL, 0, NULL) == 0, "none are asked for");
    CHECK(fi_av_remove(pair.av, NULL, 1, 0) == -FI_EINVAL, "no addresses");
    CHECK(fi_av_remove(pair.av, NULL, 0, 0) == 0, "none are to go");
    CHECK(known == pair.peer, "nothing was inserted");
    struct fid_mr *mr;
    CHECK(fi_mr_reg(pair.domain, &byte, 1, FI_SEND, 0, 0, FI_RMA_EVENT, &mr, NULL) == -FI_EBADFLAGS, "no such flag");
    struct iovec memory[2] = {{&byte, 1}, {&byte, 1}};
    CHECK(fi_mr_regv(pair.domain, memory, 2, FI_SEND, 0, 0, 0, &mr, NULL) == -FI_EINVAL, "one stretch at a time");
    CHECK(fi_mr_regv(pair.domain, memory, 0, FI_SEND, 0, 0, 0, &mr, NULL) == -FI_EINVAL, "no stretch");
    CHECK(fi_mr_regattr(pair.domain, NULL, 0, &mr) == -FI_EINVAL, "no attributes");
    struct fi_mr_attr region = {.mr_iov = memory, .iov_count = 1, .access = FI_SEND};
    CHECK(fi_mr_regattr(pair.domain, &region, FI_RMA_EVENT, &mr) == -FI_EBADFLAGS, "no such flag");
    CHECK(fi_mr_reg(pair.domain, NULL, 8, FI_SEND, 0, 0, 0, &mr, NULL) < 0, "no memory there");
    CHECK(fi_mr_reg(pair.domain, &byte, 1, 1, 0, 0, 0, &mr, NULL) == -FI_EINVAL, "no such right");
    CHECK(fi_mr_reg(pair.domain, &byte, 1, FI_SEND, 1, 0, 0, &mr, NULL) == -FI_EINVAL, "the offset is reserved");
    region.auth_key_size = 8;
    CHECK(fi_mr_regattr(pair.domain, &region, 0, &mr) == -FI_EINVAL, "no authorization keys");
    pair_close(&pair);
  }
}

void test_events(void) {
  struct pair pair;
  struct wish wish = {"efa", FI_MSG, FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE, 0, 0, 0};
  pair_open(&pair, &wish);
  struct fi_eq_attr attr = {.size = 4, .flags = FI_WRITE, .wait_obj = FI_WAIT_UNSPEC};
  struct fid_eq *eq;
  OK(fi_eq_open(pair.fabric, &attr, &eq, NULL));
  uint32_t event = 0;
  struct fi_eq_entry in = {&pair.ep->fid, &pair, 42}, out = {0};
  CHECK(fi_eq_read(eq, &event, &out, sizeof out, 0) == -FI_EAGAIN, "empty");
  CHECK(fi_eq_sread(eq, &event, &out, sizeof out, 10, 0) == -FI_EAGAIN, "empty for a while");
  CHECK(fi_eq_write(eq, FI_NOTIFY, &in, sizeof in, 0) == sizeof in, "an event of our own");
  CHECK(fi_eq_read(eq, &event, &out, 4, 0) == -FI_ETOOSMALL, "no room");
  CHECK(fi_eq_read(eq, &event, &out, sizeof out, FI_PEEK) == sizeof out, "a look");
  CHECK(fi_eq_sread(eq, &event, &out, sizeof out, -1, 0) == sizeof out && event == FI_NOTIFY && out.data == 42, "it");
  struct fi_eq_err_entry error = {0};
  CHECK(fi_eq_readerr(eq, &error, 0) == -FI_EAGAIN, "no errors");
  struct fid_ep *bound;
  OK(fi_endpoint(pair.domain, pair.info, &bound, NULL));
  OK(fi_ep_bind(bound, &eq->fid, 0));
  CHECK(fi_ep_bind(bound, &eq->fid, 0) == -FI_EINVAL, "one is enough");
  CHECK(fi_close(&eq->fid) == -FI_EBUSY, "an endpoint has it");
  OK(fi_close(&bound->fid));
  CHECK(fi_close(&pair.fabric->fid) == -FI_EBUSY, "in use");
  OK(fi_close(&eq->fid));
  pair_close(&pair);
}
