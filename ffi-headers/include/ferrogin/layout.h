/* ferrogin: layouts of what the plugin and device code share. Written from the Rust definitions by
 * tests/all/c_layout.rs (FERROGIN_REFRESH=1 cargo test -p ferrogin --test all c_layout): do not edit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef FERROGIN_LAYOUT_H
#define FERROGIN_LAYOUT_H

/* What lies before the array of device handles, and what it leads to: FGIN_CONTEXT_SIZE bytes each. */
#define FGIN_HEADER_MAGIC 0x6e69676f72726566ull
#define FGIN_HEADER_VERSION 10u
#define FGIN_HEADER_SIZE 64
#define FGIN_HEADER_MAGIC_OFFSET 0
#define FGIN_HEADER_VERSION_OFFSET 8
#define FGIN_HEADER_N_CONTEXTS_OFFSET 12
#define FGIN_HEADER_CONTEXTS_OFFSET 16
#define FGIN_CONTEXT_SIZE 128
#define FGIN_CONTEXT_EMULATED_OFFSET 120
#define FGIN_EMULATED_WORDS_OFFSET 0
#define FGIN_EMULATED_N_SIGNALS_OFFSET 16

/* The handles, by NCCL's names. */
#define FGIN_HANDLE_LAYOUTS(TYPE, FIELD) \
    TYPE(nccl_ofi_gin_gdaki_dev_endpoint_handle, 80, 8) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, qp, 0) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, cq, 8) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, target_address_handles, 16) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, target_remote_qpns, 24) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, target_qkey, 32) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, sq_lock, 40) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, local_cntr_value, 48) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, submitted_count, 56) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, sq_size, 64) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, putvalue_pad, 68) \
    FIELD(nccl_ofi_gin_gdaki_dev_endpoint_handle, putvalue_slice_base, 72) \
    TYPE(nccl_ofi_gin_gdaki_dev_counter_handle, 96, 8) \
    FIELD(nccl_ofi_gin_gdaki_dev_counter_handle, base, 0) \
    FIELD(nccl_ofi_gin_gdaki_dev_counter_handle, cntr_value, 80) \
    FIELD(nccl_ofi_gin_gdaki_dev_counter_handle, cntr_offset, 88) \
    TYPE(nccl_ofi_gin_gdaki_dev_handle, 240, 8) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, data, 0) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, pvdata, 80) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, counter_handles, 160) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, signal_handles, 168) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, nCounters, 176) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, nSignals, 180) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, nranks, 184) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, rank, 188) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, rail_id, 192) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, scratch_lkey, 196) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, scratch_pad, 200) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, scratch_local_addr, 208) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, scratch_remote_addrs, 216) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, scratch_remote_rkeys, 224) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, putvalue_lkey, 232) \
    FIELD(nccl_ofi_gin_gdaki_dev_handle, putvalue_slot_size, 236) \
    TYPE(nccl_ofi_gin_gdaki_mr_peer, 16, 8) \
    FIELD(nccl_ofi_gin_gdaki_mr_peer, remote_addr, 0) \
    FIELD(nccl_ofi_gin_gdaki_mr_peer, rkey, 8) \
    FIELD(nccl_ofi_gin_gdaki_mr_peer, pad, 12) \
    TYPE(nccl_ofi_gin_gdaki_mr_handle, 16, 8) \
    FIELD(nccl_ofi_gin_gdaki_mr_handle, lkey, 0) \
    FIELD(nccl_ofi_gin_gdaki_mr_handle, nranks, 4) \
    FIELD(nccl_ofi_gin_gdaki_mr_handle, local_addr, 8) \
    FIELD(nccl_ofi_gin_gdaki_mr_handle, peers, 16)

/* The queues, by the names of NCCL 2.31. */
#define FGIN_QUEUE_LAYOUTS_231(TYPE, FIELD) \
    TYPE(efa_cuda_wq, 56, 8) \
    FIELD(efa_cuda_wq, max_sge, 0) \
    FIELD(efa_cuda_wq, max_wqes, 4) \
    FIELD(efa_cuda_wq, queue_mask, 8) \
    FIELD(efa_cuda_wq, queue_size_shift, 12) \
    FIELD(efa_cuda_wq, max_batch, 16) \
    FIELD(efa_cuda_wq, wqes_pending, 20) \
    FIELD(efa_cuda_wq, wqes_posted, 24) \
    FIELD(efa_cuda_wq, wqes_completed, 28) \
    FIELD(efa_cuda_wq, pc, 32) \
    FIELD(efa_cuda_wq, phase, 36) \
    FIELD(efa_cuda_wq, buf, 40) \
    FIELD(efa_cuda_wq, db, 48) \
    TYPE(efa_cuda_sq, 64, 8) \
    FIELD(efa_cuda_sq, wq, 0) \
    FIELD(efa_cuda_sq, max_inline_data, 56) \
    FIELD(efa_cuda_sq, max_rdma_sges, 60) \
    TYPE(efa_cuda_rq, 56, 8) \
    FIELD(efa_cuda_rq, wq, 0) \
    TYPE(efa_cuda_qp, 128, 8) \
    FIELD(efa_cuda_qp, comp_mask, 0) \
    FIELD(efa_cuda_qp, sq, 8) \
    FIELD(efa_cuda_qp, rq, 72)

/* The queues, by the names of NCCL 2.32. */
#define FGIN_QUEUE_LAYOUTS_232(TYPE, FIELD) \
    TYPE(efa_cuda_wq_v0, 56, 8) \
    FIELD(efa_cuda_wq_v0, max_sge, 0) \
    FIELD(efa_cuda_wq_v0, max_wqes, 4) \
    FIELD(efa_cuda_wq_v0, queue_mask, 8) \
    FIELD(efa_cuda_wq_v0, queue_size_shift, 12) \
    FIELD(efa_cuda_wq_v0, max_batch, 16) \
    FIELD(efa_cuda_wq_v0, wqes_pending, 20) \
    FIELD(efa_cuda_wq_v0, wqes_posted, 24) \
    FIELD(efa_cuda_wq_v0, wqes_completed, 28) \
    FIELD(efa_cuda_wq_v0, pc, 32) \
    FIELD(efa_cuda_wq_v0, phase, 36) \
    FIELD(efa_cuda_wq_v0, buf, 40) \
    FIELD(efa_cuda_wq_v0, db, 48) \
    TYPE(efa_cuda_sq_v1, 80, 8) \
    FIELD(efa_cuda_sq_v1, wq, 0) \
    FIELD(efa_cuda_sq_v1, wr_ctx, 56) \
    TYPE(efa_cuda_rq_v0, 56, 8) \
    FIELD(efa_cuda_rq_v0, wq, 0) \
    TYPE(efa_cuda_qp_v1, 144, 8) \
    FIELD(efa_cuda_qp_v1, comp_mask, 0) \
    FIELD(efa_cuda_qp_v1, sq, 8) \
    FIELD(efa_cuda_qp_v1, rq, 88) \
    TYPE(efa_cuda_wr_ctx_v0, 20, 4) \
    FIELD(efa_cuda_wr_ctx_v0, remote_mem_offset, 0) \
    FIELD(efa_cuda_wr_ctx_v0, local_mem_offset, 1) \
    FIELD(efa_cuda_wr_ctx_v0, sgl_offset, 2) \
    FIELD(efa_cuda_wr_ctx_v0, send_inline_data_offset, 3) \
    FIELD(efa_cuda_wr_ctx_v0, write_inline_data_offset, 4) \
    FIELD(efa_cuda_wr_ctx_v0, max_inline_data, 8) \
    FIELD(efa_cuda_wr_ctx_v0, max_rdma_sges, 12) \
    FIELD(efa_cuda_wr_ctx_v0, wqe_size, 16) \
    TYPE(efa_cuda_sq_v0, 64, 8) \
    FIELD(efa_cuda_sq_v0, wq, 0) \
    FIELD(efa_cuda_sq_v0, max_inline_data, 56) \
    FIELD(efa_cuda_sq_v0, max_rdma_sges, 60) \
    TYPE(efa_cuda_qp_v0, 128, 8) \
    FIELD(efa_cuda_qp_v0, comp_mask, 0) \
    FIELD(efa_cuda_qp_v0, sq, 8) \
    FIELD(efa_cuda_qp_v0, rq, 72)

#endif /* FERROGIN_LAYOUT_H */
