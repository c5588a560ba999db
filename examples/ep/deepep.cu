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
#ifndef CACHED
#define CACHED 0  // 1: each round dispatches its tokens twice, and the second time uses the first one's slots and counts
#endif
#ifndef BLOCKS
#define BLOCKS 3
#endif
#ifndef CONTEXTS
#define CONTEXTS 4  // DeepEP's name is QPs
#endif

#include "driver.h"

#include <tuple>

#ifdef __CUDA_ARCH__
#include <deep_ep/impls/combine.cuh>
#include <deep_ep/impls/combine_reduce_epilogue.cuh>
#include <deep_ep/impls/dispatch.cuh>
#include <deep_ep/impls/dispatch_copy_epilogue.cuh>
#if NODES > 1
#include <deep_ep/impls/hybrid_combine.cuh>
#include <deep_ep/impls/hybrid_dispatch.cuh>
#endif
#else
#include <deep_ep/common/layout.cuh>
#include <deep_ep/impls/combine_utils.cuh>
#endif

using namespace deep_ep;
using namespace deep_ep::elastic;

constexpr int NOTIFY_WARPS = 4, DISPATCH_WARPS = 4, WARPS = 4, ALIGNMENT = EXPAND ? 4 : 1, ROW = HIDDEN * 2, LOCAL = EXPERTS / RANKS;
constexpr bool HYBRID = NODES > 1;
constexpr int PER_NODE = RANKS / NODES, CHANNELS = HYBRID ? BLOCKS * WARPS : 1, PER_CHANNEL = (TOKENS + CHANNELS - 1) / CHANNELS;
constexpr int64_t TIMEOUT = 200'000'000'000;  // cycles

#ifdef __CUDA_ARCH__

namespace deep_ep::elastic {
#define KERNEL(...) template __global__ decltype(__VA_ARGS__) __VA_ARGS__
#if NODES > 1
#define DISPATCH(again, warps) \
  hybrid_dispatch_impl<!again, again, BLOCKS, warps, WARPS, WARPS, NODES, PER_NODE, ROW, 0, TOKENS, EXPERTS, TOPK, ALIGNMENT, CONTEXTS, TIMEOUT>
KERNEL(hybrid_combine_impl<EXPAND, REDUCE, BLOCKS, WARPS, WARPS, NODES, PER_NODE, HIDDEN, TOKENS, EXPERTS, TOPK, CONTEXTS, TIMEOUT>);
#else
#define DISPATCH(again, warps) \
  dispatch_impl<false, !again, again, BLOCKS, warps, DISPATCH_WARPS, RANKS, ROW, 0, TOKENS, EXPERTS, TOPK, ALIGNMENT, CONTEXTS, TIMEOUT>
KERNEL(combine_impl<false, EXPAND, REDUCE, BLOCKS, WARPS, RANKS, HIDDEN, TOKENS, EXPERTS, TOPK, CONTEXTS, TIMEOUT>);
#endif
#define COPY(again) \
  dispatch_copy_epilogue_impl<EXPAND, again, EXPAND, BLOCKS, CHANNELS, WARPS, NODES, PER_NODE, ROW, 0, TOKENS, EXPERTS, TOPK, ALIGNMENT>
KERNEL(DISPATCH(false, NOTIFY_WARPS));
KERNEL(COPY(false));
#if CACHED
KERNEL(DISPATCH(true, 0));
KERNEL(COPY(true));
#endif
KERNEL(combine_reduce_epilogue_impl<EXPAND, REDUCE, BLOCKS, WARPS, NODES, PER_NODE, HIDDEN, TOKENS, EXPERTS, TOPK>);
}  // namespace deep_ep::elastic

#else

#include <fstream>
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

// A kernel's name with its template arguments, as the PTX has it: the first `flags` are these.
std::string entry(const std::string& ptx, const std::string& name, const std::vector<bool>& flags = {}) {
  const std::string keyword = ".entry ";
  std::string begin = keyword + "_ZN7deep_ep7elastic" + std::to_string(name.size()) + name + "I";
  for (bool flag : flags) begin += flag ? "Lb1E" : "Lb0E";
  size_t at = ptx.find(begin);
  if (at == std::string::npos) throw std::invalid_argument("no kernel " + name);
  at += keyword.size();
  return ptx.substr(at, ptx.find('(', at) - at);
}

struct Rank : Driver {
  Buffer<Bits> tokens{TOKENS * HIDDEN}, received{RECEIVED * HIDDEN}, expert_out{RECEIVED * HIDDEN}, combined{TOKENS * HIDDEN};
  Buffer<topk_idx_t> topk{TOKENS * TOPK}, copied_topk{TOKENS * TOPK}, received_topk{ROWS * TOPK};
  Buffer<float> weights{TOKENS * TOPK}, received_weights{EXPAND ? RECEIVED : ROWS * TOPK}, combined_weights{TOKENS * TOPK};
  Buffer<int> statistics{LOCAL}, by_rank{RANKS}, by_expert{LOCAL + 1}, counts{LOCAL}, metadata{ROWS * METADATA};
  Buffer<int> slots{HYBRID ? size_t(NODES) * CHANNELS * PER_CHANNEL * TOPK : TOKENS * TOPK};
  // Of the hybrid kernels: what combine's forwarding repeats of dispatch's.
  static constexpr size_t PASSED_ON = CHANNELS * size_t(NODES * PER_CHANNEL + 1);
  Buffer<int> forwarded{PASSED_ON * (2 + 2 * TOPK)}, lists{PASSED_ON * PER_NODE};
  std::vector<int> seen = std::vector<int>(LOCAL);  // what `statistics` has to be

  // Arguments of the kernels, which compute offsets in the window from its address among the node's windows.
  Sizes sizes;
  void *workspace, *buffer, *reduced, *host = nullptr, *null = nullptr;
  CUdeviceptr host_workspace;
  int64_t* host_counts;
  ncclWindow_t nccl_window = view.get();
  int node = int(rank) / PER_NODE, place = int(rank) % PER_NODE, own_tokens = int(routing.tokens(rank)), none = 0, rows = 0;
  // With EXPAND and without REDUCE, combine takes no weights.
  void* weights_back = EXPAND && !REDUCE ? nullptr : combined_weights.get();
  void* weights_to_send = EXPAND && !REDUCE ? nullptr : received_weights.get();
  std::vector<std::string> dispatch_kernels, copy_kernels;
  std::string combine_kernel, reduce_kernel;

  explicit Rank(Options& given) : Driver(given, EXPERTS, TOPK, given.number("tokens", 16)) {
    expect_job(RANKS, HYBRID ? PER_NODE : 0, TOKENS);
    std::ifstream file(ptx);
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    for (bool again : CACHED ? std::vector<bool>{false, true} : std::vector<bool>{false}) {
      auto name = HYBRID ? entry(text, "hybrid_dispatch_impl", {!again, again}) : entry(text, "dispatch_impl", {false, !again, again});
      dispatch_kernels.push_back(name), copy_kernels.push_back(entry(text, "dispatch_copy_epilogue_impl", {EXPAND, again}));
    }
    combine_kernel = entry(text, HYBRID ? "hybrid_combine_impl" : "combine_impl"), reduce_kernel = entry(text, "combine_reduce_epilogue_impl");
    open(sizes.all, CONTEXTS, RANKS + 4);
    workspace = window_of(lsa_rank), buffer = window_of(lsa_rank) + sizes.workspace;
    reduced = static_cast<char*>(buffer) + sizes.reduced_at;
    MUST(cuMemHostAlloc(&host, sizes.workspace, 0));
    MUST(cuMemHostGetDevicePointer(&host_workspace, host, 0));
    host_counts = layout::WorkspaceLayout(host, 1, RANKS, EXPERTS).get_scaleup_rank_expert_count_ptr<false>();
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
    combined.fill(0x5a), combined_weights.fill(0x5a), copied_topk.fill(0x5a);
    std::memset(host_counts, 0, (RANKS + EXPERTS) * sizeof(int64_t));
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

  // A kernel and its epilogue, which need not wait for each other.
  void launch(const std::string& kernel, const std::vector<void*>& arguments, int warps, int shared, const std::string& epilogue,
              const std::vector<void*>& more, int epilogue_shared) const {
    kernels.start(kernel.c_str(), arguments, BLOCKS, 32 * warps, shared, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
    kernels.launch(epilogue.c_str(), more, BLOCKS, 32 * WARPS, epilogue_shared, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  }

  void dispatch(uint32_t round) {
    for (bool again : CACHED ? std::vector<bool>{false, true} : std::vector<bool>{false}) {
      received.fill(0x5a), received_topk.fill(0x5a), received_weights.fill(0x5a);
      launch_dispatch(again);
      rows = check_dispatch_and_compute(round, again);
    }
  }

  void launch_dispatch(bool again) {
    std::vector<void*> arguments{&tokens.address,     &null,            &topk.address,      &weights.address, &copied_topk.address,
                                 &statistics.address, &by_rank.address, &by_expert.address, &counts.address,  &slots.address};
    auto add = [&](std::initializer_list<void*> more) { arguments.insert(arguments.end(), more); };
    if (HYBRID) add({&forwarded.address});
    add({&own_tokens, &none, &none, &host_comm, &nccl_window, &buffer, &workspace, &host_workspace});
    if (HYBRID) add({&node});
    add({&place});
    rows = RANKS * TOKENS;  // the epilogue looks the number up
    int warps = (again ? 0 : NOTIFY_WARPS) + (HYBRID ? 2 * WARPS : DISPATCH_WARPS);
    launch(dispatch_kernels[again], arguments, warps, sizes.dispatch_shared, copy_kernels[again],
           {&buffer, &workspace, &by_rank.address, &by_expert.address, &received.address, &null, &received_topk.address,
            &received_weights.address, &metadata.address, &lists.address, &counts.address, &rows, &none, &none, &node, &place},
           sizes.copy_shared);
  }

  void combine(uint32_t round) {
    std::vector<void*> arguments{&expert_out.address, &weights_to_send, &metadata.address, &by_rank.address};
    auto add = [&](std::initializer_list<void*> more) { arguments.insert(arguments.end(), more); };
    if (HYBRID) add({&forwarded.address, &lists.address});
    add({&host_comm, &nccl_window, &buffer, &workspace});
    if (HYBRID) add({&node});
    add({&place, &rows});
    launch(combine_kernel, arguments, HYBRID ? 2 * WARPS : WARPS, sizes.combine_shared, reduce_kernel,
           {&combined.address, &weights_back, &topk.address, &reduced, &null, &null, &own_tokens, &node, &place}, sizes.reduce_shared);
    check_combine(round);
  }

  // Also writes what the experts make of what dispatch received. Returns the number of tokens received.
  int check_dispatch_and_compute(uint32_t round, bool again) {
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
      seen[e] += again ? 0 : of_expert[e];
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

int main(int argc, char** argv) {
  return ep::run<Rank>("DeepEP", argc, argv);
}

#endif
