// Runs nccl_ep's low-latency dispatch and combine on the host API, without NCCL, and checks every row, weight and count. docs/ep.md has the
// commands: clang compiles this file twice, to PTX and to the program. The kernels' template arguments are macros, and their launches are
// those of nccl_ep's library.
#ifndef HIDDEN
#define HIDDEN 512
#endif
#ifndef TOPK
#define TOPK 2
#endif
#ifndef LAYOUT
#define LAYOUT EXPERT_MAJOR  // or RANK_MAJOR
#endif
#ifndef TYPE
#define TYPE Bf16  // or Fp16, Fp32: tokens, and what combine sums
#endif
#ifndef RECIPE
#define RECIPE NONE  // or DS_FP8E3M4: dispatch sends FP8 with a scale for each 128 numbers
#endif
#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)

#ifdef __CUDA_ARCH__

#include "driver.h"

#include "device/ll_ep.cuh"
#include "device/ll_ep_adapter.cuh"

using namespace nccl_ep;
constexpr auto Bf16 = ncclBfloat16, Fp16 = ncclFloat16, Fp32 = ncclFloat32;
constexpr auto layout = NAME(NCCL_EP_LAYOUT_, LAYOUT);
constexpr auto recipe = NAME(NCCL_EP_DISP_QUANT_, RECIPE);

extern "C" __global__ void __launch_bounds__(1024, 1) ll_dispatch(const __grid_constant__ ll::dispatch_kernel_args_t p) {
  ll::dispatch_kernel_impl<recipe, HIDDEN, TOPK, layout, false, int64_t, TYPE, float>(
      p.inData, static_cast<const uint8_t*>(p.inScalesBuf), static_cast<const int64_t*>(p.inTopkIdx), p.inTopkWeights, p.rankMask,
      p.asyncErrorFlag, p.outDataBuf, p.outScalesBuf, p.outSrcInfo, p.outRecvRankCounter, p.outLayout, p.outCnt, p.outRecvTopkWeights,
      p.outRecvTopkIdx, p.rdmaBuf, p.sendOff, p.recvOff, p.recvCntOff, p.rankCountersBase, p.rankDone, p.nextRecvCntBufSize, p.recvStats,
      p.waitStats, p.epochState, p.payloadSlotStride, p.signalSlotStride, p.numTokens, p.scalesPerToken, p.maxTokensPerRank, p.numExperts,
      p.currRank, p.numRanks, p.numWarpGroups, p.numWarpsPerGroup, p.roundScale, p.recvTopkIdxKind, p.phases, p.numComms, p.devComms,
      p.windows, p.signalsBase, p.timeoutCycles, p.recvDataWindow, p.recvDataOffset, p.rcvScalesWin, p.rcvScalesOffs);
}

extern "C" __global__ void __launch_bounds__(1024, 1) ll_combine(const __grid_constant__ ll::combine_kernel_args_t p) {
  ll::combine_kernel_impl<false, HIDDEN, TOPK, ll::kCombineMaxUnrolls, layout, int64_t, TYPE, NCCL_EP_COMB_QUANT_NONE>(
      p.inData, p.inGlobalScales, p.srcInfo, p.layoutRange, static_cast<const int64_t*>(p.inTopkIdx), p.topkWeights, p.rankMask,
      p.asyncErrorFlag, p.outData, p.rdmaBuf, p.sendOff, p.recvOff, p.recvFlagOff, p.atomicCleanFlag, p.nextRecvCntBufSize, p.waitStats,
      p.epochState, p.payloadSlotStride, p.signalSlotStride, p.numCombinedTokens, p.hidden, p.maxTokensPerRank, p.numExperts, p.currRank,
      p.numRanks, p.numWarpGroups, p.numWarpsPerGroup, p.phases, p.zeroCopy, p.numComms, p.devComms, p.windows, p.signalsBase,
      p.timeoutCycles);
}

#ifdef FGIN_API
// Tells the active ranks that this one is here, unless it has, and waits until each has said so `times` times, or one is lost.
extern "C" __global__ void meet(void* handle, const int* active, uint32_t rank, uint32_t ranks, uint32_t signals, uint32_t times,
                                uint32_t is_first, int* status) {
  const fgin_context* context = nullptr;
  int result = fgin_open(handle, 0, &context);
  for (uint32_t peer = 0; result == FGIN_OK && is_first && peer < ranks; peer++) {
    if (active[peer]) result = fgin_signal(context, peer, FGIN_SIGNAL_INC(signals + rank), 0);
    if (result == FGIN_PEER_LOST) result = FGIN_OK;
  }
  for (uint32_t peer = 0; result == FGIN_OK && peer < ranks; peer++) {
    if (active[peer]) result = fgin_wait_signal(context, signals + peer, times);
  }
  *status = result;
}
#endif

#else

#include "driver.h"

#include "device/ll_ep_adapter.cuh"

#include <csignal>
#include <set>

using namespace ep;
using Bits = TYPE::Bits;
constexpr auto layout = NAME(NCCL_EP_LAYOUT_, LAYOUT);
constexpr bool rank_major = layout == NCCL_EP_LAYOUT_RANK_MAJOR;
constexpr bool fp8 = NAME(NCCL_EP_DISP_QUANT_, RECIPE) != NCCL_EP_DISP_QUANT_NONE;
constexpr ncclDataType_t token_type = sizeof(Bits) == 4 ? ncclFloat32 : std::is_same_v<TYPE, Fp16> ? ncclFloat16 : ncclBfloat16;
constexpr uint32_t CONTEXTS = MAX_NCCL_GIN_CTX_PER_COMM, SCALES = HIDDEN / nccl_ep::kDsFp8E3M4ElementsPerScale;

struct Rank : Driver {
  // Local experts, slots for received tokens of an expert (or of all, rank-major), the SMs that the kernels may use.
  uint32_t local = routing.experts / ranks, room = ranks * routing.most, sms = options.number("sms", 2);
  bool split = options.number("split", 0);
  // The rank that ends without a word before combine of round rounds / 2, if any: before its signal to the other ranks that it's there, or
  // with late=1 after it, so that they wait for it in combine. Then the kernels get a mask of the active ranks, as with nccl_ep's
  // enable_mask: they skip masked ranks, and mask one that has sent nothing for `timeout` million cycles.
  uint32_t dies = options.number("dies", ranks), late = options.number("late", 0), timeout = options.number("timeout", 8), times = 0;
  Buffer<int> mask{ranks}, status{1};
  std::vector<int> active = std::vector<int>(ranks, 1);
  nccl_ep::LowLatencyLayout layout_of{int(routing.most), HIDDEN * sizeof(Bits), int(ranks), int(routing.experts), TOPK, layout};
  Buffer<Bits> tokens{routing.most * HIDDEN}, expert_out{slots() * HIDDEN}, combined{routing.most * HIDDEN};
  Buffer<uint8_t> received{slots() * HIDDEN * (fp8 ? 1 : sizeof(Bits))};
  Buffer<float> scales{slots() * SCALES}, weights{routing.most * TOPK}, received_weights{room * TOPK};
  Buffer<int64_t> topk{routing.most * TOPK}, layout_range{local * ranks};
  Buffer<int32_t> received_topk{room * TOPK}, source{ranks + room * (TOPK + 1)}, counts{local}, rank_counts{ranks},
      workspace{2 * ranks + routing.experts};
  Buffer<nccl_ep::LowLatencyEpochState> epoch{1};
  int groups = nccl_ep::ceil_div(int(routing.experts), int(sms)), warps_per_group = 32 / groups;
  nccl_ep::ll::combine_smem_config_t fit =
      nccl_ep::ll::choose_combine_smem_config(HIDDEN, token_type, NCCL_EP_COMB_QUANT_NONE, groups, warps_per_group, 227 * 1024);
  int blocks, combine_blocks;
  nccl_ep::ll::dispatch_kernel_args_t dispatch_arguments{};
  nccl_ep::ll::combine_kernel_args_t combine_arguments{};

  explicit Rank(Options& given) : Driver(given, given.number("experts", 8), TOPK, given.number("tokens", 8)) {
    if (routing.experts % ranks) throw std::invalid_argument("the ranks need equally many experts");
    if (!fit.feasible) throw std::invalid_argument("combine doesn't fit in shared memory");
    open(layout_of.total_bytes, CONTEXTS, 2 * routing.experts + 1 + ranks);
    mask.set(active);
    set_dispatch_arguments(dispatch_arguments);
    set_combine_arguments(combine_arguments, dispatch_arguments);
    int per_block = nccl_ep::ceil_div(dispatch_arguments.numTokens, int(sms));
    blocks = nccl_ep::ceil_div(int(routing.experts), groups);
    combine_blocks = std::max(blocks, per_block ? nccl_ep::ceil_div(dispatch_arguments.numTokens, per_block) : 1);
  }
  size_t slots() const {
    return size_t(rank_major ? 1 : local) * room;
  }
  void prepare(uint32_t round) {
    std::vector<Bits> in;
    std::vector<float> by;
    std::vector<int64_t> to;
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      for (int64_t expert : routing.experts_of(rank, token, round)) to.push_back(expert);
      for (uint32_t k = 0; k < TOPK; k++) by.push_back(routing.weight(rank, token, k, round));
      for (uint32_t i = 0; i < HIDDEN; i++) in.push_back(TYPE::bits(Routing::value(rank, token, i, round)));
    }
    tokens.set(in), weights.set(by), topk.set(to);
    for (auto* stale : {&received_topk, &source, &rank_counts}) stale->fill(0x5a);
    received.fill(0x5a), combined.fill(0x5a), scales.fill(0x5a), received_weights.fill(0x5a);
  }

  void set_dispatch_arguments(nccl_ep::ll::dispatch_kernel_args_t& p) const {
    p.inData = tokens.get();
    p.inTopkIdx = topk.get();
    p.inTopkWeights = rank_major ? weights.get() : nullptr;
    p.rankMask = dies < ranks ? mask.get() : nullptr;
    p.outDataBuf = received.get();
    p.outScalesBuf = fp8 ? scales.get() : nullptr;
    p.outSrcInfo = source.get();
    p.outRecvRankCounter = rank_major ? rank_counts.get() : nullptr;
    p.outLayout = layout_range.get();
    p.outCnt = rank_major ? nullptr : counts.get();
    p.outRecvTopkWeights = rank_major ? received_weights.get() : nullptr;
    p.outRecvTopkIdx = rank_major ? received_topk.get() : nullptr;
    p.rdmaBuf = window;
    p.sendOff = layout_of.buffer.dispatch_rdma_send_buffer_offset;
    p.recvOff = layout_of.buffer.dispatch_rdma_recv_data_buffer_offset;
    p.recvCntOff = layout_of.buffer.dispatch_rdma_recv_count_buffer_offset;
    p.rankCountersBase = workspace.get();
    p.rankDone = workspace.get() + 2 * ranks;
    p.nextRecvCntBufSize = layout_of.buffer.num_clean_int;
    p.epochState = epoch.get();
    p.payloadSlotStride = layout_of.payload_slot_stride;
    p.signalSlotStride = layout_of.signal_slot_stride;
    p.numTokens = int(routing.tokens(rank));
    p.maxTokensPerRank = int(routing.most);
    p.numExperts = int(routing.experts);
    p.currRank = int(rank);
    p.numRanks = int(ranks);
    p.numWarpGroups = groups;
    p.numWarpsPerGroup = warps_per_group;
    p.roundScale = true;
    p.recvTopkIdxKind = NCCL_EP_EXPERT_ID_LOCAL;
    p.devComms = dev_comm.get();
    p.windows = views.get();
    p.timeoutCycles = dies < ranks ? timeout * 1'000'000ull : NUM_TIMEOUT_CYCLES;
  }

  void set_combine_arguments(nccl_ep::ll::combine_kernel_args_t& p, const nccl_ep::ll::dispatch_kernel_args_t& d) const {
    p.inData = expert_out.get();
    p.srcInfo = source.get();
    p.layoutRange = layout_range.get();
    p.inTopkIdx = topk.get();
    p.topkWeights = rank_major ? nullptr : weights.get();
    p.rankMask = d.rankMask;
    p.outData = combined.get();
    p.rdmaBuf = d.rdmaBuf;
    p.sendOff = layout_of.buffer.combine_rdma_send_buffer_offset;
    p.recvOff = layout_of.buffer.combine_rdma_recv_data_buffer_offset;
    p.recvFlagOff = layout_of.buffer.combine_rdma_recv_flag_buffer_offset;
    p.atomicCleanFlag = workspace.get();
    p.nextRecvCntBufSize = layout_of.buffer.num_clean_int;
    p.epochState = epoch.get();
    p.payloadSlotStride = layout_of.payload_slot_stride;
    p.signalSlotStride = layout_of.signal_slot_stride;
    p.numCombinedTokens = d.numTokens;
    p.hidden = HIDDEN;
    p.maxTokensPerRank = d.maxTokensPerRank;
    p.numExperts = d.numExperts;
    p.currRank = d.currRank;
    p.numRanks = d.numRanks;
    p.numWarpGroups = d.numWarpGroups;
    p.numWarpsPerGroup = fit.num_warps_per_group;
    p.devComms = d.devComms;
    p.windows = d.windows;
    p.timeoutCycles = d.timeoutCycles;
  }

  // The number at `i` of a received row.
  float received_number(const std::vector<uint8_t>& rows, const std::vector<float>& factors, size_t slot, uint32_t i) const {
    if (fp8) return e4m3(rows[slot * HIDDEN + i]) * factors[slot * SCALES + i / nccl_ep::kDsFp8E3M4ElementsPerScale];
    Bits bits;
    std::memcpy(&bits, &rows[(slot * HIDDEN + i) * sizeof(Bits)], sizeof(Bits));
    return TYPE::number(bits);
  }

  // Both phases in one launch, or a launch for each.
  template <typename Arguments>
  void launch(const char* name, Arguments& arguments, int grid, int warps, int shared) {
    for (int phase : split ? std::vector<int>{LOW_LATENCY_SEND_PHASE, LOW_LATENCY_RECV_PHASE} : std::vector<int>{3}) {
      arguments.phases = phase;
      kernels.launch(name, {&arguments}, grid, 32 * warps, shared, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
    }
    if (dies < ranks) active = mask.read();
  }

  // Waits until the active ranks are here, so that none waits in a kernel for one that is still busy. Masks lost ranks, as ncclEpMaskUpdate
  // does.
  void meet(bool ends) {
    if (dies >= ranks) return;
    if (ends) deliver();
    if (ends && !late) std::raise(SIGKILL);
    void* handle = host_comm.ginHandles[0];
    uint32_t first = 2 * routing.experts + 1, is_first = 1;
    times++;
    for (int result = FGIN_PEER_LOST; result == FGIN_PEER_LOST; is_first = 0) {
      for (uint32_t peer : lost()) active[peer] = 0;
      mask.set(active);
      kernels.launch("meet", {&handle, &mask.address, &rank, &ranks, &first, &times, &is_first, &status.address}, 1, 1, 0);
      result = status.read()[0];
      if (result != FGIN_OK && result != FGIN_PEER_LOST) throw std::runtime_error("the ranks don't meet: status " + std::to_string(result));
    }
    if (ends) std::raise(SIGKILL);
  }

  // Also writes what the experts make of what it received.
  void dispatch(uint32_t round) {
    meet(false);
    launch("ll_dispatch", dispatch_arguments, blocks, groups * warps_per_group, 0);
    auto rows = received.read();
    auto factors = scales.read(), got_weights = received_weights.read();
    auto info = source.read(), got_topk = received_topk.read(), got_counts = counts.read(), by_rank = rank_counts.read();
    std::vector<Bits> out(slots() * HIDDEN, TYPE::bits(0));
    std::vector<uint32_t> of_expert(local);
    std::set<int32_t> used;

    auto check_row = [&](size_t slot, uint32_t from, uint32_t token) {
      for (uint32_t i = 0; i < HIDDEN; i++) {
        expect(received_number(rows, factors, slot, i) == Routing::value(from, token, i, round), "number of a row", round, slot);
      }
    };
    for (uint32_t from = 0; from < ranks; from++) {
      uint32_t sent = 0;
      for (uint32_t token = 0; active[from] && token < routing.tokens(from); token++) {
        auto experts = routing.experts_of(from, token, round);
        sent += std::any_of(experts.begin(), experts.end(), [&](int64_t e) { return e >= 0 && e / local == rank; });
      }
      expect(info[from] == int32_t(sent), "number of tokens from rank", round, from);
      if (rank_major) expect(by_rank[from] == int32_t(sent), "rank counter", round, from);
      std::set<int32_t> seen;
      for (uint32_t n = 0; n < sent && info[from] == int32_t(sent); n++) {
        const int32_t* entry = &info[ranks + (from * routing.most + n) * (TOPK + 1)];
        expect(entry[0] >= 0 && entry[0] < int32_t(routing.tokens(from)) && seen.insert(entry[0]).second, "token id", round, n);
        if (wrong) continue;
        uint32_t token = uint32_t(entry[0]);
        auto experts = routing.experts_of(from, token, round);
        size_t row = size_t(from) * routing.most + n;
        std::vector<float> sum(HIDDEN);
        if (rank_major) check_row(row, from, token);
        for (uint32_t k = 0; k < TOPK; k++) {
          bool here = experts[k] >= 0 && experts[k] / local == rank;
          float weight = routing.weight(from, token, k, round);
          if (rank_major) {
            expect(got_topk[row * TOPK + k] == (here ? int32_t(experts[k] % local) : -1), "expert", round, row);
            expect(got_weights[row * TOPK + k] == weight, "weight", round, row);
            for (uint32_t i = 0; here && i < HIDDEN; i++) {
              sum[i] += weight * Routing::apply(uint32_t(experts[k]), Routing::value(from, token, i, round));
            }
            continue;
          }
          int32_t slot = entry[1 + k];
          if (!here) {
            expect(slot == -1, "slot", round, n);
            continue;
          }
          of_expert[experts[k] % local]++;
          bool valid = slot >= 0 && slot < int32_t(slots()) && slot / room == experts[k] % local && used.insert(slot).second;
          expect(valid, "slot of an expert", round, n);
          if (!valid) continue;
          check_row(size_t(slot), from, token);
          for (uint32_t i = 0; i < HIDDEN; i++) {
            out[slot * HIDDEN + i] = TYPE::bits(Routing::apply(uint32_t(experts[k]), Routing::value(from, token, i, round)));
          }
        }
        // Rank-major: the caller of combine applies the weights.
        for (uint32_t i = 0; rank_major && i < HIDDEN; i++) out[row * HIDDEN + i] = TYPE::bits(sum[i]);
      }
    }
    for (uint32_t expert = 0; !rank_major && expert < local; expert++) {
      expect(got_counts[expert] == int32_t(of_expert[expert]), "count of expert", round, expert);
    }
    expert_out.set(out);
  }

  void combine(uint32_t round) {
    meet(rank == dies && round == rounds / 2);
    launch("ll_combine", combine_arguments, combine_blocks, fit.num_warps, fit.dynamic_smem_bytes);
    for (uint32_t peer = 0; dies < ranks && peer < ranks; peer++) {
      expect(active[peer] == (peer != dies || round < rounds / 2), "mask of rank", round, peer);
    }
    auto found = combined.read();
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      auto experts = routing.experts_of(rank, token, round);
      for (uint32_t i = 0; i < HIDDEN; i++) {
        std::vector<float> parts(rank_major ? ranks : 1);
        for (uint32_t k = 0; k < TOPK; k++) {
          if (experts[k] < 0 || !active[experts[k] / local]) continue;
          float x = Routing::apply(uint32_t(experts[k]), Routing::value(rank, token, i, round));
          parts[rank_major ? experts[k] / local : 0] += routing.weight(rank, token, k, round) * x;
        }
        float sum = 0;
        for (float part : parts) sum += rank_major ? round_to<TYPE>(part) : part;
        expect(TYPE::number(found[token * HIDDEN + i]) == round_to<TYPE>(sum), "combined number of token", round, token);
      }
    }
  }
};

int main(int argc, char** argv) {
  return ep::run<Rank>("LL", argc, argv);
}

#endif
