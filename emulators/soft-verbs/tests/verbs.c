/* Runs one part (see the usage message) of a verbs test on one software card: verbs PART. Prints "PART: good" at the
 * end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

/* Newer than release 44's headers. */
struct ibv_comp_cntr;
struct comp_cntr_init_attr { uint32_t comp_mask; uint32_t type; uint32_t flags; };
struct memory_location {
	uint8_t *ptr;
	struct { uint64_t offset; int32_t fd; uint32_t reserved; } dmabuf;
	uint8_t type;
	uint8_t reserved[7];
};
struct dv_comp_cntr_init_attr {
	uint64_t comp_mask;
	uint32_t flags;
	uint32_t reserved;
	struct memory_location comp, err;
};
struct attach_attr { uint32_t comp_mask; uint32_t op_mask; };
struct wq_attr {
	uint64_t comp_mask;
	uint8_t *buffer;
	uint32_t entry_size, num_entries;
	uint32_t *doorbell;
	uint32_t max_batch;
	uint16_t caps;
	uint8_t reserved[2];
};
struct cq_init_attr {
	uint64_t comp_mask, wc_flags, flags;
	struct { uint8_t *buffer; uint64_t length, offset; int32_t fd; uint32_t reserved; } memory;
};
struct cq_attr {
	uint64_t comp_mask;
	uint8_t *buffer;
	uint32_t entry_size, num_entries;
	uint32_t *doorbell;
};
struct cntr_caps { uint64_t max_value; uint32_t max_counters, attach_ops; };
struct sq_depth_attr { uint64_t comp_mask; uint32_t flags, max_send_sge, max_rdma_sge, max_inline_data; };
struct mr_attr { uint64_t comp_mask; uint16_t validity, recv, read, write; };
extern int _ibv_query_comp_cntr_caps(struct ibv_context *, struct cntr_caps *, size_t);
extern int efadv_get_max_sq_depth(struct ibv_context *, struct sq_depth_attr *, uint32_t);
extern int efadv_query_mr(struct ibv_mr *, struct mr_attr *, uint32_t);
extern int efadv_query_cq(struct ibv_cq *, struct cq_attr *, uint32_t);
extern int efadv_query_qp_wqs(struct ibv_qp *, struct wq_attr *, struct wq_attr *, uint32_t);
extern struct ibv_comp_cntr *efadv_create_comp_cntr(struct ibv_context *, struct comp_cntr_init_attr *,
						    struct dv_comp_cntr_init_attr *, uint32_t);
extern int ibv_destroy_comp_cntr(struct ibv_comp_cntr *);
extern int ibv_read_comp_cntr(struct ibv_comp_cntr *, uint64_t *);
extern int ibv_set_comp_cntr(struct ibv_comp_cntr *, uint64_t);
extern int ibv_inc_comp_cntr(struct ibv_comp_cntr *, uint64_t);
extern int ibv_read_err_comp_cntr(struct ibv_comp_cntr *, uint64_t *);
extern int ibv_qp_attach_comp_cntr(struct ibv_qp *, struct ibv_comp_cntr *, struct attach_attr *);

extern int ibv_query_port_speed(struct ibv_context *, uint32_t, uint64_t *);

#define CHECK(condition)                                                                                                          \
	do {                                                                                                                      \
		if (!(condition)) {                                                                                               \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);                         \
			exit(1);                                                                                                  \
		}                                                                                                                 \
	} while (0)
/* Checks that a call returns null with this errno. */
#define REFUSES(call, number)                                                                                                     \
	do {                                                                                                                      \
		errno = 0;                                                                                                        \
		CHECK((call) == NULL);                                                                                            \
		CHECK(errno == (number));                                                                                         \
	} while (0)

enum { SIZE = 4096, HALF = SIZE / 2, QKEY = 0x1234, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static unsigned char *memory;

static void open_device(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count == 1 && list[0] && !list[1]);
	CHECK(!strcmp(ibv_get_device_name(list[0]), "rdmap0s0"));
	CHECK(ibv_get_device_index(list[0]) == -1);
	context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	memory = aligned_alloc(SIZE, SIZE);
	CHECK(memory);
	memset(memory, 0, SIZE);
	mr = ibv_reg_mr(pd, memory, SIZE, ALL);
	CHECK(mr && mr->addr == memory && mr->length == SIZE && mr->context == context && mr->pd == pd);
	/* The type and access flags, as in rdma-core's private struct verbs_mr. */
	const int *driver = (const int *)(mr + 1);
	CHECK(driver[0] == 0 && driver[1] == ALL);
	struct ibv_ah_attr attr = { .port_num = 1, .is_global = 1 };
	CHECK(!ibv_query_gid(context, 1, 0, &attr.grh.dgid));
	ah = ibv_create_ah(pd, &attr);
	CHECK(ah);
}

static void close_device(void)
{
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	CHECK(!ibv_destroy_ah(ah));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	free(memory);
}

static struct ibv_cq_ex *extended_cq(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 100, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct efadv_cq_init_attr dv = { .wc_flags = EFADV_WC_EX_WITH_SGID };
	struct ibv_cq_ex *cq = efadv_create_cq(context, &attr, &dv, sizeof(dv));
	CHECK(cq && cq->cqe == 128);
	return cq;
}

static struct ibv_qp_init_attr_ex srd_attr(struct ibv_cq *cq)
{
	return (struct ibv_qp_init_attr_ex){
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_DRIVER, .pd = pd,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 32 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
			IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
	};
}

static struct ibv_qp *srd(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex attr = srd_attr(cq);
	struct efadv_qp_init_attr dv = { .driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD };
	struct ibv_qp *qp = efadv_create_qp_ex(context, &attr, &dv, sizeof(dv));
	CHECK(qp && qp->state == IBV_QPS_RESET && qp->qp_num);
	return qp;
}

static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
}

static void to_rtr(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static void to_rts(struct ibv_qp *qp)
{
	if (qp->state == IBV_QPS_INIT)
		to_rtr(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	CHECK(qp->state == IBV_QPS_RTS);
}

static int post_receive(struct ibv_qp *qp, uint64_t id, size_t at, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)memory + at, .length = len, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	int error = ibv_post_recv(qp, &wr, &bad);
	CHECK(!error == !bad);
	return error;
}

/* In seconds. Only ends a run that would otherwise hang. */
enum { HANG_LIMIT = 120 };

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Starts polling an extended queue, waiting until it has a completion. */
static void wait_ex(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };
	double until = now() + HANG_LIMIT;
	int error;
	while ((error = ibv_start_poll(cq, &attr)) == ENOENT)
		CHECK(now() < until);
	CHECK(!error);
}

static struct ibv_wc wait_plain(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	double until = now() + HANG_LIMIT;
	int got;
	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		CHECK(now() < until);
	CHECK(got == 1);
	return wc;
}

/* Gives the card time to work, and finds nothing. It sleeps because each poll of an empty queue gives up the core. */
static void nothing_for_a_while(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	usleep(20000);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
}

static void start(struct ibv_qp_ex *qp, uint64_t id)
{
	ibv_wr_start(qp);
	qp->wr_id = id;
	qp->wr_flags = IBV_SEND_SIGNALED;
}

static int finish(struct ibv_qp_ex *qp, uint32_t peer, size_t at, uint32_t len)
{
	ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)memory + at, len);
	ibv_wr_set_ud_addr(qp, ah, peer, QKEY);
	return ibv_wr_complete(qp);
}

static void part_srd(void)
{
	struct ibv_cq_ex *send = extended_cq(), *recv = extended_cq();
	struct ibv_qp *a = srd(ibv_cq_ex_to_cq(send)), *b = srd(ibv_cq_ex_to_cq(recv));
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a);
	CHECK(qp);
	to_init(a);
	to_init(b);
	to_rts(a);
	to_rts(b);
	struct efadv_ah_attr ahn = { 0 };
	CHECK(!efadv_query_ah(ah, &ahn, sizeof(ahn)) && ahn.ahn);

	/* Sends two buffers with immediate data. */
	for (int round = 0; round < 100; round++) {
		for (int i = 0; i < 100; i++)
			memory[i] = (unsigned char)(i + round);
		memset(memory + HALF, 0, 200);
		CHECK(!post_receive(b, 1000 + round, HALF, 200));
		start(qp, (uint64_t)round << 40 | 7);
		ibv_wr_send_imm(qp, htobe32(0xa1b2c3d4));
		struct ibv_sge parts[2] = { { (uintptr_t)memory, 60, mr->lkey }, { (uintptr_t)memory + 60, 40, mr->lkey } };
		ibv_wr_set_sge_list(qp, 2, parts);
		ibv_wr_set_ud_addr(qp, ah, b->qp_num, QKEY);
		CHECK(!ibv_wr_complete(qp));
		wait_ex(recv);
		CHECK(recv->status == IBV_WC_SUCCESS && recv->wr_id == 1000u + round);
		CHECK(ibv_wc_read_opcode(recv) == IBV_WC_RECV && ibv_wc_read_byte_len(recv) == 100);
		CHECK(ibv_wc_read_wc_flags(recv) == IBV_WC_WITH_IMM && ibv_wc_read_imm_data(recv) == htobe32(0xa1b2c3d4));
		CHECK(ibv_wc_read_qp_num(recv) == b->qp_num && ibv_wc_read_src_qp(recv) == a->qp_num);
		CHECK(ibv_wc_read_slid(recv) == ahn.ahn && ibv_wc_read_vendor_err(recv) == 0);
		union ibv_gid gid;
		CHECK(efadv_wc_read_sgid(efadv_cq_from_ibv_cq_ex(recv), &gid) == -ENOENT);
		CHECK(ibv_next_poll(recv) == ENOENT);
		ibv_end_poll(recv);
		CHECK(!memcmp(memory, memory + HALF, 100));
		wait_ex(send);
		CHECK(send->status == IBV_WC_SUCCESS && send->wr_id == ((uint64_t)round << 40 | 7));
		CHECK(ibv_wc_read_opcode(send) == IBV_WC_SEND);
		ibv_end_poll(send);
	}

	/* A write with immediate data waits for a receive and consumes it. The receive's buffer is left unchanged. */
	memset(memory, 0x5a, 512);
	start(qp, 1);
	ibv_wr_rdma_write_imm(qp, mr->rkey, (uintptr_t)memory + HALF, htobe32(5));
	CHECK(!finish(qp, b->qp_num, 0, 512));
	nothing_for_a_while(ibv_cq_ex_to_cq(send));
	nothing_for_a_while(ibv_cq_ex_to_cq(recv));
	CHECK(!post_receive(b, 77, SIZE - 64, 64));
	wait_ex(recv);
	CHECK(recv->wr_id == 77 && memory[SIZE - 64] == 0);
	CHECK(ibv_wc_read_opcode(recv) == IBV_WC_RECV_RDMA_WITH_IMM && ibv_wc_read_byte_len(recv) == 512);
	CHECK(ibv_wc_read_imm_data(recv) == htobe32(5));
	ibv_end_poll(recv);
	wait_ex(send);
	CHECK(send->wr_id == 1 && ibv_wc_read_opcode(send) == IBV_WC_RDMA_WRITE);
	ibv_end_poll(send);
	CHECK(!memcmp(memory, memory + HALF, 512));
	memset(memory + HALF, 0x77, 512);
	start(qp, 2);
	ibv_wr_rdma_read(qp, mr->rkey, (uintptr_t)memory + HALF);
	CHECK(!finish(qp, b->qp_num, 0, 512));
	wait_ex(send);
	CHECK(send->status == IBV_WC_SUCCESS && send->wr_id == 2);
	ibv_end_poll(send);
	CHECK(memory[0] == 0x77 && memory[511] == 0x77 && memory[512] == 0);

	/* Inline data, and an aborted session. */
	CHECK(!post_receive(b, 3, HALF, 64));
	start(qp, 9);
	ibv_wr_send(qp);
	ibv_wr_abort(qp);
	start(qp, 3);
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, "thirty-two bytes of inline data", 32);
	ibv_wr_set_ud_addr(qp, ah, b->qp_num, QKEY);
	CHECK(!ibv_wr_complete(qp));
	wait_ex(recv);
	CHECK(recv->wr_id == 3 && ibv_wc_read_byte_len(recv) == 32 && !strcmp((char *)memory + HALF, "thirty-two bytes of inline data"));
	ibv_end_poll(recv);
	wait_ex(send);
	CHECK(send->wr_id == 3);
	ibv_end_poll(send);

	CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(send)) == EBUSY);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b));
	CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(send)) && !ibv_destroy_cq(ibv_cq_ex_to_cq(recv)));
}

static struct ibv_qp *ud(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = 5, .max_recv_wr = 5, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	CHECK(qp && !ibv_qp_to_qp_ex(qp) && attr.cap.max_send_wr == 8);
	return qp;
}

static int send_plain(struct ibv_qp *qp, uint32_t peer, uint32_t qkey, uint32_t lkey, unsigned flags, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)memory, len, lkey };
	struct ibv_send_wr wr = { .wr_id = 11, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = flags }, *bad = NULL;
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = peer;
	wr.wr.ud.remote_qkey = qkey;
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(!error == !bad);
	return error;
}

static void part_ud(void)
{
	struct ibv_cq *send = ibv_create_cq(context, 10, NULL, NULL, 0), *recv = ibv_create_cq(context, 10, NULL, NULL, 0);
	CHECK(send && recv && send->cqe == 16);
	struct ibv_qp *a = ud(send), *b = ud(recv);
	to_init(a);
	to_init(b);
	to_rts(a);
	/* It only receives. */
	to_rtr(b);
	memset(memory, 0x33, 100);
	/* Without a receive it's dropped, and the sender doesn't find out. */
	CHECK(!send_plain(a, b->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 100));
	CHECK(wait_plain(send).status == IBV_WC_SUCCESS);
	CHECK(!post_receive(b, 21, HALF, 140));
	CHECK(!send_plain(a, b->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 100));
	struct ibv_wc wc = wait_plain(recv);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 21 && wc.byte_len == 140 && wc.src_qp == a->qp_num && wc.opcode == IBV_WC_RECV);
	CHECK(!memcmp(memory, memory + HALF + 40, 100) && !memory[HALF + 39] && !memory[HALF + 140]);
	wc = wait_plain(send);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 11 && wc.opcode == IBV_WC_SEND);
	CHECK(ibv_poll_cq(recv, 1, &wc) == 0);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_cq(send) && !ibv_destroy_cq(recv));
}

static void part_unanswered(void)
{
	struct ibv_cq *send = ibv_create_cq(context, 10, NULL, NULL, 0), *recv = ibv_create_cq(context, 10, NULL, NULL, 0);
	CHECK(send && recv);
	struct ibv_qp *a = ud(send), *b = ud(recv);
	to_init(a);
	to_init(b);
	to_rts(a);
	to_rtr(b);
	/* A datagram completes when it's sent, even to a queue pair that refuses it or is gone, or to a card that
	 * doesn't exist. */
	CHECK(!send_plain(a, b->qp_num, QKEY + 1, mr->lkey, IBV_SEND_SIGNALED, 100));
	CHECK(wait_plain(send).status == IBV_WC_SUCCESS);
	uint32_t gone = b->qp_num;
	CHECK(!ibv_destroy_qp(b) && !send_plain(a, gone, QKEY, mr->lkey, IBV_SEND_SIGNALED, 100));
	CHECK(wait_plain(send).status == IBV_WC_SUCCESS);
	struct ibv_ah_attr nowhere = { .port_num = 1, .is_global = 1 };
	CHECK(!ibv_query_gid(context, 1, 0, &nowhere.grh.dgid));
	nowhere.grh.dgid.raw[15] ^= 1;
	struct ibv_ah *here = ah;
	CHECK((ah = ibv_create_ah(pd, &nowhere)));
	CHECK(!send_plain(a, gone, QKEY, mr->lkey, IBV_SEND_SIGNALED, 100));
	CHECK(wait_plain(send).status == IBV_WC_SUCCESS);
	CHECK(!ibv_destroy_ah(ah));
	ah = here;
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_cq(send) && !ibv_destroy_cq(recv));
}

/* A new queue pair gets the number of the one destroyed last, except with the fault. */
static void part_numbers(void)
{
	const char *faults = getenv("SOFTEFA_FAULTS");
	int oldest_first = faults && strstr(faults, "old_qpns");
	struct ibv_cq *cq = ibv_create_cq(context, 10, NULL, NULL, 0);
	CHECK(cq);
	struct ibv_qp *first = srd(cq), *second = srd(cq);
	uint32_t number = first->qp_num;
	CHECK(!ibv_destroy_qp(second) && !ibv_destroy_qp(first));
	struct ibv_qp *next = srd(cq);
	CHECK((next->qp_num == number) == !oldest_first);
	CHECK(!ibv_destroy_qp(next) && !ibv_destroy_cq(cq));
}

/* Programs try types to find out which ones a card has. */
static void part_types(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 10, NULL, NULL, 0);
	CHECK(cq);
	struct ibv_qp_init_attr rc = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };
	REFUSES(ibv_create_qp(pd, &rc), EOPNOTSUPP);
	struct ibv_qp_init_attr_ex whole = srd_attr(cq);
	whole.qp_type = IBV_QPT_RC;
	REFUSES(ibv_create_qp_ex(context, &whole), EOPNOTSUPP);
	CHECK(!ibv_destroy_cq(cq));
	/* libfabric sets its receive queue depth to half of it, and 2.1 to 2.4 have room for 8,192. */
	struct efadv_device_attr limits = { 0 };
	CHECK(!efadv_query_device(context, &limits, sizeof(limits)) && limits.max_rq_wr == 16384);
}

/* Waits until a completion queue entry's phase shows that the card has written it, and leaves the entry there. */
static void wait_entry(const struct cq_attr *ring, uint32_t index)
{
	volatile uint8_t *flags = ring->buffer + (size_t)(index % ring->num_entries) * ring->entry_size + 3;
	double until = now() + HANG_LIMIT;
	while ((*flags & 1) == (index / ring->num_entries & 1))
		CHECK(now() < until);
}

static void part_events(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	CHECK(channel && channel->fd >= 0);
	int of_send = 0, of_recv = 0;
	struct ibv_cq *send = ibv_create_cq(context, 16, &of_send, channel, 0), *recv = ibv_create_cq(context, 16, &of_recv, channel, 31);
	CHECK(send && recv);
	struct ibv_qp *a = ud(send), *b = ud(recv);
	to_init(a);
	to_init(b);
	to_rts(a);
	to_rts(b);
	struct pollfd fd = { channel->fd, POLLIN, 0 };
	CHECK(ibv_req_notify_cq(recv, 1) == EOPNOTSUPP);
	for (int round = 0; round < 20; round++) {
		CHECK(poll(&fd, 1, 0) == 0);
		CHECK(!ibv_req_notify_cq(recv, 0));
		CHECK(!post_receive(b, 5, HALF, 140));
		CHECK(!send_plain(a, b->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 100));
		struct ibv_cq *cq = NULL;
		void *of = NULL;
		CHECK(poll(&fd, 1, HANG_LIMIT * 1000) == 1);
		CHECK(!ibv_get_cq_event(channel, &cq, &of));
		CHECK(cq == recv && of == &of_recv);
		ibv_ack_cq_events(recv, 1);
		CHECK(wait_plain(recv).wr_id == 5 && wait_plain(send).wr_id == 11);
	}
	/*
	 * The same with only the mapped doorbell and the descriptor, as libfabric does it: the doorbell takes the
	 * consumer index, the number of events taken, and the arming bit.
	 */
	struct cq_attr ring;
	CHECK(!efadv_query_cq(recv, &ring, sizeof(ring)) && ring.doorbell);
	uint32_t consumed = 20;
	for (uint32_t taken = 0; taken < 9; taken++) {
		CHECK(poll(&fd, 1, 0) == 0);
		/* Completions already waiting when the doorbell is written raise an event too. */
		bool early = taken % 3 == 1;
		if (!early)
			*(volatile uint32_t *)ring.doorbell = 1u << 31 | (taken & 3) << 29 | (consumed & 0xffff);
		CHECK(!post_receive(b, 5, HALF, 140));
		CHECK(!send_plain(a, b->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 100));
		CHECK(wait_plain(send).wr_id == 11);
		if (early) {
			wait_entry(&ring, consumed);
			CHECK(poll(&fd, 1, 0) == 0);
			*(volatile uint32_t *)ring.doorbell = 1u << 31 | (taken & 3) << 29 | (consumed & 0xffff);
		}
		uint64_t handle = 0;
		CHECK(poll(&fd, 1, HANG_LIMIT * 1000) == 1);
		CHECK(read(channel->fd, &handle, sizeof(handle)) == sizeof(handle) && handle == (uintptr_t)recv);
		CHECK(wait_plain(recv).wr_id == 5);
		consumed++;
	}
	ibv_ack_cq_events(recv, 9);
	/* The program makes the descriptor non-blocking. */
	CHECK(!fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK));
	struct ibv_cq *cq;
	void *of;
	CHECK(ibv_get_cq_event(channel, &cq, &of) == -1 && errno == EAGAIN);
	CHECK(ibv_destroy_comp_channel(channel) == EBUSY);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_cq(send) && !ibv_destroy_cq(recv));
	CHECK(!ibv_destroy_comp_channel(channel));
	CHECK(!fcntl(context->async_fd, F_SETFL, O_NONBLOCK));
	struct ibv_async_event event;
	CHECK(ibv_get_async_event(context, &event) == -1 && errno == EAGAIN);
}

/* In the state SQD, posted requests wait until the queue pair is in RTS again. */
static void part_states(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp = srd(cq);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD };
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == EINVAL);
	to_init(qp);
	to_rts(qp);
	for (int round = 0; round < 3; round++) {
		attr.qp_state = IBV_QPS_SQD;
		CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) && qp->state == IBV_QPS_SQD);
		CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX));
		CHECK(!post_receive(qp, 4, HALF, 64));
		for (int i = 0; i < 16; i++)
			CHECK(!send_plain(qp, qp->qp_num, i ? QKEY + 1 : QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
		CHECK(send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8) == ENOMEM);
		nothing_for_a_while(cq);
		attr.qp_state = IBV_QPS_RTS;
		CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
		int good = 0;
		for (int i = 0; i < 17; i++)
			good += wait_plain(cq).status == IBV_WC_SUCCESS;
		CHECK(good == 2);
	}
	/* The error state flushes what is waiting. */
	attr.qp_state = IBV_QPS_SQD;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	CHECK(!send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
	attr.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	CHECK(wait_plain(cq).status == IBV_WC_WR_FLUSH_ERR);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

/* Address handles belong to a domain; parent domains and thread domains. */
static void part_domains(void)
{
	struct ibv_pd *second = ibv_alloc_pd(context);
	struct ibv_ah_attr at = { .port_num = 1, .is_global = 1 };
	CHECK(second && !ibv_query_gid(context, 1, 0, &at.grh.dgid));
	struct ibv_ah *foreign = ibv_create_ah(second, &at), *own = ah, *again = ibv_create_ah(pd, &at);
	CHECK(foreign && again);
	struct efadv_ah_attr numbers[3];
	CHECK(!efadv_query_ah(foreign, &numbers[0], sizeof(*numbers)) && !efadv_query_ah(own, &numbers[1], sizeof(*numbers)));
	CHECK(!efadv_query_ah(again, &numbers[2], sizeof(*numbers)));
	CHECK(numbers[0].ahn != numbers[1].ahn && numbers[1].ahn == numbers[2].ahn);
	struct ibv_cq_ex *cq = extended_cq();
	struct ibv_qp *qp = srd(ibv_cq_ex_to_cq(cq));
	to_init(qp);
	to_rts(qp);
	ah = foreign;
	CHECK(!send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
	CHECK(wait_plain(ibv_cq_ex_to_cq(cq)).status == IBV_WC_LOC_QP_OP_ERR);
	ah = own;

	/* A queue pair whose domain has no handle for the sender learns the sender's GID. */
	struct ibv_mr *of_pd = mr;
	struct ibv_ah *of_second = foreign;
	CHECK(!ibv_destroy_ah(of_second));
	struct ibv_qp_init_attr_ex attr = srd_attr(ibv_cq_ex_to_cq(cq));
	attr.pd = second;
	struct efadv_qp_init_attr dv = { .driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD };
	struct ibv_qp *receiver = efadv_create_qp_ex(context, &attr, &dv, sizeof(dv));
	CHECK(receiver);
	to_init(receiver);
	to_rts(receiver);
	mr = ibv_reg_mr(second, memory, SIZE, ALL);
	CHECK(mr && !post_receive(receiver, 6, HALF, 64));
	CHECK(!send_plain(qp, receiver->qp_num, QKEY, of_pd->lkey, IBV_SEND_SIGNALED, 8));
	for (int i = 0; i < 2; i++) {
		wait_ex(cq);
		CHECK(cq->status == IBV_WC_SUCCESS);
		if (ibv_wc_read_opcode(cq) == IBV_WC_RECV) {
			union ibv_gid gid;
			CHECK(ibv_wc_read_slid(cq) == 0xffff && !efadv_wc_read_sgid(efadv_cq_from_ibv_cq_ex(cq), &gid));
			CHECK(!memcmp(&gid, &at.grh.dgid, sizeof(gid)));
		}
		ibv_end_poll(cq);
	}
	CHECK(!ibv_destroy_qp(receiver) && !ibv_dereg_mr(mr));
	mr = of_pd;

	struct ibv_td_init_attr init = { .comp_mask = 1 };
	REFUSES(ibv_alloc_td(context, &init), EOPNOTSUPP);
	init.comp_mask = 0;
	struct ibv_td *td = ibv_alloc_td(context, &init);
	CHECK(td && td->context == context);
	struct ibv_parent_domain_init_attr of_parent = { .td = td };
	REFUSES(ibv_alloc_parent_domain(context, &of_parent), EINVAL);
	of_parent.pd = second;
	of_parent.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	REFUSES(ibv_alloc_parent_domain(context, &of_parent), EOPNOTSUPP);
	of_parent.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	struct ibv_pd *parent = ibv_alloc_parent_domain(context, &of_parent);
	CHECK(parent && parent->handle == second->handle);
	of_parent.pd = parent;
	REFUSES(ibv_alloc_parent_domain(context, &of_parent), EINVAL);
	CHECK(ibv_dealloc_td(td) == EBUSY && ibv_dealloc_pd(second) == EBUSY);
	struct ibv_cq_init_attr_ex of_cq = { .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = second };
	REFUSES(ibv_create_cq_ex(context, &of_cq), EINVAL);
	of_cq.parent_domain = parent;
	struct ibv_cq_ex *inner = ibv_create_cq_ex(context, &of_cq);
	CHECK(inner && ibv_dealloc_pd(parent) == EBUSY);
	attr = srd_attr(ibv_cq_ex_to_cq(inner));
	attr.pd = parent;
	struct ibv_qp *within = efadv_create_qp_ex(context, &attr, &dv, sizeof(dv));
	CHECK(within && !ibv_destroy_cq(ibv_cq_ex_to_cq(inner)) == 0);
	/* The parent domain's queue pairs can use memory of the domain it holds. */
	mr = ibv_reg_mr(second, memory, SIZE, ALL);
	ah = ibv_create_ah(parent, &at);
	CHECK(mr && ah);
	to_init(within);
	to_rts(within);
	CHECK(!post_receive(within, 8, HALF, 64));
	CHECK(!send_plain(within, within->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
	CHECK(wait_plain(ibv_cq_ex_to_cq(inner)).status == IBV_WC_SUCCESS && wait_plain(ibv_cq_ex_to_cq(inner)).status == IBV_WC_SUCCESS);
	CHECK(!ibv_destroy_ah(ah) && !ibv_dereg_mr(mr) && !ibv_destroy_qp(within) && !ibv_destroy_cq(ibv_cq_ex_to_cq(inner)));
	CHECK(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td) && !ibv_dealloc_pd(second));
	mr = of_pd;
	ah = own;
	CHECK(!ibv_destroy_ah(again) && !ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

/* The GID's port is reserved from the start, but nothing listens on it until a queue pair can receive. */
static void part_port(void)
{
	union ibv_gid gid;
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	struct sockaddr_in address = { .sin_family = AF_INET };
	memcpy(&address.sin_addr, gid.raw + 2, 4);
	memcpy(&address.sin_port, gid.raw + 6, 2);
	CHECK(address.sin_port);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp = srd(cq);
	to_init(qp);
	int before = socket(AF_INET, SOCK_STREAM, 0), after = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(before, (struct sockaddr *)&address, sizeof(address)) == -1 && errno == ECONNREFUSED);
	CHECK(bind(before, (struct sockaddr *)&address, sizeof(address)) == -1 && errno == EADDRINUSE);
	to_rtr(qp);
	/* The state change waits only so long for the wire, and a loaded machine may take longer to open it. */
	while (connect(after, (struct sockaddr *)&address, sizeof(address))) {
		CHECK(errno == ECONNREFUSED);
		usleep(10000);
	}
	CHECK(!close(before) && !close(after));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

static void part_counters(void)
{
	static uint64_t words[2] __attribute__((aligned(8)));
	struct comp_cntr_init_attr attr = { 0 };
	struct dv_comp_cntr_init_attr dv = { .flags = 3, .comp = { .ptr = (uint8_t *)&words[0] }, .err = { .ptr = (uint8_t *)&words[1] } };
	words[0] = words[1] = 99;
	struct ibv_comp_cntr *cntr = efadv_create_comp_cntr(context, &attr, &dv, sizeof(dv));
	CHECK(cntr && words[0] == 0 && words[1] == 0);
	dv.comp.ptr++;
	REFUSES(efadv_create_comp_cntr(context, &attr, &dv, sizeof(dv)), EINVAL);
	dv.flags = 4;
	REFUSES(efadv_create_comp_cntr(context, &attr, &dv, sizeof(dv)), EOPNOTSUPP);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp = srd(cq);
	/* Sends, and peers' writes. */
	struct attach_attr events = { .op_mask = 32 };
	to_init(qp);
	CHECK(!ibv_qp_attach_comp_cntr(qp, cntr, &events));
	to_rtr(qp);
	events.op_mask = 1;
	CHECK(!ibv_qp_attach_comp_cntr(qp, cntr, &events));
	CHECK(ibv_qp_attach_comp_cntr(qp, cntr, &events) == EBUSY);
	events.op_mask = 64;
	CHECK(ibv_qp_attach_comp_cntr(qp, cntr, &events) == EOPNOTSUPP);
	to_rts(qp);
	events.op_mask = 2;
	CHECK(ibv_qp_attach_comp_cntr(qp, cntr, &events) == EINVAL);
	CHECK(ibv_destroy_comp_cntr(cntr) == EBUSY);
	CHECK(!ibv_inc_comp_cntr(cntr, 10));
	CHECK(!post_receive(qp, 1, HALF, 64));
	CHECK(!send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 10));
	wait_plain(cq);
	wait_plain(cq);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	start(ex, 2);
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + HALF);
	CHECK(!finish(ex, qp->qp_num, 0, 8));
	CHECK(wait_plain(cq).status == IBV_WC_SUCCESS);
	/* A failed send counts as an error. */
	CHECK(!send_plain(qp, qp->qp_num, QKEY + 1, mr->lkey, IBV_SEND_SIGNALED, 10));
	CHECK(wait_plain(cq).status == IBV_WC_REM_INV_RD_REQ_ERR);
	uint64_t value = 0, errors = 0;
	double until = now() + HANG_LIMIT;
	while (words[1] != 1)
		CHECK(now() < until && !ibv_read_err_comp_cntr(cntr, &errors));
	CHECK(!ibv_read_comp_cntr(cntr, &value) && value == 12 && words[0] == 12);
	CHECK(!ibv_set_comp_cntr(cntr, 3) && words[0] == 3);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_cntr(cntr));
}

/*
 * The calls of libfabric's efa provider, in its order, for queues that a GPU drives: a completion queue and a counter
 * in a dma-buf, an SRD queue pair with 128-byte requests, and its rings' addresses. The program then posts into the
 * ring itself.
 */
static void part_gda(void)
{
	int fd = memfd_create("a dma-buf", MFD_CLOEXEC);
	CHECK(fd >= 0 && !ftruncate(fd, 2 * SIZE));
	unsigned char *shared = mmap(NULL, 2 * SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(shared != MAP_FAILED);
	struct efadv_device_attr device;
	CHECK(!efadv_query_device(context, &device, sizeof(device)) && device.device_caps & EFADV_DEVICE_ATTR_CAPS_RDMA_READ);
	struct cntr_caps caps = { 0 };
	enum { READS = 4, WRITES = 16 };
	CHECK(!_ibv_query_comp_cntr_caps(context, &caps, sizeof(caps)));
	CHECK(caps.max_value == INT32_MAX && caps.max_counters && (caps.attach_ops & (READS | WRITES)) == (READS | WRITES));
	/* Wide requests halve the depth. */
	struct sq_depth_attr depth = { .flags = 1, .max_inline_data = 80 };
	CHECK(efadv_get_max_sq_depth(context, &depth, sizeof(depth)) == (int)device.max_sq_wr / 2);
	struct ibv_mr *data = ibv_reg_dmabuf_mr(pd, SIZE, SIZE, 0x7000000, fd, ALL);
	CHECK(data);
	struct mr_attr of_data;
	CHECK(!efadv_query_mr(data, &of_data, sizeof(of_data)) && !of_data.validity);

	struct ibv_cq_init_attr_ex attr = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct cq_init_attr memory_of_cq = { .flags = 1, .memory = { shared, 64 * 32 - 1, 0, fd, 0 } };
	REFUSES(efadv_create_cq(context, &attr, (void *)&memory_of_cq, sizeof(memory_of_cq)), EINVAL);
	memory_of_cq.memory.length++;
	struct ibv_cq_ex *cq = efadv_create_cq(context, &attr, (void *)&memory_of_cq, sizeof(memory_of_cq));
	CHECK(cq);
	struct cq_attr ring;
	CHECK(!efadv_query_cq(ibv_cq_ex_to_cq(cq), &ring, sizeof(ring)));
	CHECK(ring.buffer == shared && ring.entry_size == 32 && ring.num_entries == 64);

	struct comp_cntr_init_attr plain = { 0 };
	struct dv_comp_cntr_init_attr place = { .flags = 3, .comp = { .dmabuf = { 2048 + 8, fd, 0 }, .type = 1 },
		.err = { .dmabuf = { 2048 + 16, fd, 0 }, .type = 1 } };
	struct ibv_comp_cntr *cntr = efadv_create_comp_cntr(context, &plain, &place, sizeof(place));
	CHECK(cntr);
	volatile uint64_t *count = (uint64_t *)(shared + 2048 + 8), *errors = count + 1;

	struct ibv_qp_init_attr_ex of_qp = srd_attr(ibv_cq_ex_to_cq(cq));
	of_qp.cap.max_inline_data = 80;
	/* 128-byte requests, and unsolicited receives of writes. */
	struct { uint64_t comp_mask; uint32_t type; uint16_t flags; uint8_t sl, reserved; uint64_t wr_flags; } dv = {
		.type = EFADV_QP_DRIVER_TYPE_SRD, .flags = 1, .sl = 8 };
	struct ibv_qp *qp = efadv_create_qp_ex(context, &of_qp, (void *)&dv, sizeof(dv));
	CHECK(qp);
	/* One counter for two kinds of requests, attached in the RESET state. */
	struct attach_attr events = { .op_mask = READS };
	CHECK(!ibv_qp_attach_comp_cntr(qp, cntr, &events));
	events.op_mask = WRITES;
	CHECK(!ibv_qp_attach_comp_cntr(qp, cntr, &events));
	to_init(qp);
	to_rts(qp);
	CHECK(!(ibv_query_qp_data_in_order(qp, IBV_WR_RDMA_WRITE, 1) & ~1));
	struct wq_attr sends, receives;
	CHECK(!efadv_query_qp_wqs(qp, &sends, &receives, sizeof(sends)));
	CHECK(sends.entry_size == 128 && sends.num_entries == 16 && sends.max_batch == 16 && sends.caps == 1);

	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	start(ex, 1);
	ibv_wr_rdma_write(ex, data->rkey, 0x7000000 + 100);
	ibv_wr_set_inline_data(ex, "eighty bytes fit into a request of 128 bytes, and the card writes them as they are", 80);
	ibv_wr_set_ud_addr(ex, ah, qp->qp_num, QKEY);
	CHECK(!ibv_wr_complete(ex));
	double until = now() + HANG_LIMIT;
	while (*count != 1)
		CHECK(now() < until && !*errors);
	CHECK(!memcmp(shared + SIZE + 100, "eighty bytes fit", 16));
	/* The first completion's flags carry the first lap's phase. */
	CHECK(((volatile uint8_t *)shared)[3] & 1);

	/* A read into the program's memory. */
	memset(memory, 0, 80);
	start(ex, 2);
	ibv_wr_rdma_read(ex, data->rkey, 0x7000000 + 100);
	CHECK(!finish(ex, qp->qp_num, 0, 80));
	while (*count != 2)
		CHECK(now() < until && !*errors);
	CHECK(!memcmp(memory, shared + SIZE + 100, 80));

	/* The same request again, but the program writes it and rings the doorbell. */
	memset(shared + SIZE, 0, SIZE);
	memcpy(sends.buffer + 256, sends.buffer, 128);
	__atomic_store_n(sends.doorbell, 3, __ATOMIC_RELEASE);
	while (*count != 3)
		CHECK(now() < until && !*errors);
	CHECK(!memcmp(shared + SIZE + 100, "eighty bytes fit", 16));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) && !ibv_destroy_comp_cntr(cntr) && !ibv_dereg_mr(data));
	close(fd);
}

/* Looks up a CUDA driver function by its name in the library. */
static void *of_driver(const char *name)
{
	static void *library;
	if (!library)
		library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	void *function = dlsym(library, name);
	CHECK(function);
	return function;
}

/* GPU memory, part of which is registered through dma-bufs: writes, reads, sends and receives move its bytes. */
static void part_gpu(void)
{
	int (*init)(unsigned) = of_driver("cuInit"), (*retain)(void **, int) = of_driver("cuDevicePrimaryCtxRetain"),
	    (*set)(void *) = of_driver("cuCtxSetCurrent"), (*allocate)(uint64_t *, size_t) = of_driver("cuMemAlloc_v2"),
	    (*to_gpu)(uint64_t, const void *, size_t) = of_driver("cuMemcpyHtoD_v2"),
	    (*from_gpu)(void *, uint64_t, size_t) = of_driver("cuMemcpyDtoH_v2"),
	    (*export)(void *, uint64_t, size_t, int, uint64_t) = of_driver("cuMemGetHandleForAddressRange");
	enum { ALLOCATED = 16 * 65536, START = 3 * 65536, IOVA = 0x7000000 };
	unsigned char *bytes = malloc(ALLOCATED), *seen = malloc(ALLOCATED);
	void *gpu;
	uint64_t base;
	int fd = -1;
	CHECK(bytes && seen && !init(0) && !retain(&gpu, 0) && !set(gpu) && !allocate(&base, ALLOCATED));
	for (int i = 0; i < ALLOCATED; i++)
		bytes[i] = (unsigned char)(i * 11 + (i >> 8));
	CHECK(!to_gpu(base, bytes, ALLOCATED));
	/* The dma-buf begins inside the allocation, and the region inside the dma-buf. */
	CHECK(!export(&fd, base + START, 4 * 65536, 1, 0) && fd >= 0);
	struct ibv_mr *region = ibv_reg_dmabuf_mr(pd, 100, 2 * 65536, IOVA, fd, ALL);
	CHECK(region);
	unsigned char *first = bytes + START + 100;
	/* The queue pair's write and error counts, after the region in the same dma-buf. */
	enum { WRITES = 16, COUNTS = 3 * 65536 + 8 };
	struct comp_cntr_init_attr plain = { 0 };
	struct dv_comp_cntr_init_attr place = { .flags = 3, .comp = { .dmabuf = { COUNTS, fd, 0 }, .type = 1 },
		.err = { .dmabuf = { COUNTS + 8, fd, 0 }, .type = 1 } };
	struct ibv_comp_cntr *cntr = efadv_create_comp_cntr(context, &plain, &place, sizeof(place));
	CHECK(cntr && !close(fd));
	memset(bytes + START + COUNTS, 0, 16);

	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(cq);
	struct ibv_qp *qp = srd(cq);
	struct attach_attr events = { .op_mask = WRITES };
	CHECK(!ibv_qp_attach_comp_cntr(qp, cntr, &events));
	to_init(qp);
	to_rts(qp);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	for (int i = 0; i < SIZE; i++)
		memory[i] = (unsigned char)(i * 3 + 1);
	/* Writes from the host, with odd lengths to odd addresses. */
	const struct { uint32_t len; uint64_t at; } rows[] = { { 1, 0 }, { 77, 5 }, { 1000, 4095 }, { SIZE, 65001 }, { 9, 2 * 65536 - 9 } };
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		start(ex, i);
		ibv_wr_rdma_write(ex, region->rkey, IOVA + rows[i].at);
		CHECK(!finish(ex, qp->qp_num, 0, rows[i].len));
		CHECK(wait_plain(cq).status == IBV_WC_SUCCESS);
		memcpy(first + rows[i].at, memory, rows[i].len);
	}
	bytes[START + COUNTS] = 5;
	CHECK(!from_gpu(seen, base, ALLOCATED) && !memcmp(seen, bytes, ALLOCATED));
	/* Reads into host memory. */
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		memset(memory, 0, SIZE);
		start(ex, i);
		ibv_wr_rdma_read(ex, region->rkey, IOVA + rows[i].at + (i == 1));
		CHECK(!finish(ex, qp->qp_num, 0, rows[i].len));
		CHECK(wait_plain(cq).status == IBV_WC_SUCCESS);
		CHECK(!memcmp(memory, first + rows[i].at + (i == 1), rows[i].len));
	}
	/* A send from GPU memory to GPU memory. */
	struct ibv_sge sge = { .addr = IOVA + 90001, .length = 3000, .lkey = region->lkey };
	struct ibv_recv_wr wr = { .wr_id = 8, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	CHECK(!ibv_post_recv(qp, &wr, &bad));
	start(ex, 9);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, region->lkey, IOVA + 333, 3000);
	ibv_wr_set_ud_addr(ex, ah, qp->qp_num, QKEY);
	CHECK(!ibv_wr_complete(ex));
	for (int i = 0; i < 2; i++)
		CHECK(wait_plain(cq).status == IBV_WC_SUCCESS);
	memcpy(first + 90001, first + 333, 3000);
	CHECK(!from_gpu(seen, base, ALLOCATED) && !memcmp(seen, bytes, ALLOCATED));
	/* Past the end of the region. */
	start(ex, 10);
	ibv_wr_rdma_write(ex, region->rkey, IOVA + 2 * 65536 - 8);
	CHECK(!finish(ex, qp->qp_num, 0, 9));
	CHECK(wait_plain(cq).status == IBV_WC_REM_ACCESS_ERR);
	bytes[START + COUNTS + 8] = 1;
	CHECK(!from_gpu(seen, base, ALLOCATED) && !memcmp(seen, bytes, ALLOCATED));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dereg_mr(region) && !ibv_destroy_comp_cntr(cntr));
	free(bytes);
	free(seen);
}

static void refused_objects(void)
{
	struct ibv_port_attr port;
	union ibv_gid gid;
	CHECK(ibv_query_port(context, 2, &port) == EINVAL);
	uint64_t speed = 0;
	CHECK(ibv_query_port_speed(context, 2, &speed) == EINVAL && !ibv_query_port_speed(context, 1, &speed) && speed == 1000);
	CHECK(!ibv_query_port(context, 1, &port) && port.state == IBV_PORT_ACTIVE && port.gid_tbl_len == 1);
	CHECK(ibv_query_gid(context, 1, 1, &gid) == -1);
	struct efadv_device_attr device;
	CHECK(efadv_query_device(context, &device, 8) == EINVAL);
	CHECK(!efadv_query_device(context, &device, sizeof(device)) && device.max_sq_wr == 4096 && device.inline_buf_size == 32);

	REFUSES(ibv_reg_mr(pd, memory, 0, ALL), EINVAL);
	REFUSES(ibv_reg_mr(pd, NULL, SIZE, ALL), EFAULT);
	REFUSES(ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	REFUSES(ibv_reg_mr(pd, memory, SIZE, ALL | IBV_ACCESS_REMOTE_ATOMIC), EOPNOTSUPP);
	REFUSES(ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, -1, ALL), EBADF);
	struct ibv_ah_attr at = { .port_num = 2, .is_global = 1, .grh.dgid = gid };
	REFUSES(ibv_create_ah(pd, &at), EINVAL);
	at.port_num = 1;
	at.grh.dgid.raw[0] = 0xfe;
	REFUSES(ibv_create_ah(pd, &at), EINVAL);
	REFUSES(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
	REFUSES(ibv_create_cq(context, 1 << 20, NULL, NULL, 0), EINVAL);
	REFUSES(ibv_create_cq(context, 16, NULL, NULL, context->num_comp_vectors), EINVAL);
	struct ibv_cq_init_attr_ex cq = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };
	REFUSES(ibv_create_cq_ex(context, &cq), EOPNOTSUPP);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1 } };
	REFUSES(ibv_create_srq(pd, &srq), EOPNOTSUPP);
	CHECK(ibv_attach_mcast(NULL, &gid, 0) == EOPNOTSUPP);
}

static void refused_queue_pairs(struct ibv_cq *cq)
{
	struct efadv_qp_init_attr srd_type = { .driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD };
	struct ibv_context *other = ibv_open_device(context->device);
	CHECK(other);
	struct ibv_pd *foreign = ibv_alloc_pd(other);
	CHECK(foreign);
#define CREATE(change, dv, number)                                                                                                \
	do {                                                                                                                      \
		struct ibv_qp_init_attr_ex attr = srd_attr(cq);                                                                   \
		struct efadv_qp_init_attr type = dv;                                                                              \
		change;                                                                                                           \
		REFUSES(efadv_create_qp_ex(context, &attr, &type, sizeof(type)), number);                                         \
	} while (0)
	CREATE(attr.pd = foreign, srd_type, EINVAL);
	CREATE(attr.comp_mask &= ~IBV_QP_INIT_ATTR_PD, srd_type, EINVAL);
	CREATE(attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS, srd_type, EOPNOTSUPP);
	CREATE(attr.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, srd_type, EOPNOTSUPP);
	CREATE(attr.qp_type = IBV_QPT_RC, srd_type, EINVAL);
	CREATE(type.driver_qp_type = 7, srd_type, EOPNOTSUPP);
	CREATE(type.comp_mask = 1, srd_type, EINVAL);
	CREATE(attr.recv_cq = NULL, srd_type, EINVAL);
	CREATE(attr.cap.max_send_wr = 4097, srd_type, EINVAL);
	CREATE(attr.cap.max_recv_wr = 1 << 20, srd_type, EINVAL);
	CREATE(attr.cap.max_send_sge = 3, srd_type, EINVAL);
	CREATE(attr.cap.max_inline_data = 81, srd_type, EINVAL);
	struct ibv_qp_init_attr rc = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };
	REFUSES(ibv_create_qp(pd, &rc), EOPNOTSUPP);
	CHECK(!ibv_dealloc_pd(foreign) && !ibv_close_device(other));
}

static void part_refused(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(cq);
	refused_objects();
	refused_queue_pairs(cq);
	struct ibv_qp *qp = srd(cq);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .port_num = 1 };

	/* State changes. */
	CHECK(post_receive(qp, 1, 0, 64) == EINVAL);
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == EINVAL);
	attr.qp_state = IBV_QPS_INIT;
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT) == EINVAL);
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY | IBV_QP_ACCESS_FLAGS) == EOPNOTSUPP);
	to_init(qp);
	CHECK(send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8) == EINVAL);
	to_rts(qp);
	attr.qp_state = IBV_QPS_INIT;
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == EINVAL);
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_QKEY, &(struct ibv_qp_init_attr){ 0 }));
	CHECK(attr.qp_state == IBV_QPS_RTS && attr.qkey == QKEY);

	/* Requests the driver refuses. */
	CHECK(send_plain(qp, qp->qp_num, QKEY, mr->lkey, 0, 8) == EINVAL);
	CHECK(send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED | IBV_SEND_FENCE, 8) == EINVAL);
	CHECK(send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED | IBV_SEND_INLINE, 33) == EINVAL);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	start(ex, 1);
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory);
	ibv_wr_set_inline_data(ex, memory, 8);
	ibv_wr_set_ud_addr(ex, ah, qp->qp_num, QKEY);
	CHECK(ibv_wr_complete(ex) == EINVAL);
	for (int i = 0; i < 17; i++)
		CHECK(post_receive(qp, 100 + i, HALF, 64) == (i < 16 ? 0 : ENOMEM));

	/* Requests the card refuses. */
	CHECK(!send_plain(qp, qp->qp_num, QKEY, mr->lkey + 1, IBV_SEND_SIGNALED, 8));
	CHECK(wait_plain(cq).status == IBV_WC_LOC_PROT_ERR);
	CHECK(!send_plain(qp, 0xfff0, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
	CHECK(wait_plain(cq).status == IBV_WC_REM_INV_RD_REQ_ERR);
	start(ex, 3);
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + SIZE);
	CHECK(!finish(ex, qp->qp_num, 0, 8));
	CHECK(wait_plain(cq).status == IBV_WC_REM_ACCESS_ERR);
	/* A region in another domain. */
	struct ibv_pd *second = ibv_alloc_pd(context);
	struct ibv_mr *foreign = ibv_reg_mr(second, memory, SIZE, ALL);
	CHECK(second && foreign);
	CHECK(!send_plain(qp, qp->qp_num, QKEY, foreign->lkey, IBV_SEND_SIGNALED, 8));
	CHECK(wait_plain(cq).status == IBV_WC_LOC_PROT_ERR);
	CHECK(ibv_dealloc_pd(second) == EBUSY);
	CHECK(!ibv_dereg_mr(foreign) && !ibv_dealloc_pd(second));

	/* The error state flushes what is posted; objects in use can't be destroyed. */
	attr.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	for (int i = 0; i < 16; i++) {
		struct ibv_wc wc = wait_plain(cq);
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 100u + i);
	}
	CHECK(send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8) == EINVAL);
	CHECK(ibv_destroy_cq(cq) == EBUSY);

	/* After a reset a queue pair works again, with empty rings. */
	attr.qp_state = IBV_QPS_RESET;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE) && qp->state == IBV_QPS_RESET);
	CHECK(post_receive(qp, 1, HALF, 64) == EINVAL);
	to_init(qp);
	CHECK(!post_receive(qp, 200, HALF, 64));
	to_rts(qp);
	CHECK(!send_plain(qp, qp->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
	for (int i = 0; i < 2; i++) {
		struct ibv_wc wc = wait_plain(cq);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (wc.opcode == IBV_WC_RECV ? 200 : 11));
	}

	/* A doorbell out of range: the card completes a request that was never posted, and the queue pair goes into
	 * the error state. */
	struct ibv_qp *broken = srd(cq);
	to_init(broken);
	to_rts(broken);
	struct wq_attr sends, receives;
	CHECK(efadv_query_qp_wqs(broken, &sends, &receives, 8) == EINVAL);
	CHECK(!efadv_query_qp_wqs(broken, &sends, &receives, sizeof(sends)));
	CHECK(sends.num_entries == 16 && sends.entry_size == 64 && receives.num_entries == 32 && receives.entry_size == 16);
	*(volatile uint32_t *)sends.doorbell = 1000;
	struct ibv_wc wc;
	double until = now() + HANG_LIMIT;
	int got;
	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		CHECK(now() < until);
	CHECK(got == -EINVAL);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(broken) && !ibv_destroy_cq(cq));
}

/* A table row: the call, the error it returned, and the error that rdma-core's efa and the kernel driver return. */
struct row { const char *call; int got, wanted; };
#define ROW(call, wanted) { #call, (call), (wanted) }
#define NULL_ROW(call, wanted) { #call, (errno = 0, (call) ? -1 : errno), (wanted) }

static void check_rows(const struct row *rows, size_t count)
{
	int wrong = 0;
	for (size_t i = 0; i < count; i++)
		if (rows[i].got != rows[i].wanted) {
			fprintf(stderr, "%s: %d, not %d\n", rows[i].call, rows[i].got, rows[i].wanted);
			wrong++;
		}
	CHECK(!wrong);
}
#define CHECK_ROWS(rows) check_rows(rows, sizeof(rows) / sizeof(*rows))

static struct ibv_qp *srd_with(struct ibv_cq *cq, struct ibv_cq *recv_cq, const char *dv, uint32_t size)
{
	struct ibv_qp_init_attr_ex attr = srd_attr(cq);
	attr.recv_cq = recv_cq;
	return efadv_create_qp_ex(context, &attr, (void *)dv, size);
}

static struct ibv_qp *ud_with(struct ibv_cq *cq, unsigned type, uint64_t ops, unsigned mask)
{
	struct ibv_qp_init_attr_ex attr = srd_attr(cq);
	attr.qp_type = type;
	attr.send_ops_flags = ops;
	attr.comp_mask |= mask;
	return ibv_create_qp_ex(context, &attr);
}

static struct ibv_qp *driver_qp(struct ibv_cq *cq, unsigned type, uint32_t driver_type)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = type, .cap = { 1, 1, 1, 1, 0 } };
	return efadv_create_driver_qp(pd, &attr, driver_type);
}

static struct ibv_cq_ex *cq_with(const char *dv, uint32_t size, unsigned mask, unsigned flags)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .comp_mask = mask, .flags = flags };
	return efadv_create_cq(context, &attr, (void *)dv, size);
}

static int modify(struct ibv_qp *qp, unsigned state, int mask, struct ibv_qp_attr attr)
{
	attr.qp_state = state;
	return ibv_modify_qp(qp, &attr, mask);
}

static int attach(struct ibv_qp *qp, struct ibv_comp_cntr *cntr, uint32_t comp_mask, uint32_t op_mask)
{
	struct attach_attr attr = { comp_mask, op_mask };
	return ibv_qp_attach_comp_cntr(qp, cntr, &attr);
}

static int receive_of(struct ibv_qp *qp, int sges)
{
	struct ibv_sge list[3] = { { 0 } };
	struct ibv_recv_wr wr = { .sg_list = list, .num_sge = sges }, *bad;
	return ibv_post_recv(qp, &wr, &bad);
}

static int send_of(struct ibv_qp *qp, unsigned opcode, int sges, struct ibv_ah *to)
{
	struct ibv_sge list[3] = { { 0 } };
	struct ibv_send_wr wr = { .sg_list = list, .num_sge = sges, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.ud.ah = to;
	return ibv_post_send(qp, &wr, &bad);
}

static void part_table(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_context *other = ibv_open_device(context->device);
	struct ibv_cq *foreign_cq = ibv_create_cq(other, 64, NULL, NULL, 0);
	struct comp_cntr_init_attr plain = { 0 };
	struct dv_comp_cntr_init_attr place = { 0 };
	struct ibv_comp_cntr *foreign_cntr = efadv_create_comp_cntr(other, &plain, &place, sizeof(place));
	struct ibv_comp_cntr *cntr = efadv_create_comp_cntr(context, &plain, &place, sizeof(place));
	CHECK(cq && other && foreign_cq && cntr && foreign_cntr);
	static char zero[128], tail[128] = { [100] = 1 }, mask[128] = { 1 }, type[128] = { [8] = 1 }, flag[128] = { [12] = 8 };
	static char reserved[128] = { [15] = 1 }, hints[128] = { [16] = 2 }, wc_flags[128] = { [8] = 4 };
	struct efadv_ah_attr ah_attr;
	struct cq_attr cq_attr;
	struct efadv_device_attr device;
	struct ibv_device_attr device_attr;
	const struct row objects[] = {
		ROW(efadv_query_device(context, &device, 0), EINVAL),
		ROW(efadv_query_ah(ah, &ah_attr, 1), EINVAL),
		ROW(efadv_query_cq(cq, &cq_attr, 8), EINVAL),
		ROW(ibv_query_device(context, NULL), EINVAL),
		ROW(ibv_query_device(NULL, &device_attr), EINVAL),
		NULL_ROW(ibv_alloc_pd(NULL), EINVAL),
		NULL_ROW(ibv_create_ah(pd, NULL), EINVAL),
		NULL_ROW(ibv_create_ah(NULL, &(struct ibv_ah_attr){ .port_num = 1 }), EINVAL),
		NULL_ROW(ibv_reg_mr_iova2(NULL, memory, SIZE, 0, ALL), EINVAL),
		NULL_ROW(ibv_reg_mr_iova2(pd, memory, SIZE, 0, IBV_ACCESS_MW_BIND), EOPNOTSUPP),
		NULL_ROW(ibv_reg_mr_iova2(pd, memory, SIZE, 0, IBV_ACCESS_ZERO_BASED), EOPNOTSUPP),
		NULL_ROW(ibv_reg_mr_iova2(pd, memory, (size_t)1 << 60, 0, ALL), EFAULT),
		ROW(ibv_dereg_mr(NULL), EINVAL),
		ROW(ibv_destroy_ah(NULL), EINVAL),
		ROW(ibv_dealloc_pd(NULL), EINVAL),
		ROW(ibv_destroy_cq(NULL), EINVAL),
		ROW(ibv_destroy_qp(NULL), EINVAL),
		ROW(ibv_destroy_comp_channel(NULL), EINVAL),
		ROW(ibv_destroy_comp_cntr(NULL), EINVAL),
		NULL_ROW(cq_with(mask, 64, 0, 0), EINVAL),
		NULL_ROW(cq_with(tail, 128, 0, 0), EINVAL),
		NULL_ROW(cq_with(zero, 8, 0, 0), EINVAL),
		NULL_ROW(cq_with(wc_flags, 64, 0, 0), EOPNOTSUPP),
		NULL_ROW(cq_with(zero, 64, 1u << 5, 0), EOPNOTSUPP),
		NULL_ROW(cq_with(zero, 64, IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN), EOPNOTSUPP),
		NULL_ROW(cq_with(zero, 64, IBV_CQ_INIT_ATTR_MASK_PD, 0), EINVAL),
	};
	CHECK_ROWS(objects);
	const struct row queue_pairs[] = {
		NULL_ROW(srd_with(cq, cq, zero, 4), EINVAL),
		NULL_ROW(srd_with(cq, cq, tail, 128), EINVAL),
		NULL_ROW(srd_with(cq, cq, mask, 24), EINVAL),
		NULL_ROW(srd_with(cq, cq, reserved, 24), EINVAL),
		NULL_ROW(srd_with(cq, cq, type, 24), EOPNOTSUPP),
		NULL_ROW(srd_with(cq, cq, flag, 24), EOPNOTSUPP),
		NULL_ROW(srd_with(cq, cq, hints, 24), EOPNOTSUPP),
		NULL_ROW(srd_with(cq, foreign_cq, zero, 24), EINVAL),
		NULL_ROW(srd_with(foreign_cq, cq, zero, 24), EINVAL),
		NULL_ROW(ud_with(cq, IBV_QPT_DRIVER, IBV_QP_EX_WITH_SEND, 0), EOPNOTSUPP),
		NULL_ROW(ud_with(cq, IBV_QPT_RC, IBV_QP_EX_WITH_SEND, 0), EOPNOTSUPP),
		NULL_ROW(ud_with(cq, IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_READ, 0), EOPNOTSUPP),
		NULL_ROW(ud_with(cq, IBV_QPT_UD, IBV_QP_EX_WITH_SEND, IBV_QP_INIT_ATTR_RX_HASH), EOPNOTSUPP),
		NULL_ROW(driver_qp(cq, IBV_QPT_UD, 0), EINVAL),
		NULL_ROW(driver_qp(cq, IBV_QPT_DRIVER, 1), EOPNOTSUPP),
		NULL_ROW(ibv_create_qp(pd, NULL), EINVAL),
	};
	CHECK_ROWS(queue_pairs);

	struct ibv_qp *qp = srd(cq), *of_ud = ud(cq);
	const int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, rts = IBV_QP_STATE | IBV_QP_SQ_PSN;
	const struct ibv_qp_attr none = { .port_num = 0 }, port = { .port_num = 1 }, pkey = { .port_num = 1, .pkey_index = 1 };
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init_attr;
	const struct row before[] = {
		ROW(ibv_modify_qp(NULL, &attr, IBV_QP_STATE), EINVAL),
		ROW(ibv_modify_qp(qp, NULL, IBV_QP_STATE), EINVAL),
		ROW(modify(qp, IBV_QPS_INIT, init, none), EINVAL),
		ROW(modify(qp, IBV_QPS_INIT, init, pkey), EOPNOTSUPP),
		ROW(modify(qp, IBV_QPS_INIT, init | IBV_QP_TIMEOUT, port), EOPNOTSUPP),
		ROW(modify(qp, IBV_QPS_INIT, init | IBV_QP_SQ_PSN, port), EINVAL),
		ROW(modify(qp, IBV_QPS_RTR, IBV_QP_STATE, none), EINVAL),
		ROW(modify(qp, IBV_QPS_ERR, IBV_QP_STATE, none), EINVAL),
		ROW(modify(qp, 99, IBV_QP_STATE, none), EINVAL),
		ROW(ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT, &init_attr), EOPNOTSUPP),
		ROW(ibv_query_qp(qp, NULL, IBV_QP_STATE, &init_attr), EINVAL),
		ROW(attach(qp, cntr, 0, 0), EINVAL),
		ROW(attach(qp, cntr, 1, 1), EOPNOTSUPP),
		ROW(attach(qp, foreign_cntr, 0, 1), EINVAL),
		ROW(attach(qp, NULL, 0, 1), EINVAL),
		ROW(modify(qp, IBV_QPS_INIT, init, port), 0),
		ROW(modify(of_ud, IBV_QPS_INIT, init, port), 0),
		ROW(modify(qp, IBV_QPS_RTS, rts, none), EINVAL),
		ROW(modify(qp, IBV_QPS_SQD, IBV_QP_STATE, none), EINVAL),
		ROW(modify(qp, IBV_QPS_RTR, IBV_QP_STATE, none), 0),
		ROW(modify(of_ud, IBV_QPS_RTR, IBV_QP_STATE, none), 0),
		ROW(modify(qp, IBV_QPS_RTS, IBV_QP_STATE, none), EINVAL),
		/* Only SRD retries. */
		ROW(modify(of_ud, IBV_QPS_RTS, rts | IBV_QP_RNR_RETRY, none), EINVAL),
		ROW(modify(qp, IBV_QPS_RTS, rts | IBV_QP_CUR_STATE, none), EINVAL),
		ROW(modify(qp, IBV_QPS_RTS, rts | IBV_QP_RNR_RETRY, none), 0),
	};
	CHECK_ROWS(before);
	const struct row posts[] = {
		ROW(receive_of(qp, 3), EINVAL),
		ROW(receive_of(qp, -1), EINVAL),
		ROW(send_of(qp, IBV_WR_RDMA_WRITE, 0, ah), EINVAL),
		ROW(send_of(qp, IBV_WR_ATOMIC_CMP_AND_SWP, 0, ah), EINVAL),
		ROW(send_of(qp, IBV_WR_SEND, 3, ah), EINVAL),
		ROW(send_of(qp, IBV_WR_SEND, -1, ah), EINVAL),
		ROW(send_of(qp, IBV_WR_SEND, 0, NULL), EINVAL),
	};
	CHECK_ROWS(posts);

	/* Without retries, a send that finds no receive fails. */
	CHECK(!send_plain(qp, qp->qp_num, 0, mr->lkey, IBV_SEND_SIGNALED, 8));
	CHECK(wait_plain(cq).status == IBV_WC_RNR_RETRY_EXC_ERR);
	/* A receive doorbell beyond the ring, or one that moves backwards, puts the queue pair into the error state. */
	for (int back = 0; back < 2; back++) {
		struct ibv_qp *broken = srd(cq);
		to_init(broken);
		to_rts(broken);
		struct wq_attr sends, receives;
		CHECK(!efadv_query_qp_wqs(broken, &sends, &receives, sizeof(sends)));
		if (back) {
			CHECK(!post_receive(broken, 1, HALF, 64) && !send_plain(broken, broken->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
			CHECK(wait_plain(cq).status == IBV_WC_SUCCESS && wait_plain(cq).status == IBV_WC_SUCCESS);
		}
		*(volatile uint32_t *)receives.doorbell = back ? 0x10000000 : 0x100;
		CHECK(!send_plain(broken, broken->qp_num, QKEY, mr->lkey, IBV_SEND_SIGNALED, 8));
		/* One completion is for a receive that was never posted, so it has no id. */
		int failed = 0, unknown = 0;
		for (double until = now() + HANG_LIMIT; !failed || !unknown;) {
			struct ibv_wc wc;
			int got = ibv_poll_cq(cq, 1, &wc);
			CHECK(now() < until);
			failed += got == 1 && wc.status == IBV_WC_REM_INV_RD_REQ_ERR;
			unknown += got == -EINVAL;
		}
		CHECK(!ibv_destroy_qp(broken));
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(of_ud) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_cntr(cntr));
	/* The kernel closes what a program leaves open. */
	CHECK(!ibv_close_device(other));
}

/* A destructor called again refuses, and destroys nothing else. */
#define TWICE(call)                                                                                                               \
	do {                                                                                                                      \
		CHECK((call) == 0);                                                                                               \
		errno = 0;                                                                                                        \
		CHECK((call) == EINVAL && errno == EINVAL);                                                                       \
	} while (0)

static void part_destroyed(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list);
	struct ibv_context *other = ibv_open_device(list[0]), *left = ibv_open_device(list[0]);
	CHECK(other && left && ibv_alloc_pd(left));
	ibv_free_device_list(list);
	ibv_free_device_list(list);
	struct ibv_pd *domain = ibv_alloc_pd(context);
	struct ibv_td_init_attr init = { .comp_mask = 0 };
	struct ibv_td *td = ibv_alloc_td(context, &init);
	struct ibv_parent_domain_init_attr of_parent = { .pd = domain, .td = td };
	struct ibv_pd *parent = ibv_alloc_parent_domain(context, &of_parent);
	struct ibv_mr *region = ibv_reg_mr(domain, memory, SIZE, ALL);
	struct ibv_ah_attr at = { .port_num = 1, .is_global = 1 };
	CHECK(!ibv_query_gid(context, 1, 0, &at.grh.dgid));
	struct ibv_ah *handle = ibv_create_ah(domain, &at);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, channel, 0);
	struct comp_cntr_init_attr plain = { 0 };
	struct dv_comp_cntr_init_attr place = { 0 };
	struct ibv_comp_cntr *cntr = efadv_create_comp_cntr(context, &plain, &place, sizeof(place));
	CHECK(domain && td && parent && region && handle && channel && cq && cntr);
	struct ibv_qp *qp = srd(cq);
	/* An object of another kind, and an object in use, which stays open. */
	CHECK(ibv_dereg_mr((struct ibv_mr *)handle) == EINVAL && ibv_destroy_qp((struct ibv_qp *)memory) == EINVAL);
	CHECK(ibv_destroy_cq(cq) == EBUSY && ibv_dealloc_pd(domain) == EBUSY);
	TWICE(ibv_destroy_qp(qp));
	TWICE(ibv_destroy_cq(cq));
	TWICE(ibv_destroy_comp_channel(channel));
	TWICE(ibv_destroy_comp_cntr(cntr));
	TWICE(ibv_dereg_mr(region));
	TWICE(ibv_destroy_ah(handle));
	TWICE(ibv_dealloc_pd(parent));
	/* Called through the table, since the header's inline function reads the domain itself. */
	int (*dealloc_td)(struct ibv_td *) = verbs_get_ctx(context)->dealloc_td;
	TWICE(dealloc_td(td));
	TWICE(ibv_dealloc_pd(domain));
	TWICE(ibv_close_device(other));
	/* With a domain still open. */
	TWICE(ibv_close_device(left));
}

/* Sends to a queue pair of this process, over the handle. */
static void exchange(void)
{
	struct ibv_cq_ex *cq = extended_cq();
	struct ibv_qp *qp = srd(ibv_cq_ex_to_cq(cq));
	to_init(qp);
	to_rts(qp);
	for (int round = 0; round < 100; round++) {
		memory[0] = round;
		CHECK(!post_receive(qp, 1, HALF, 1));
		start(ibv_qp_to_qp_ex(qp), 2);
		ibv_wr_send(ibv_qp_to_qp_ex(qp));
		CHECK(!finish(ibv_qp_to_qp_ex(qp), qp->qp_num, 0, 1));
		for (int i = 0; i < 2; i++) {
			wait_ex(cq);
			CHECK(cq->status == IBV_WC_SUCCESS);
			ibv_end_poll(cq);
		}
		CHECK(memory[HALF] == memory[0]);
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

/* A forked child has a card of its own on the device and the domain that its parent opened, and everything else is
 * refused. */
static void part_fork(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp *qp = srd(cq);
	struct ibv_ah_attr attr = { .port_num = 1, .is_global = 1 };
	CHECK(cq && !ibv_query_gid(context, 1, 0, &attr.grh.dgid));
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		union ibv_gid gid;
		struct ibv_qp_attr qp_attr;
		struct ibv_qp_init_attr init;
		CHECK(ibv_query_qp(qp, &qp_attr, IBV_QP_STATE, &init) == EPERM && ibv_destroy_qp(qp) == EPERM);
		CHECK(ibv_dereg_mr(mr) == EPERM && ibv_destroy_ah(ah) == EPERM && ibv_destroy_cq(cq) == EPERM);
		CHECK(!ibv_query_gid(context, 1, 0, &gid) && memcmp(&gid, &attr.grh.dgid, sizeof(gid)));
		mr = ibv_reg_mr(pd, memory, SIZE, ALL);
		/* The GID that was read before the fork names the child's card too. */
		ah = ibv_create_ah(pd, &attr);
		CHECK(mr && ah);
		exchange();
		CHECK(!ibv_destroy_ah(ah) && !ibv_dereg_mr(mr));
		CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
		_exit(0);
	}
	exchange();
	int status = -1;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	exchange();
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

int main(int argc, char **argv)
{
	const struct { const char *name; void (*run)(void); } parts[] = {
		{ "srd", part_srd }, { "ud", part_ud }, { "events", part_events }, { "counters", part_counters },
		{ "gda", part_gda }, { "gpu", part_gpu }, { "refused", part_refused }, { "states", part_states }, { "domains", part_domains },
		{ "port", part_port }, { "table", part_table }, { "destroyed", part_destroyed },
		{ "unanswered", part_unanswered }, { "numbers", part_numbers }, { "types", part_types },
		{ "fork", part_fork },
	};
	for (size_t i = 0; argc == 2 && i < sizeof(parts) / sizeof(*parts); i++) {
		if (strcmp(argv[1], parts[i].name))
			continue;
		open_device();
		parts[i].run();
		close_device();
		printf("%s: good\n", parts[i].name);
		return 0;
	}
	fprintf(stderr, "usage: verbs srd|ud|events|counters|gda|gpu|refused|states|domains|port|table|destroyed|unanswered|numbers|types|fork\n");
	return 2;
}
