// Runs dispatch and combine of DeepEP V2, direct or hybrid, with their epilogues, on the host API, without NCCL, and checks every token,
// index, weight and count. docs/ep.md has the commands: clang compiles this file twice, to PTX and to the program. The kernels' template
// arguments are macros, and their launches are those of DeepEP's library.
#ifndef RANKS
#define RANKS 2
#endif
#ifndef NODES
#define NODES 1  // with more, the hybrid kernels, which use the card between nodes only
#endif
#ifndef HIDDEN
#define HIDDEN 512
#endif
#ifndef TOPK
#define TOPK 2
#endif
#ifndef EXPERTS
#define EXPERTS 8
#endif
#ifndef TOKENS
#define TOKENS 32  // the most that a rank has
#endif
#ifndef EXPAND
#define EXPAND 0  // 1: a row for each expert of a token
#endif
#ifndef REDUCE
#define REDUCE 1  // 0: a rank sends the rows of its experts one by one
#endif
#ifndef BLOCKS
#define BLOCKS 3
#endif
#ifndef CONTEXTS
#define CONTEXTS 4  // DeepEP's name is QPs
#endif

#include "driver.h"

#include <tuple>

#include <deep_ep/impls/combine.cuh>
#include <deep_ep/impls/combine_reduce_epilogue.cuh>
#include <deep_ep/impls/dispatch.cuh>
#include <deep_ep/impls/dispatch_copy_epilogue.cuh>
#include <deep_ep/impls/hybrid_combine.cuh>
#include <deep_ep/impls/hybrid_dispatch.cuh>

using namespace deep_ep;
using namespace deep_ep::elastic;

constexpr int NOTIFY_WARPS = 4, DISPATCH_WARPS = 4, WARPS = 4, ALIGNMENT = EXPAND ? 4 : 1, ROW = HIDDEN * 2, LOCAL = EXPERTS / RANKS;
constexpr bool HYBRID = NODES > 1;
constexpr int PER_NODE = RANKS / NODES, CHANNELS = HYBRID ? BLOCKS * WARPS : 1, PER_CHANNEL = (TOKENS + CHANNELS - 1) / CHANNELS;
constexpr int64_t TIMEOUT = 200'000'000'000;  // cycles

#ifdef __CUDA_ARCH__

namespace deep_ep::elastic {
#if NODES > 1
template __global__ void hybrid_dispatch_impl<true, false, BLOCKS, NOTIFY_WARPS, WARPS, WARPS, NODES, PER_NODE, ROW, 0, TOKENS, EXPERTS, TOPK,
                                              ALIGNMENT, CONTEXTS, TIMEOUT>(
    void*, sf_pack_t*, topk_idx_t*, float*, topk_idx_t*, int*, int*, int*, int*, int*, int*, int, int, int, ncclDevComm_t, ncclWindow_t, void*,
    void*, void*, int, int);
template __global__ void hybrid_combine_impl<EXPAND, REDUCE, BLOCKS, WARPS, WARPS, NODES, PER_NODE, HIDDEN, TOKENS, EXPERTS, TOPK, CONTEXTS,
                                             TIMEOUT>(nv_bfloat16*, float*, int*, int*, int*, int*, ncclDevComm_t, ncclWindow_t, void*, void*,
                                                      int, int, int);
#else
template __global__ void dispatch_impl<false, true, false, BLOCKS, NOTIFY_WARPS, DISPATCH_WARPS, RANKS, ROW, 0, TOKENS, EXPERTS, TOPK, ALIGNMENT,
                                       CONTEXTS, TIMEOUT>(void*, sf_pack_t*, topk_idx_t*, float*, topk_idx_t*, int*, int*, int*, int*, int*,
                                                          int, int, int, ncclDevComm_t, ncclWindow_t, void*, void*, void*, int);
template __global__ void combine_impl<false, EXPAND, REDUCE, BLOCKS, WARPS, RANKS, HIDDEN, TOKENS, EXPERTS, TOPK, CONTEXTS, TIMEOUT>(
    nv_bfloat16*, float*, int*, int*, ncclDevComm_t, ncclWindow_t, void*, void*, int, int);
#endif
template __global__ void dispatch_copy_epilogue_impl<EXPAND, false, EXPAND, BLOCKS, CHANNELS, WARPS, NODES, PER_NODE, ROW, 0, TOKENS, EXPERTS,
                                                     TOPK, ALIGNMENT>(
    void*, void*, int*, int*, void*, sf_pack_t*, topk_idx_t*, float*, int*, int*, int*, int, int, int, int, int);
template __global__ void combine_reduce_epilogue_impl<EXPAND, REDUCE, BLOCKS, WARPS, NODES, PER_NODE, HIDDEN, TOKENS, EXPERTS, TOPK>(
    nv_bfloat16*, float*, topk_idx_t*, void*, void*, void*, int, int, int);
}  // namespace deep_ep::elastic

#else

#include <fstream>
#include <regex>
#include <set>

using namespace ep;
using Bits = Bf16::Bits;
constexpr size_t MEBI = 1 << 20, METADATA = 2 + TOPK, ROWS = RANKS * TOKENS;
// Rows that a rank can receive: with EXPAND, one for each expert, and the padding.
constexpr size_t RECEIVED = EXPAND ? ROWS * TOPK + LOCAL * ALIGNMENT : ROWS;

// Bytes of the kernels' memory, which is a window.
struct Sizes {
  size_t workspace, all, reduced_at;  // where the reduce epilogue reads
  int dispatch_shared, combine_shared, copy_shared, reduce_shared;

  Sizes() {
    layout::TokenLayout dispatch(ROW, 0, TOPK, true), combine(ROW, 0, TOPK, false), reduced(ROW, 0, 0, false);
    size_t parts = get_num_tokens_in_layout<REDUCE, PER_NODE, TOPK>(), sent = EXPAND && !REDUCE ? TOPK : 1;
    size_t node_parts = get_num_tokens_in_layout<REDUCE, NODES, TOPK>(), forwarded = size_t(NODES) * CHANNELS * PER_CHANNEL;
    workspace = (layout::WorkspaceLayout::get_num_bytes() + 2 * MEBI - 1) / (2 * MEBI) * (2 * MEBI);
    size_t dispatched = (RANKS + 1) * TOKENS + (HYBRID ? forwarded : 0);
    size_t combined = HYBRID ? (parts * NODES + node_parts) * TOKENS + (REDUCE ? 1 : TOPK) * forwarded : (parts + RANKS * sent) * TOKENS;
    all = workspace + std::max(dispatch.get_num_bytes<false>() * dispatched, combine.get_num_bytes<false>() * combined);
    reduced_at = HYBRID ? combine.get_num_bytes<false>() * parts * NODES * TOKENS : 0;
    dispatch_shared = math::constexpr_align(RANKS + EXPERTS, NOTIFY_WARPS * 32) * int(sizeof(int)) +
                      (HYBRID ? 2 * WARPS : DISPATCH_WARPS) * dispatch.get_num_bytes<true>();
    copy_shared = WARPS * dispatch.get_num_bytes<true>();
    combine_shared = (HYBRID ? 2 * WARPS : WARPS) * combine.get_num_bytes<true>();
    reduce_shared = WARPS * reduced.get_num_bytes<false>();
  }
};

struct Rank {
  const Routing& routing;
  uint32_t rank;
  int wrong = 0;
  Buffer<Bits> tokens{TOKENS * HIDDEN}, received{RECEIVED * HIDDEN}, expert_out{RECEIVED * HIDDEN}, combined{TOKENS * HIDDEN};
  Buffer<topk_idx_t> topk{TOKENS * TOPK}, copied_topk{TOKENS * TOPK}, received_topk{ROWS * TOPK};
  Buffer<float> weights{TOKENS * TOPK}, received_weights{EXPAND ? RECEIVED : ROWS * TOPK}, combined_weights{TOKENS * TOPK};
  Buffer<int> statistics{LOCAL}, by_rank{RANKS}, by_expert{LOCAL + 1}, counts{LOCAL}, metadata{ROWS * METADATA};
  Buffer<int> slots{HYBRID ? size_t(NODES) * CHANNELS * PER_CHANNEL * TOPK : TOKENS * TOPK};
  // Of the hybrid kernels: what combine's forwarding repeats of dispatch's.
  static constexpr size_t PASSED_ON = CHANNELS * size_t(NODES * PER_CHANNEL + 1);
  Buffer<int> forwarded{PASSED_ON * (2 + 2 * TOPK)}, lists{PASSED_ON * PER_NODE};
  std::vector<int> seen = std::vector<int>(LOCAL);  // what `statistics` has to be

  void expect(bool is_right, const char* what, uint32_t round, size_t where) {
    if (is_right || ++wrong > 5) return;
    std::fprintf(stderr, "rank %u, round %u: wrong %s at %zu\n", rank, round, what, where);
  }

  void prepare(uint32_t round) {
    std::vector<Bits> in;
    std::vector<float> by;
    std::vector<topk_idx_t> to;
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      for (int64_t expert : routing.experts_of(rank, token, round)) to.push_back(expert);
      for (uint32_t k = 0; k < TOPK; k++) by.push_back(routing.weight(rank, token, k, round));
      for (uint32_t i = 0; i < HIDDEN; i++) in.push_back(Bf16::bits(Routing::value(rank, token, i, round)));
    }
    tokens.set(in), weights.set(by), topk.set(to);
    for (auto* stale : {&by_rank, &by_expert, &counts, &slots, &metadata}) stale->fill(0x5a);
    received.fill(0x5a), combined.fill(0x5a), received_topk.fill(0x5a), received_weights.fill(0x5a), combined_weights.fill(0x5a);
    copied_topk.fill(0x5a);
  }

  // What the experts make of a token, with the weight, of the experts that `chosen` accepts.
  template <typename Chosen>
  float computed(uint32_t from, uint32_t token, uint32_t i, uint32_t round, Chosen chosen) const {
    float sum = 0;
    auto experts = routing.experts_of(from, token, round);
    for (uint32_t k = 0; k < TOPK; k++) {
      if (experts[k] < 0 || !chosen(uint32_t(experts[k]))) continue;
      sum += round_to<Bf16>(routing.weight(from, token, k, round) * Routing::apply(uint32_t(experts[k]), Routing::value(from, token, i, round)));
    }
    return sum;
  }

  // Checks what dispatch received, and writes what the experts make of it. Returns the number of tokens received.
  int check_dispatch_and_compute(uint32_t round, int64_t* host_counts) {
    auto rows = received.read();
    auto got_topk = received_topk.read(), copied = copied_topk.read();
    auto got_weights = received_weights.read();
    auto ends = by_rank.read(), expert_ends = by_expert.read(), got_counts = counts.read(), source = metadata.read(), own_slots = slots.read();
    std::vector<Bits> out(expert_out.count, Bf16::bits(0));
    std::vector<int> of_expert(LOCAL);
    std::set<int> used;
    int begin = 0;

    auto check_row = [&](size_t row, uint32_t from, uint32_t token) {
      for (uint32_t i = 0; i < HIDDEN; i++) {
        expect(Bf16::number(rows[row * HIDDEN + i]) == Routing::value(from, token, i, round), "number of a row", round, row);
      }
    };
    // The hybrid kernels order rows by the rank of this node that passed them on: the one with the sender's place in its node.
    for (uint32_t group = 0; group < PER_NODE; group++) {
      std::set<uint32_t> sent, arrived;
      for (uint32_t from = group; from < RANKS; from += PER_NODE) {
        for (uint32_t token = 0; token < routing.tokens(from); token++) {
          for (int64_t expert : routing.experts_of(from, token, round)) {
            if (expert >= 0 && expert / LOCAL == rank) sent.insert(from * TOKENS + token), of_expert[expert % LOCAL]++;
          }
        }
      }
      expect(ends[group] - begin == int(sent.size()), "number of tokens from rank", round, group);
      expect(math::encode_decode_positive(host_counts[group]) == int64_t(sent.size()), "count at the host", round, group);
      if (wrong) return 0;
      for (int row = begin; row < ends[group]; row++) {
        const int* entry = &source[row * METADATA];
        expect(sent.count(entry[0]) && arrived.insert(entry[0]).second, "source of a row", round, row);
        if (wrong) return 0;
        uint32_t from = uint32_t(entry[0]) / TOKENS, token = uint32_t(entry[0]) % TOKENS;
        auto experts = routing.experts_of(from, token, round);
        int last = -1;
        if (!EXPAND) check_row(row, from, token);
        for (uint32_t k = 0; k < TOPK; k++) {
          bool here = experts[k] >= 0 && experts[k] / LOCAL == rank;
          float weight = routing.weight(from, token, k, round);
          if (here) last = int(k);
          if (!EXPAND) {
            expect(got_topk[row * TOPK + k] == (here ? experts[k] % LOCAL : -1), "expert of a row", round, row);
            expect(got_weights[row * TOPK + k] == weight, "weight of a row", round, row);
            continue;
          }
          int slot = entry[2 + k];
          if (!here) {
            expect(slot == -1, "slot", round, row);
            continue;
          }
          int end = expert_ends[experts[k] % LOCAL];
          bool valid = slot < end && slot >= end - got_counts[experts[k] % LOCAL] && used.insert(slot).second;
          expect(valid, "slot of an expert", round, row);
          if (!valid) return 0;
          check_row(size_t(slot), from, token);
          expect(got_weights[slot] == weight, "weight of a row", round, slot);
          for (uint32_t i = 0; i < HIDDEN; i++) {
            out[slot * HIDDEN + i] = Bf16::bits(weight * Routing::apply(uint32_t(experts[k]), Routing::value(from, token, i, round)));
          }
        }
        expect(entry[1] == (HYBRID ? row - begin : int(from)) * TOPK + last, "last expert of a row", round, row);
        for (uint32_t i = 0; !EXPAND && i < HIDDEN; i++) {
          out[row * HIDDEN + i] = Bf16::bits(computed(from, token, i, round, [&](uint32_t expert) { return expert / LOCAL == rank; }));
        }
      }
      begin = ends[group];
    }
    int expert_begin = 0;
    for (int e = 0; e < LOCAL; e++) {
      int aligned = (of_expert[e] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
      expect(got_counts[e] == of_expert[e], "count of expert", round, e);
      expect(math::encode_decode_positive(host_counts[PER_NODE + e]) == aligned, "count of expert at the host", round, e);
      // With EXPAND, the epilogue counts on from the begin.
      expect(expert_ends[e] == expert_begin + (EXPAND ? of_expert[e] : 0), "begin of expert", round, e);
      for (int slot = expert_begin + of_expert[e]; EXPAND && slot < expert_begin + aligned; slot++) {
        for (uint32_t i = 0; i < HIDDEN; i++) expect(rows[slot * HIDDEN + i] == 0, "padding", round, slot);
        expect(got_weights[slot] == 0, "weight of the padding", round, slot);
      }
      expert_begin += aligned;
      seen[e] += of_expert[e];
    }
    expect(expert_ends[LOCAL] == expert_begin, "number of rows", round, LOCAL);
    expect(statistics.read() == seen, "statistics", round, 0);
    if (!HYBRID) check_slots(round, own_slots, copied);
    expert_out.set(out);
    return begin;
  }

  // Each token has a slot of its own at each of its ranks, written at the last of the rank's experts.
  void check_slots(uint32_t round, const std::vector<int>& own_slots, const std::vector<topk_idx_t>& copied) {
    std::set<std::pair<int64_t, int>> used;
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      auto experts = routing.experts_of(rank, token, round);
      for (uint32_t k = 0; k < TOPK; k++) {
        auto same = [&](int64_t other) { return other >= 0 && other / LOCAL == experts[k] / LOCAL; };
        bool last = experts[k] >= 0 && std::none_of(experts.begin() + k + 1, experts.end(), same);
        int slot = own_slots[token * TOPK + k], first = int(rank) * TOKENS;
        bool valid = last ? slot >= first && slot < first + TOKENS && used.insert({experts[k] / LOCAL, slot}).second : slot == -1;
        expect(valid, "slot of a token", round, token);
        expect(copied[token * TOPK + k] == experts[k], "copied expert", round, token);
      }
    }
  }

  void check_combine(uint32_t round) {
    auto found = combined.read();
    auto found_weights = combined_weights.read();
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      auto experts = routing.experts_of(rank, token, round);
      for (uint32_t i = 0; i < HIDDEN; i++) {
        float sum = 0;
        for (uint32_t node = 0; node < RANKS; node += PER_NODE) {
          float node_sum = 0;
          for (uint32_t to = node; to < node + PER_NODE; to++) {
            float part = computed(rank, token, i, round, [&](uint32_t expert) { return expert / LOCAL == to; });
            // Rows that a rank sends one by one have no rounded sum.
            node_sum += EXPAND && !REDUCE ? part : round_to<Bf16>(part);
          }
          sum += HYBRID && REDUCE ? round_to<Bf16>(node_sum) : node_sum;
        }
        expect(Bf16::number(found[token * HIDDEN + i]) == round_to<Bf16>(sum), "combined number of token", round, token);
      }
      for (uint32_t k = 0; !(EXPAND && !REDUCE) && k < TOPK; k++) {
        float weight = experts[k] < 0 ? 0 : routing.weight(rank, token, k, round);
        expect(found_weights[token * TOPK + k] == weight, "combined weight of token", round, token);
      }
    }
  }
};

// The kernels' names, with their template arguments, as the PTX has them.
std::string entry(const std::string& ptx, const char* name) {
  std::smatch found;
  std::regex pattern(std::string(R"(\.entry (\w*\d)") + name + R"(I\w*)\()");
  if (!std::regex_search(ptx, found, pattern)) throw std::invalid_argument(std::string("no kernel ") + name);
  return found[1];
}

int main(int argc, char** argv) try {
  Options options(argc, argv);
  std::string kernels_file = options.word("kernels", "deepep.ptx"), library = options.word("device", "dist/cuda/ferrogin_device.ptx");
  uint32_t rounds = options.number("rounds", 2), strong = options.number("strong", 1);
  Routing routing{options.word("routing", "even"), RANKS, EXPERTS, TOPK, options.number("tokens", 16)};
  options.end();

  auto comm = ferrogin::Comm::open();
  if (comm.ranks() != RANKS) throw std::invalid_argument("compiled for " + std::to_string(RANKS) + " ranks");
  if (HYBRID && comm.lsa().second != PER_NODE) {
    throw std::invalid_argument("compiled for " + std::to_string(NODES) + " nodes: set FERROGIN_NODE");
  }
  if (routing.most > TOKENS) throw std::invalid_argument("compiled for at most " + std::to_string(TOKENS) + " tokens");
  Kernels kernels({kernels_file.c_str(), library.c_str()});
  std::ifstream file(kernels_file);
  std::string ptx((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::string dispatch = entry(ptx, HYBRID ? "hybrid_dispatch_impl" : "dispatch_impl"), copy = entry(ptx, "dispatch_copy_epilogue_impl");
  std::string combine = entry(ptx, HYBRID ? "hybrid_combine_impl" : "combine_impl"), reduce = entry(ptx, "combine_reduce_epilogue_impl");

  Sizes sizes;
  auto window = comm.allocate(sizes.all, ferrogin::Memory::Device);
  ferrogin::ContextOptions limits;
  limits.contexts = CONTEXTS;
  limits.signals = RANKS + 4;
  auto context = comm.context(limits);
  Nccl nccl(comm, window, context, CONTEXTS, limits.signals, strong);
  Rank self{routing, comm.rank()};

  // Arguments of the kernels. They compute offsets in the window from its address among the node's windows.
  void *workspace = window.lsa_address(comm.lsa().first), *buffer = static_cast<char*>(workspace) + sizes.workspace, *host = nullptr, *null = nullptr;
  void* reduced = static_cast<char*>(buffer) + sizes.reduced_at;
  MUST(cuMemHostAlloc(&host, sizes.workspace, 0));
  CUdeviceptr host_workspace;
  MUST(cuMemHostGetDevicePointer(&host_workspace, host, 0));
  int64_t* host_counts = layout::WorkspaceLayout(host, 1, RANKS, EXPERTS).get_scaleup_rank_expert_count_ptr<false>();
  ncclWindow_t nccl_window = nccl.window.get();
  int rank = int(comm.rank()), node = rank / PER_NODE, place = rank % PER_NODE, tokens = int(routing.tokens(comm.rank())), none = 0;
  const int cooperative = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, dependent = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  // With EXPAND and without REDUCE, combine takes no weights.
  void* combined_weights = EXPAND && !REDUCE ? nullptr : self.combined_weights.get();
  void* back_weights = EXPAND && !REDUCE ? nullptr : self.received_weights.get();

  for (uint32_t round = 0; round < rounds && !self.wrong; round++) {
    self.prepare(round);
    std::memset(host_counts, 0, (RANKS + EXPERTS) * sizeof(int64_t));
    std::vector<void*> arguments;
    auto add = [&](std::initializer_list<void*> more) { arguments.insert(arguments.end(), more); };
    add({&self.tokens.address, &null, &self.topk.address, &self.weights.address, &self.copied_topk.address, &self.statistics.address});
    add({&self.by_rank.address, &self.by_expert.address, &self.counts.address, &self.slots.address});
    if (HYBRID) add({&self.forwarded.address});
    add({&tokens, &none, &none, &nccl.host_comm, &nccl_window, &buffer, &workspace, &host_workspace});
    if (HYBRID) add({&node});
    add({&place});
    int dispatch_warps = NOTIFY_WARPS + (HYBRID ? 2 * WARPS : DISPATCH_WARPS);
    kernels.start(dispatch.c_str(), arguments, BLOCKS, 32 * dispatch_warps, sizes.dispatch_shared, cooperative);
    int received = RANKS * TOKENS;  // the kernel looks the number up
    kernels.launch(copy.c_str(),
                   {&buffer, &workspace, &self.by_rank.address, &self.by_expert.address, &self.received.address, &null, &self.received_topk.address,
                    &self.received_weights.address, &self.metadata.address, &self.lists.address, &self.counts.address, &received, &none, &none, &node,
                    &place},
                   BLOCKS, 32 * WARPS, sizes.copy_shared, dependent);
    received = self.check_dispatch_and_compute(round, host_counts);
    arguments = {&self.expert_out.address, &back_weights, &self.metadata.address, &self.by_rank.address};
    if (HYBRID) add({&self.forwarded.address, &self.lists.address});
    add({&nccl.host_comm, &nccl_window, &buffer, &workspace});
    if (HYBRID) add({&node});
    add({&place, &received});
    kernels.start(combine.c_str(), arguments, BLOCKS, 32 * WARPS * (HYBRID ? 2 : 1), sizes.combine_shared, cooperative);
    kernels.launch(reduce.c_str(),
                   {&self.combined.address, &combined_weights, &self.topk.address, &reduced, &null, &null, &tokens, &node, &place},
                   BLOCKS, 32 * WARPS, sizes.reduce_shared, dependent);
    self.check_combine(round);
    context.check();
  }
  std::printf("DeepEP, rank %u of %d: %u rounds of %d tokens, %d values are wrong\n", self.rank, RANKS, rounds, tokens, self.wrong);
  if (self.wrong) return 1;
  comm.barrier();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

#endif
