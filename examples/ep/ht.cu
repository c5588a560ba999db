// Runs nccl_ep's high-throughput dispatch and combine on the host API, without NCCL, and checks every row, weight and count. docs/ep.md has
// the commands: clang compiles this file twice, to PTX and to the program. The kernels' template arguments are macros, and their launches are
// those of nccl_ep's library, in its flat layout.
#ifndef RANKS
#define RANKS 2
#endif
#ifndef PER_NODE
#define PER_NODE 1  // ranks of a node
#endif
#ifndef HIDDEN
#define HIDDEN 512
#endif
#ifndef TYPE
#define TYPE Bf16  // or Fp16, Fp32
#endif
#ifndef TOKENS
#define TOKENS 64  // the most that a rank has
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef STAGES
#define STAGES NCCL_EP_HT_DISPATCH_STAGES
#endif

#include "driver.h"

#include "device/ht_ep.cuh"

constexpr int NODES = RANKS / PER_NODE;
constexpr int CHUNK = HT_TOKENS_PER_CHUNK_RDMA_DEFAULT, CHUNKS = (TOKENS + CHUNK - 1) / CHUNK, MAX_TOKENS = CHUNKS * CHUNK;
constexpr int SCAN_THREADS = NCCL_EP_HT_NUM_THREADS_PER_BLOCK_PREPROCESSING;
constexpr int PIPELINES = NCCL_EP_HT_DISPATCH_PIPELINES, IN_FLIGHT = NCCL_EP_HT_DISPATCH_IN_FLIGHT_S2G;
constexpr int GATHER_STAGES = NCCL_EP_HT_COMBINE_CROSS_LSA_STAGES_G2S, SCATTER_STAGES = NCCL_EP_HT_COMBINE_CROSS_LSA_STAGES_S2G;

// The kernels' warps, by their jobs: how many, and after which warp.
using N2n = ht_ep::warp_group<NCCL_EP_HT_DISPATCH_N2N_WARPS, 0>;
using Load = ht_ep::warp_group<PIPELINES, NCCL_EP_HT_DISPATCH_N2N_WARPS>;
using Store = ht_ep::warp_group<PIPELINES, NCCL_EP_HT_DISPATCH_N2N_WARPS + PIPELINES>;
using Empty = ht_ep::warp_group<0, NCCL_EP_HT_DISPATCH_N2N_WARPS + 2 * PIPELINES>;
constexpr int RED = NCCL_EP_HT_COMBINE_RED_WARPS;
using NodeRed = ht_ep::warp_group<RED, 0>;
using Red = ht_ep::warp_group<RED, RED>;
using NodeGather = ht_ep::warp_group<1, 2 * RED>;
using Gather = ht_ep::warp_group<1, 2 * RED + 1>;
using Rdma = ht_ep::warp_group<NCCL_EP_HT_COMBINE_N2N_WARPS, 2 * RED + 2>;
constexpr int DISPATCH_THREADS = 32 * (NCCL_EP_HT_DISPATCH_N2N_WARPS + 2 * PIPELINES);
constexpr int COMBINE_THREADS = 32 * (2 * RED + 2 + NCCL_EP_HT_COMBINE_N2N_WARPS);

#ifdef __CUDA_ARCH__

constexpr auto Bf16 = ncclBfloat16, Fp16 = ncclFloat16, Fp32 = ncclFloat32;
using Word = nccl_ep::wire_t<TYPE>;

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 1) ht_scan(const __grid_constant__ ht_ep::scan_flat_kernel_param_t p) {
  extern __shared__ uint8_t shared[];
  ht_ep::scan_impl_flat<SCAN_THREADS, BLOCKS, NODES, PER_NODE, true, false, 0, int64_t>(
      p.input_routing_map, p.tmp, p.sparse_to_dense_map, p.rdma_to_attn_map, p.attn_to_rdma_map,
      reinterpret_cast<ht_ep::rank_mask_t<1>*>(p.token_rank_mask), p.num_of_tokens_for_experts, p.local_expert_routing_map,
      p.per_expert_token_counts, p.lsa_team, p.local_rank, p.num_of_tokens_per_rank, p.experts_per_rank, p.recv_total_counter,
      p.out_is_int64, p.max_recv_tokens_per_rank, p.allow_overflow_drop, p.token_to_recv_slot, shared);
}

extern "C" __global__ void __launch_bounds__(DISPATCH_THREADS, 1)
ht_dispatch(const __grid_constant__ ht_ep::dispatch_kernel_param_t<Word, PER_NODE> p) {
  extern __shared__ uint8_t shared[];
  ht_ep::dispatch_kernel_impl<Word, float, NCCL_EP_DISP_QUANT_NONE, N2n, Load, Store, Empty, Empty, STAGES, IN_FLIGHT, CHUNK, MAX_TOKENS, NODES,
                              BLOCKS, true, PIPELINES, PER_NODE, NCCL_EP_LAYOUT_FLAT, HIDDEN, 0>(p, shared);
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1) ht_combine(const __grid_constant__ ht_ep::combine_kernel_param_t<PER_NODE> p) {
  extern __shared__ uint8_t shared[];
  ht_ep::combine_kernel_impl<NodeRed, Red, NodeGather, Gather, Rdma, NCCL_EP_HT_COMBINE_CROSS_LSA_PIPELINES, GATHER_STAGES, SCATTER_STAGES,
                             NCCL_EP_HT_COMBINE_TOK_PER_GROUP, CHUNK, MAX_TOKENS, NODES, BLOCKS, false, HIDDEN, PER_NODE, NCCL_EP_LAYOUT_FLAT,
                             TYPE>(p, shared);
}

#else

#include <set>

using namespace ep;
using Bits = TYPE::Bits;
constexpr ncclDataType_t token_type = sizeof(Bits) == 4 ? ncclFloat32 : std::is_same_v<TYPE, Fp16> ? ncclFloat16 : ncclBfloat16;
using Word = nccl_ep::wire_t<token_type>;
constexpr size_t ROW = HIDDEN * sizeof(Bits);
constexpr uint32_t CONTEXTS = NCCL_EP_HT_RESERVED_GIN_GPU_CTXS + BLOCKS * NCCL_EP_HT_DISPATCH_N2N_WARPS;
constexpr uint32_t BARRIERS = 32, NODE_BARRIERS = NCCL_EP_HT_DISPATCH_BLOCKS + 1, FROM_OTHERS = NODES - 1;
constexpr size_t RECEIVED = RANKS * TOKENS;  // rows

// Byte offsets in the window, each a multiple of 4,096.
struct Layout {
  size_t flags = 0, barriers, rows, row_weights, expert_out, reduced, gathered, reduced_weights, gathered_weights, dispatch_flags,
         combine_flags, dispatch_guard, combine_guard, tokens, weights, staging, received, bytes;

  explicit Layout(size_t local) {
    size_t at = 0;
    auto next = [&](size_t size) {
      size_t offset = at;
      at += (size + 4095) / 4096 * 4096;
      return offset;
    };
    size_t entry_weights = local * PER_NODE * sizeof(float), entry = ROW + entry_weights;
    // What the ranks of a node access directly: counters (the first rank's), NCCL's barriers, and what dispatch writes and combine reads.
    flags = next(2 * sizeof(uint32_t)), barriers = next((3 + PER_NODE) * NODE_BARRIERS * sizeof(uint32_t));
    rows = next(RECEIVED * ROW), row_weights = next(RECEIVED * entry_weights), expert_out = next(RECEIVED * ROW);
    reduced = next(MAX_TOKENS * FROM_OTHERS * ROW), gathered = next(MAX_TOKENS * FROM_OTHERS * ROW);
    reduced_weights = next(MAX_TOKENS * FROM_OTHERS * entry_weights);
    gathered_weights = next(MAX_TOKENS * FROM_OTHERS * entry_weights);
    dispatch_flags = next(FROM_OTHERS * CHUNKS * 8), combine_flags = next(FROM_OTHERS * CHUNKS * 8);
    dispatch_guard = next(RANKS * 8), combine_guard = next(RANKS * 8);
    tokens = next(TOKENS * ROW), weights = next(TOKENS * local * RANKS * sizeof(float));
    staging = next(FROM_OTHERS * TOKENS * entry), received = next(FROM_OTHERS * TOKENS * entry);
    bytes = at;
  }
};

// Signals of a context.
struct Signals {
  unsigned per_phase = RANKS * CHUNKS, tails = 2 * per_phase, all = tails + NODES * RANKS * CHUNKS + RANKS * RANKS + BARRIERS;
};

// The kernels' dynamic shared memory.
struct Shared {
  int scan, dispatch, combine;

  explicit Shared(int local)
    : scan(int(ht_ep::scan_flat_smem_t::byte_size(SCAN_THREADS / 32, PER_NODE, local, true, false))) {
    ht_ep::model_config_t model{HIDDEN, MAX_TOKENS, local, PER_NODE, NODES};
    ht_ep::dispatch_config_t d{};
    d.num_of_stages = STAGES;
    d.num_of_in_flight_s2g = IN_FLIGHT;
    d.num_of_tokens_per_chunk = CHUNK;
    d.num_of_blocks = BLOCKS;
    d.forward_dispatch = true;
    d.s2d_inner_dim = PER_NODE;
    d.num_pipelines = PIPELINES;
    d.stages_per_pipeline = STAGES / PIPELINES;
    dispatch = int(ht_ep::calc_disp_smem(ht_ep::calc_disp_smem_cost(NCCL_EP_LAYOUT_FLAT, sizeof(Bits), d, model), PIPELINES, STAGES));
    ht_ep::combine_config_t c{};
    c.num_of_stages_g2s = GATHER_STAGES;
    c.num_of_stages_s2g = SCATTER_STAGES;
    c.num_pipelines = NCCL_EP_HT_COMBINE_CROSS_LSA_PIPELINES;
    c.num_of_tokens_per_chunk = CHUNK;
    c.num_of_tokens_per_group = NCCL_EP_HT_COMBINE_TOK_PER_GROUP;
    c.num_of_blocks = BLOCKS;
    combine = int(ht_ep::calc_comb_smem(ht_ep::calc_comb_smem_cost<token_type>(MAX_TOKENS, NODES, c, model), GATHER_STAGES, SCATTER_STAGES));
  }
};

struct Rank : Driver {
  uint32_t local = routing.experts / RANKS;
  Layout layout{local};
  Shared shared{int(local)};
  std::vector<char*> node;  // the windows of the node's ranks
  // What the scan makes of all ranks' choices.
  Buffer<uint8_t> routes{RANKS * TOKENS * row_bytes()}, scan_memory{BLOCKS * PER_NODE * sizeof(ht_ep::tmp_state_t)};
  Buffer<int32_t> slots{RANKS * TOKENS}, received_count{1}, expert_counts{local};
  Buffer<bool> from_others{NODES * size_t((TOKENS + 15) / 16 * 16)}, to_others{TOKENS * FROM_OTHERS}, local_experts{RANKS * TOKENS * local};
  Buffer<uint64_t> masks{RANKS * TOKENS};
  Buffer<int64_t> total{1};
  Buffer<Bits> received, expert_out, combined{TOKENS * HIDDEN};
  Buffer<float> received_weights;
  Buffer<uint64_t> card_rounds{2};           // expected counts of the card's flags: dispatch, combine
  Buffer<uint32_t> node_rounds{2}, done{2};

  ht_ep::scan_flat_kernel_param_t scan_arguments{};
  ht_ep::dispatch_kernel_param_t<Word, PER_NODE> dispatch_arguments{};
  ht_ep::combine_kernel_param_t<PER_NODE> combine_arguments{};

  explicit Rank(Options& given)
    : Driver(given, given.number("experts", 4 * RANKS), given.number("topk", 2), given.number("tokens", 8)) {
    expect_job(RANKS, PER_NODE, TOKENS);
    if (routing.experts % (4 * RANKS)) throw std::invalid_argument("the ranks need equally many experts, a multiple of 4");
    open(layout.bytes, CONTEXTS, Signals().all, NODE_BARRIERS, layout.barriers);
    received = {window + layout.rows, RECEIVED * HIDDEN};
    expert_out = {window + layout.expert_out, RECEIVED * HIDDEN};
    received_weights = {window + layout.row_weights, RECEIVED * local * PER_NODE};
    card_rounds.set({1, 1});
    node_rounds.set({PER_NODE, PER_NODE});
    for (uint32_t i = 0; i < PER_NODE; i++) node.push_back(window_of(i));
    set_scan_arguments(scan_arguments);
    set_dispatch_arguments(dispatch_arguments);
    set_combine_arguments(combine_arguments);
  }
  // A token's experts as bits, a byte or more for each node.
  size_t row_bytes() const {
    return size_t((local * PER_NODE + 7) / 8) * NODES;
  }

  void prepare(uint32_t round) {
    std::vector<uint8_t> bits(routes.count);
    std::vector<Bits> in;
    std::vector<float> by(TOKENS * routing.experts);
    for (uint32_t from = 0; from < RANKS; from++) {
      for (uint32_t token = 0; token < routing.tokens(from); token++) {
        auto experts = routing.experts_of(from, token, round);
        for (uint32_t k = 0; k < experts.size(); k++) {
          if (experts[k] < 0) continue;
          uint32_t expert = uint32_t(experts[k]), node = expert / local / PER_NODE, bit = expert % (local * PER_NODE);
          bits[(from * TOKENS + token) * row_bytes() + node * (row_bytes() / NODES) + bit / 8] |= 1 << bit % 8;
          if (from == rank) by[token * routing.experts + expert] = routing.weight(from, token, k, round);
        }
        for (uint32_t i = 0; from == rank && i < HIDDEN; i++) in.push_back(TYPE::bits(Routing::value(from, token, i, round)));
      }
    }
    routes.set(bits);
    MUST(cuMemcpyHtoD(CUdeviceptr(window + layout.tokens), in.data(), in.size() * sizeof(Bits)));
    MUST(cuMemcpyHtoD(CUdeviceptr(window + layout.weights), by.data(), by.size() * sizeof(float)));
    from_others.fill(0), to_others.fill(0), local_experts.fill(0), received_count.fill(0), scan_memory.fill(0), expert_counts.fill(0);
    slots.fill(0xff), received.fill(0x5a), received_weights.fill(0x5a), combined.fill(0x5a);
  }

  void set_scan_arguments(ht_ep::scan_flat_kernel_param_t& p) const {
    p.input_routing_map = routes.get();
    p.tmp = reinterpret_cast<ht_ep::tmp_state_t*>(scan_memory.get());
    p.sparse_to_dense_map = slots.get();
    p.rdma_to_attn_map = from_others.get();
    p.attn_to_rdma_map = to_others.get();
    p.token_rank_mask = masks.get();
    p.num_of_tokens_for_experts = received_count.get();
    p.local_expert_routing_map = local_experts.get();
    p.per_expert_token_counts = expert_counts.get();
    p.lsa_team = int(rank) / PER_NODE;
    p.local_rank = int(rank) % PER_NODE;
    p.num_of_tokens_per_rank = TOKENS;
    p.experts_per_rank = int(local);
    p.recv_total_counter = total.get();
    p.out_is_int64 = true;
    p.max_recv_tokens_per_rank = RANKS * TOKENS;
  }

  void set_dispatch_arguments(ht_ep::dispatch_kernel_param_t<Word, PER_NODE>& p) const {
    p.hidden_dim = HIDDEN;
    p.experts_per_rank = int(local);
    p.ranks_per_lsa_team = PER_NODE;
    p.attn_input_token = reinterpret_cast<Word*>(window + layout.tokens);
    p.attn_input_prob = reinterpret_cast<float*>(window + layout.weights);
    p.gin_G2S_flags = reinterpret_cast<uint64_t*>(window + layout.dispatch_flags);
    p.lsa_S2G_flags = reinterpret_cast<uint32_t*>(node[0] + layout.flags);
    p.rdma_to_attn_map = from_others.get();
    p.attn_to_rdma_map = to_others.get();
    p.sparse_to_dense_map = slots.get();
    p.s2d_inner_dim = PER_NODE;
    p.expected_gin_flag_val = card_rounds.get();
    p.expected_lsa_flag_val = node_rounds.get();
    p.lsa_team = int(rank) / PER_NODE;
    p.local_rank = int(rank) % PER_NODE;
    p.num_of_tokens_per_rank = TOKENS;
    p.dcomm = host_comm;
    p.token_window = p.prob_window = p.dest_window = view.get();
    p.num_ctx_per_comm = CONTEXTS - NCCL_EP_HT_RESERVED_GIN_GPU_CTXS;
    p.gin_base_ptr = window;
    p.mr_info.attn_input_token_offset = layout.tokens;
    p.mr_info.attn_input_prob_offset = layout.weights;
    p.mr_info.gin_send_staging_offset = layout.staging;
    p.mr_info.gin_recv_staging_offset = layout.received;
    p.mr_info.guard_offset = layout.dispatch_guard;
    p.mr_info.bytes_per_entry = ROW + local * PER_NODE * sizeof(float);
    p.mr_info.max_tokens_per_dest = TOKENS;
    p.mr_info.signals_tail_base = Signals().tails;
    p.mr_info.num_max_rdma_chunked_send_tokens = NCCL_EP_HT_DISPATCH_RDMA_BATCH_SIZE;
    p.dispatch_grid_barrier_counter = done.get();
    p.guard_enabled = true;
    p.max_recv_tokens_per_rank = RANKS * TOKENS;
    for (uint32_t i = 0; i < PER_NODE; i++) {
      p.expert_output_token[i] = reinterpret_cast<Word*>(node[i] + layout.rows);
      p.expert_output_prob[i] = reinterpret_cast<float*>(node[i] + layout.row_weights);
    }
  }

  void set_combine_arguments(ht_ep::combine_kernel_param_t<PER_NODE>& p) const {
    p.hidden_dim = HIDDEN;
    p.experts_per_rank = int(local);
    p.ranks_per_lsa_team = PER_NODE;
    p.attn_output_token = reinterpret_cast<uint16_t*>(combined.get());
    p.combine_gin_RED_tokens = reinterpret_cast<uint16_t*>(window + layout.reduced);
    p.combine_gin_G2S_tokens = reinterpret_cast<uint16_t*>(window + layout.gathered);
    p.gin_G2S_flags = reinterpret_cast<uint64_t*>(window + layout.combine_flags);
    p.lsa_S2G_flags = reinterpret_cast<uint32_t*>(node[0] + layout.flags) + 1;
    p.rdma_to_attn_map = from_others.get();
    p.attn_to_rdma_map = to_others.get();
    p.sparse_to_dense_map = slots.get();
    p.s2d_inner_dim = PER_NODE;
    p.expected_gin_flag_val = card_rounds.get() + 1;
    p.expected_lsa_flag_val = node_rounds.get() + 1;
    p.lsa_team = int(rank) / PER_NODE;
    p.local_rank = int(rank) % PER_NODE;
    p.num_of_tokens_per_rank = TOKENS;
    p.num_real_tokens = int(routing.tokens(rank));
    p.combine_grid_barrier_counter = done.get() + 1;
    p.dcomms = dev_comm.get();
    p.token_window = p.dest_window = view.get();
    p.num_gin_comms = 1;
    p.num_ctx_per_comm = CONTEXTS - NCCL_EP_HT_RESERVED_GIN_GPU_CTXS;
    p.gin_base_ptr = window;
    p.combine_signal_offset = Signals().per_phase;
    p.mr_info.combine_red_token_offset = layout.reduced;
    p.mr_info.combine_g2s_token_offset = layout.gathered;
    p.mr_info.combine_red_prob_offset = layout.reduced_weights;
    p.mr_info.combine_g2s_prob_offset = layout.gathered_weights;
    p.mr_info.guard_offset = layout.combine_guard;
    p.guard_enabled = true;
    for (uint32_t i = 0; i < PER_NODE; i++) p.expert_input_token[i] = reinterpret_cast<uint16_t*>(node[i] + layout.expert_out);
  }

  // Also writes what the experts make of what it received, with the weights applied and one row per token.
  void dispatch(uint32_t round) {
    kernels.launch("ht_scan", {&scan_arguments}, BLOCKS, SCAN_THREADS, shared.scan);
    kernels.launch("ht_dispatch", {&dispatch_arguments}, BLOCKS, DISPATCH_THREADS, shared.dispatch);
    auto rows = this->received.read();
    auto got_weights = received_weights.read();
    auto slot_of = slots.read(), got_counts = expert_counts.read();
    std::vector<Bits> out(expert_out.count, TYPE::bits(0));
    std::vector<int32_t> of_expert(local), received(PER_NODE);  // so far, by each rank of the node
    const uint32_t place = rank % PER_NODE, first = rank - place;
    for (uint32_t from = 0; from < RANKS; from++) {
      for (uint32_t token = 0; token < routing.tokens(from); token++) {
        std::vector<float> weight(local * PER_NODE), sum(HIDDEN);  // of the node's experts
        std::vector<int32_t> slot(PER_NODE, -1);
        auto experts = routing.experts_of(from, token, round);
        for (uint32_t k = 0; k < experts.size(); k++) {
          if (experts[k] < 0 || experts[k] / local / PER_NODE != rank / PER_NODE) continue;
          uint32_t to = uint32_t(experts[k]) / local - first;
          if (slot[to] < 0) slot[to] = received[to]++;
          float by = routing.weight(from, token, k, round);
          weight[experts[k] - first * local] = by;
          if (to != place) continue;
          of_expert[experts[k] % local]++;
          for (uint32_t i = 0; i < HIDDEN; i++) {
            sum[i] += by * Routing::apply(uint32_t(experts[k]), Routing::value(from, token, i, round));
          }
        }
        // A rank passes on what ranks with its place on other nodes send to its node.
        for (uint32_t to = 0; from % PER_NODE == place && to < PER_NODE; to++) {
          expect(slot_of[(from / PER_NODE * TOKENS + token) * PER_NODE + to] == slot[to], "slot of a token of rank", round, from);
        }
        if (slot[place] < 0) continue;
        const size_t row = size_t(slot[place]);
        for (uint32_t i = 0; i < HIDDEN; i++) {
          expect(TYPE::number(rows[row * HIDDEN + i]) == Routing::value(from, token, i, round), "number of a row from rank", round, from);
          out[row * HIDDEN + i] = TYPE::bits(sum[i]);
        }
        for (uint32_t e = 0; e < weight.size(); e++) {
          expect(got_weights[row * weight.size() + e] == weight[e], "weight from rank", round, from);
        }
      }
    }
    expect(received_count.read()[0] == received[place] && total.read()[0] == received[place], "number of tokens", round, 0);
    for (uint32_t e = 0; e < local; e++) expect(got_counts[e] == of_expert[e], "count of expert", round, e);
    expert_out.set(out);
  }

  void combine(uint32_t round) {
    kernels.launch("ht_combine", {&combine_arguments}, BLOCKS, COMBINE_THREADS, shared.combine);
    auto found = combined.read();
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      auto experts = routing.experts_of(rank, token, round);
      for (uint32_t i = 0; i < HIDDEN; i++) {
        std::vector<float> parts(RANKS), nodes(NODES);
        for (uint32_t k = 0; k < experts.size(); k++) {
          if (experts[k] < 0) continue;
          float x = Routing::apply(uint32_t(experts[k]), Routing::value(rank, token, i, round));
          parts[experts[k] / local] += routing.weight(rank, token, k, round) * x;
        }
        for (uint32_t to = 0; to < RANKS; to++) nodes[to / PER_NODE] += round_to<TYPE>(parts[to]);
        // Other nodes send sums.
        float sum = nodes[rank / PER_NODE];
        for (uint32_t node = 0; node < NODES; node++) sum += node == rank / PER_NODE ? 0 : round_to<TYPE>(nodes[node]);
        expect(TYPE::number(found[token * HIDDEN + i]) == round_to<TYPE>(sum), "combined number of token", round, token);
      }
    }
  }
};

int main(int argc, char** argv) {
  return ep::run<Rank>("HT", argc, argv);
}

#endif
