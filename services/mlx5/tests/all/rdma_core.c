/* The libibverbs and libmlx5 calls that open a card and create completion queues, compiled against their headers. A
   compressed queue holds the bytes that a ConnectX-7 wrote for 32 writes: a title, and an array in every eighth
   slot. */
#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <stdlib.h>
#include <string.h>
#undef ibv_query_port
#undef ibv_reg_mr

enum { SLOTS = 64, COMPLETIONS = 32, ARRAY = 8, COMPRESSED = 0x0c, WRITE = 8 };

struct mini {
    __be16 wqe_counter;
    uint8_t opcode, reserved;
    __be32 byte_cnt;
};

static struct ibv_device device;
static struct ibv_context context;
static struct ibv_cq_ex queue;
static union {
    struct mlx5_cqe64 cqe;
    struct mini minis[ARRAY];
} ring[SLOTS] __attribute__((aligned(4096)));
static __be32 record[2] __attribute__((aligned(8)));
static uint8_t page[4096] __attribute__((aligned(4096)));
static int queues;

struct ibv_device **ibv_get_device_list(int *count) {
    struct ibv_device **list = calloc(2, sizeof *list);
    list[0] = &device;
    *count = 1;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *of) { return of == &device ? "mlx5_stub" : NULL; }
struct ibv_context *ibv_open_device(struct ibv_device *of) {
    context.device = of;
    return &context;
}
int ibv_close_device(struct ibv_context *of) {
    if (of != &context || queues != 0)
        abort();
    return 0;
}
int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attr) {
    memset(attr, 0, sizeof *attr);
    attr->max_qp_wr = 1 << 15;
    attr->max_sge = 30;
    attr->max_cqe = 1 << 22;
    attr->device_cap_flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    return of == &context ? 0 : EINVAL;
}
int ibv_query_port(struct ibv_context *of, uint8_t port, struct _compat_ibv_port_attr *answer) {
    struct ibv_port_attr *attr = (struct ibv_port_attr *)answer;
    if (of != &context || port != 1)
        return EINVAL;
    attr->active_mtu = IBV_MTU_4096;
    attr->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}
struct ibv_cq *ibv_create_cq(struct ibv_context *of, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector) {
    queues++;
    return (struct ibv_cq *)&queue;
}
int ibv_destroy_cq(struct ibv_cq *cq) {
    queues--;
    return 0;
}

bool mlx5dv_is_supported(struct ibv_device *of) { return of == &device; }
int mlx5dv_query_device(struct ibv_context *of, struct mlx5dv_context *attr) {
    if (attr->comp_mask != MLX5DV_CONTEXT_MASK_CQE_COMPRESION)
        return EINVAL;
    /* As large as in this header: the crate has room for it. */
    memset(attr, 0, sizeof *attr);
    if (!getenv("STUB_WITHOUT_COMPRESSION")) {
        attr->cqe_comp_caps.max_num = 64;
        attr->cqe_comp_caps.supported_format = MLX5DV_CQE_RES_FORMAT_HASH | MLX5DV_CQE_RES_FORMAT_CSUM;
    }
    return 0;
}
struct ibv_context *mlx5dv_open_device(struct ibv_device *of, struct mlx5dv_context_attr *attr) {
    return attr->flags == MLX5DV_CONTEXT_FLAGS_DEVX && attr->comp_mask == 0 ? ibv_open_device(of) : NULL;
}
/* QUERY_HCA_CAP for the general capabilities. */
int mlx5dv_devx_general_cmd(struct ibv_context *of, const void *in, size_t inlen, void *out, size_t outlen) {
    static const uint8_t query[16] = {0x01, 0x00, 0, 0, 0, 0, 0, 1};
    if (inlen != sizeof query || memcmp(in, query, sizeof query) != 0 || outlen != 16 + 4096)
        return EREMOTEIO;
    /* The word at bit 0x5a0, then the timeout and the largest number. */
    __be32 words[2] = {htobe32(1u << (0x5bf - 0x5b0) | 1), htobe32(5 << 16 | 64)};
    memset(out, 0, outlen);
    memcpy((uint8_t *)out + 16 + 0x5a0 / 8, words, sizeof words);
    return 0;
}
struct ibv_cq_ex *mlx5dv_create_cq(struct ibv_context *of, struct ibv_cq_init_attr_ex *attr, struct mlx5dv_cq_init_attr *own) {
    if (attr->cqe > SLOTS || attr->comp_mask != 0 || own->comp_mask != MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE ||
        own->cqe_comp_res_format != MLX5DV_CQE_RES_FORMAT_HASH) {
        errno = EINVAL;
        return NULL;
    }
    for (int slot = 0; slot < SLOTS; slot++) {
        memset(&ring[slot], 0, sizeof ring[slot]);
        ring[slot].cqe.op_own = MLX5_CQE_INVALID << 4;
    }
    for (int at = 0; at < COMPLETIONS; at++) {
        int first = at / ARRAY * ARRAY;
        struct mini mini = {htobe16(at), WRITE, 0, htobe32(at + 1)};
        ring[first ? first : 1].minis[at % ARRAY] = mini;
    }
    ring[0].cqe.sop_drop_qpn = htobe32(WRITE << 24 | 0x123);
    ring[0].cqe.byte_cnt = htobe32(COMPLETIONS);
    ring[0].cqe.signature = 0xe1;
    ring[0].cqe.op_own = MLX5_CQE_REQ << 4 | COMPRESSED;
    queues++;
    return &queue;
}
int mlx5dv_init_obj(struct mlx5dv_obj *object, uint64_t kind) {
    if (kind != MLX5DV_OBJ_CQ || object->cq.in != (struct ibv_cq *)&queue)
        return EINVAL;
    struct mlx5dv_cq answer = {ring, record, SLOTS, sizeof ring[0], page, 7, 0};
    *object->cq.out = answer;
    return 0;
}

/* Calls that this test doesn't make. */
static void unused(void) { abort(); }
#define UNUSED(name) extern __typeof__(name) name __attribute__((alias("unused")));
UNUSED(ibv_query_gid)
UNUSED(ibv_alloc_pd)
UNUSED(ibv_dealloc_pd)
UNUSED(ibv_reg_mr)
UNUSED(ibv_dereg_mr)
UNUSED(ibv_create_srq)
UNUSED(ibv_destroy_srq)
UNUSED(ibv_create_qp)
UNUSED(ibv_destroy_qp)
UNUSED(ibv_modify_qp)
