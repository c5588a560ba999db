/*
 * A process with one SRD queue pair that executes commands from standard input. The first line of output has its
 * address (in libfabric's format), and its memory's address and key. An answer is a line that begins with @.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#define CHECK(condition)                                                                                                          \
	do {                                                                                                                      \
		if (!(condition)) {                                                                                               \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);                         \
			exit(1);                                                                                                  \
		}                                                                                                                 \
	} while (0)

/* In seconds. Only ends a run that would otherwise hang. */
enum { HANG_LIMIT = 120 };
enum { SIZE = 4 << 20, QKEY = 0x4321, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

/* Same layout as libfabric's efa_ep_addr. */
struct address {
	uint8_t gid[16];
	uint16_t qpn, pad;
	uint32_t qkey;
	uint64_t reserved;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq_ex *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr, *source_mr;
static uint64_t *memory, *source;
static struct ibv_ah *ah;
static struct address to;
/* Completions of sends and receives that haven't been asked for yet. */
static char sent[64], received[64];

static void open_queue_pair(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	memory = aligned_alloc(4096, SIZE);
	source = aligned_alloc(4096, SIZE);
	CHECK(pd && memory && source);
	memset(memory, 0, SIZE);
	mr = ibv_reg_mr(pd, memory, SIZE, ALL);
	source_mr = ibv_reg_mr(pd, source, SIZE, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_cq_init_attr_ex of_cq = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS };
	cq = ibv_create_cq_ex(context, &of_cq);
	CHECK(mr && source_mr && cq);
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .qp_type = IBV_QPT_DRIVER, .pd = pd,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct efadv_qp_init_attr srd = { .driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD };
	qp = efadv_create_qp_ex(context, &attr, &srd, sizeof(srd));
	CHECK(qp);
	struct ibv_qp_attr state = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	CHECK(!ibv_modify_qp(qp, &state, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	state.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &state, IBV_QP_STATE));
	state.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &state, IBV_QP_STATE | IBV_QP_SQ_PSN));
	struct address own = { .qpn = (uint16_t)qp->qp_num, .qkey = QKEY };
	union ibv_gid gid;
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	memcpy(own.gid, &gid, sizeof(own.gid));
	printf("@");
	for (size_t i = 0; i < sizeof(own); i++)
		printf("%02x", ((unsigned char *)&own)[i]);
	printf(" %" PRIu64 " %u\n", (uint64_t)(uintptr_t)memory, mr->rkey);
}

static void connect_to(const char *hex)
{
	for (size_t i = 0; i < sizeof(to); i++) {
		unsigned byte;
		CHECK(sscanf(hex + 2 * i, "%2x", &byte) == 1);
		((unsigned char *)&to)[i] = (unsigned char)byte;
	}
	struct ibv_ah_attr attr = { .port_num = 1, .is_global = 1 };
	memcpy(&attr.grh.dgid, to.gid, sizeof(to.gid));
	if (ah)
		CHECK(!ibv_destroy_ah(ah));
	ah = ibv_create_ah(pd, &attr);
	CHECK(ah);
}

static uint64_t value(uint64_t seed, size_t i)
{
	return seed * 0x9e3779b9 + i;
}

static void fill(uint64_t *words, uint64_t seed, size_t len)
{
	for (size_t i = 0; i < len / 8; i++)
		words[i] = value(seed, i);
}

static bool matches(const uint64_t *words, uint64_t seed, size_t len)
{
	for (size_t i = 0; i < len / 8; i++)
		if (((volatile const uint64_t *)words)[i] != value(seed, i))
			return false;
	return true;
}

/* Polls completions until `wanted` has one, and prints it. */
static void answer(char *wanted)
{
	struct timespec start, now;
	clock_gettime(CLOCK_MONOTONIC, &start);
	while (!wanted[0]) {
		struct ibv_poll_cq_attr attr = { 0 };
		int error = ibv_start_poll(cq, &attr);
		clock_gettime(CLOCK_MONOTONIC, &now);
		CHECK(now.tv_sec - start.tv_sec < HANG_LIMIT);
		if (error == ENOENT)
			continue;
		CHECK(!error);
		if (ibv_wc_read_opcode(cq) == IBV_WC_RECV)
			snprintf(received, sizeof(received), "%d %u %u %u", cq->status, ibv_wc_read_byte_len(cq),
				 be32toh(ibv_wc_read_imm_data(cq)), ibv_wc_read_src_qp(cq));
		else
			snprintf(sent, sizeof(sent), "%d", cq->status);
		ibv_end_poll(cq);
	}
	printf("@%s\n", wanted);
	wanted[0] = 0;
}

static void post(uint32_t len)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	ibv_wr_set_sge(ex, source_mr->lkey, (uintptr_t)source, len);
	ibv_wr_set_ud_addr(ex, ah, to.qpn, to.qkey);
	CHECK(!ibv_wr_complete(ex));
	answer(sent);
}

int main(void)
{
	char line[512], word[16], hex[128];
	setvbuf(stdout, NULL, _IOLBF, 0);
	open_queue_pair();
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	while (fgets(line, sizeof(line), stdin)) {
		uint64_t a = 0, b = 0, c = 0, d = 0;
		CHECK(sscanf(line, "%15s", word) == 1);
		sscanf(line, "%*s %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c, &d);
		bool posts = !strcmp(word, "write") || !strcmp(word, "read") || !strcmp(word, "send");
		if (posts) {
			ibv_wr_start(ex);
			ex->wr_id = 1;
			ex->wr_flags = IBV_SEND_SIGNALED;
		}
		if (!strcmp(word, "connect")) {
			CHECK(sscanf(line, "%*s %127s", hex) == 1);
			connect_to(hex);
			printf("@ok\n");
		} else if (!strcmp(word, "write")) {
			/* address, key, bytes, seed */
			fill(source, d, c);
			ibv_wr_rdma_write(ex, (uint32_t)b, a);
			post((uint32_t)c);
		} else if (!strcmp(word, "read")) {
			/* address, key, bytes */
			ibv_wr_rdma_read(ex, (uint32_t)b, a);
			post((uint32_t)c);
		} else if (!strcmp(word, "send")) {
			/* bytes, seed, immediate data */
			fill(source, b, a);
			ibv_wr_send_imm(ex, htobe32((uint32_t)c));
			post((uint32_t)a);
		} else if (!strcmp(word, "receive")) {
			struct ibv_sge sge = { (uintptr_t)memory, (uint32_t)a, mr->lkey };
			struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
			CHECK(!ibv_post_recv(qp, &wr, &bad));
			printf("@ok\n");
		} else if (!strcmp(word, "received")) {
			answer(received);
		} else if (!strcmp(word, "fill")) {
			fill(memory, a, SIZE);
			printf("@ok\n");
		} else if (!strcmp(word, "matches")) {
			/* seed, bytes; checks the memory, or what a read fetched */
			printf("@%s\n", matches(memory, a, b) ? "true" : "false");
		} else if (!strcmp(word, "fetched")) {
			printf("@%s\n", matches(source, a, b) ? "true" : "false");
		} else {
			CHECK(!strcmp(word, "exit"));
			break;
		}
	}
	if (ah)
		CHECK(!ibv_destroy_ah(ah));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) && !ibv_dereg_mr(mr) && !ibv_dereg_mr(source_mr));
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	free(memory);
	free(source);
	return 0;
}
