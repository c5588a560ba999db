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

#else

#include "driver.h"

#include "device/ll_ep_adapter.cuh"

#include <set>

using namespace ep;
using Bits = TYPE::Bits;
constexpr auto layout = NAME(NCCL_EP_LAYOUT_, LAYOUT);
constexpr bool rank_major = layout == NCCL_EP_LAYOUT_RANK_MAJOR;
constexpr bool fp8 = NAME(NCCL_EP_DISP_QUANT_, RECIPE) != NCCL_EP_DISP_QUANT_NONE;
constexpr ncclDataType_t token_type = sizeof(Bits) == 4 ? ncclFloat32 : std::is_same_v<TYPE, Fp16> ? ncclFloat16 : ncclBfloat16;
constexpr uint32_t CONTEXTS = MAX_NCCL_GIN_CTX_PER_COMM, SCALES = HIDDEN / nccl_ep::kDsFp8E3M4ElementsPerScale;

// One rank's buffers, and the arguments of its kernels.
struct Rank {
  const Routing& routing;
  uint32_t rank, ranks, local, room;  // local experts; slots for received tokens of an expert (or of all, rank-major)
  nccl_ep::LowLatencyLayout memory;
  int wrong = 0;
  Buffer<Bits> tokens, expert_out, combined;
  Buffer<uint8_t> received;
  Buffer<float> scales, weights, received_weights;
  Buffer<int64_t> topk, layout_range;
  Buffer<int32_t> received_topk, source, counts, rank_counts, workspace;
  Buffer<nccl_ep::LowLatencyEpochState> epoch;

  Rank(const Routing& r, uint32_t rank_)
    : routing(r), rank(rank_), ranks(r.ranks), local(r.experts / r.ranks), room(r.ranks * r.most),
      memory(r.most, HIDDEN * sizeof(Bits), r.ranks, r.experts, TOPK, layout), tokens(r.most * HIDDEN), expert_out(slots() * HIDDEN),
      combined(r.most * HIDDEN), received(slots() * HIDDEN * (fp8 ? 1 : sizeof(Bits))), scales(slots() * SCALES), weights(r.most * TOPK),
      received_weights(room * TOPK), topk(r.most * TOPK), layout_range(local * ranks), received_topk(room * TOPK),
      source(ranks + room * (TOPK + 1)), counts(local), rank_counts(ranks), workspace(2 * ranks + r.experts), epoch(1) {}

  size_t slots() const {
    return size_t(rank_major ? 1 : local) * room;
  }
  void expect(bool is_right, const char* what, uint32_t round, uint32_t where) {
    if (is_right || ++wrong > 5) return;
    std::fprintf(stderr, "rank %u, round %u: wrong %s at %u\n", rank, round, what, where);
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

  nccl_ep::ll::dispatch_kernel_args_t dispatch(const Nccl& nccl, char* window, uint32_t sms) {
    nccl_ep::ll::dispatch_kernel_args_t p{};
    p.inData = tokens.get();
    p.inTopkIdx = topk.get();
    p.inTopkWeights = rank_major ? weights.get() : nullptr;
    p.outDataBuf = received.get();
    p.outScalesBuf = fp8 ? scales.get() : nullptr;
    p.outSrcInfo = source.get();
    p.outRecvRankCounter = rank_major ? rank_counts.get() : nullptr;
    p.outLayout = layout_range.get();
    p.outCnt = rank_major ? nullptr : counts.get();
    p.outRecvTopkWeights = rank_major ? received_weights.get() : nullptr;
    p.outRecvTopkIdx = rank_major ? received_topk.get() : nullptr;
    p.rdmaBuf = window;
    p.sendOff = memory.buffer.dispatch_rdma_send_buffer_offset;
    p.recvOff = memory.buffer.dispatch_rdma_recv_data_buffer_offset;
    p.recvCntOff = memory.buffer.dispatch_rdma_recv_count_buffer_offset;
    p.rankCountersBase = workspace.get();
    p.rankDone = workspace.get() + 2 * ranks;
    p.nextRecvCntBufSize = memory.buffer.num_clean_int;
    p.epochState = epoch.get();
    p.payloadSlotStride = memory.payload_slot_stride;
    p.signalSlotStride = memory.signal_slot_stride;
    p.numTokens = int(routing.tokens(rank));
    p.maxTokensPerRank = int(routing.most);
    p.numExperts = int(routing.experts);
    p.currRank = int(rank);
    p.numRanks = int(ranks);
    p.numWarpGroups = nccl_ep::ceil_div(int(routing.experts), int(sms));
    p.numWarpsPerGroup = 32 / p.numWarpGroups;
    p.roundScale = true;
    p.recvTopkIdxKind = NCCL_EP_EXPERT_ID_LOCAL;
    p.devComms = nccl.comm.get();
    p.windows = nccl.windows.get();
    p.timeoutCycles = NUM_TIMEOUT_CYCLES;
    return p;
  }

  nccl_ep::ll::combine_kernel_args_t combine(const nccl_ep::ll::dispatch_kernel_args_t& d, int warps_per_group) {
    nccl_ep::ll::combine_kernel_args_t p{};
    p.inData = expert_out.get();
    p.srcInfo = source.get();
    p.layoutRange = layout_range.get();
    p.inTopkIdx = topk.get();
    p.topkWeights = rank_major ? nullptr : weights.get();
    p.outData = combined.get();
    p.rdmaBuf = d.rdmaBuf;
    p.sendOff = memory.buffer.combine_rdma_send_buffer_offset;
    p.recvOff = memory.buffer.combine_rdma_recv_data_buffer_offset;
    p.recvFlagOff = memory.buffer.combine_rdma_recv_flag_buffer_offset;
    p.atomicCleanFlag = workspace.get();
    p.nextRecvCntBufSize = memory.buffer.num_clean_int;
    p.epochState = epoch.get();
    p.payloadSlotStride = memory.payload_slot_stride;
    p.signalSlotStride = memory.signal_slot_stride;
    p.numCombinedTokens = d.numTokens;
    p.hidden = HIDDEN;
    p.maxTokensPerRank = d.maxTokensPerRank;
    p.numExperts = d.numExperts;
    p.currRank = d.currRank;
    p.numRanks = d.numRanks;
    p.numWarpGroups = d.numWarpGroups;
    p.numWarpsPerGroup = warps_per_group;
    p.devComms = d.devComms;
    p.windows = d.windows;
    p.timeoutCycles = d.timeoutCycles;
    return p;
  }

  // The number at `i` of a received row.
  float received_number(const std::vector<uint8_t>& rows, const std::vector<float>& factors, size_t slot, uint32_t i) const {
    if (fp8) return e4m3(rows[slot * HIDDEN + i]) * factors[slot * SCALES + i / nccl_ep::kDsFp8E3M4ElementsPerScale];
    Bits bits;
    std::memcpy(&bits, &rows[(slot * HIDDEN + i) * sizeof(Bits)], sizeof(Bits));
    return TYPE::number(bits);
  }

  // Checks what dispatch received, and writes what the experts make of it.
  void check_dispatch_and_compute(uint32_t round) {
    auto rows = received.read();
    auto factors = scales.read(), got_weights = received_weights.read();
    auto info = source.read(), got_topk = received_topk.read(), got_counts = counts.read(), by_rank = rank_counts.read();
    std::vector<Bits> out(slots() * HIDDEN, TYPE::bits(0));
    std::vector<uint32_t> of_expert(local);
    std::set<int32_t> used;

    auto check_row = [&](size_t slot, uint32_t from, uint32_t token) {
      for (uint32_t i = 0; i < HIDDEN; i++) {
        expect(received_number(rows, factors, slot, i) == Routing::value(from, token, i, round), "number of a row", round, uint32_t(slot));
      }
    };
    for (uint32_t from = 0; from < ranks; from++) {
      uint32_t sent = 0;
      for (uint32_t token = 0; token < routing.tokens(from); token++) {
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
            expect(got_topk[row * TOPK + k] == (here ? int32_t(experts[k] % local) : -1), "expert", round, uint32_t(row));
            expect(got_weights[row * TOPK + k] == weight, "weight", round, uint32_t(row));
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

  void check_combine(uint32_t round) {
    auto found = combined.read();
    for (uint32_t token = 0; token < routing.tokens(rank); token++) {
      auto experts = routing.experts_of(rank, token, round);
      for (uint32_t i = 0; i < HIDDEN; i++) {
        std::vector<float> parts(rank_major ? ranks : 1);
        for (uint32_t k = 0; k < TOPK; k++) {
          if (experts[k] < 0) continue;
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

int main(int argc, char** argv) try {
  Options options(argc, argv);
  std::string kernels_file = options.word("kernels", "ll.ptx"), library = options.word("device", "dist/cuda/ferrogin_device.ptx");
  uint32_t rounds = options.number("rounds", 2), sms = options.number("sms", 2), split = options.number("split", 0), strong = options.number("strong", 1);
  Routing routing{options.word("routing", "even"), 0, options.number("experts", 8), TOPK, options.number("tokens", 8)};
  options.end();

  auto comm = ferrogin::Comm::open();
  routing.ranks = comm.ranks();
  if (routing.experts % routing.ranks) throw std::invalid_argument("the ranks need equally many experts");
  Kernels kernels({kernels_file.c_str(), library.c_str()});
  Rank self(routing, comm.rank());
  auto window = comm.allocate(self.memory.total_bytes, ferrogin::Memory::Device);
  ferrogin::ContextOptions limits;
  limits.contexts = CONTEXTS;
  limits.signals = 2 * routing.experts + 1;
  auto context = comm.context(limits);
  Nccl nccl(comm, window, context, CONTEXTS, limits.signals, strong);

  auto dispatch = self.dispatch(nccl, static_cast<char*>(window.address()), sms);
  auto fit = nccl_ep::ll::choose_combine_smem_config(HIDDEN, token_type, NCCL_EP_COMB_QUANT_NONE, dispatch.numWarpGroups,
                                                     dispatch.numWarpsPerGroup, 227 * 1024);
  if (!fit.feasible) throw std::invalid_argument("combine doesn't fit in shared memory");
  auto combine = self.combine(dispatch, fit.num_warps_per_group);
  int warps = dispatch.numWarpGroups * dispatch.numWarpsPerGroup, blocks = nccl_ep::ceil_div(dispatch.numExperts, dispatch.numWarpGroups);
  int per_block = nccl_ep::ceil_div(dispatch.numTokens, int(sms));
  int combine_blocks = std::max(blocks, per_block ? nccl_ep::ceil_div(dispatch.numTokens, per_block) : 1);

  const int cooperative = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  // Both phases in one launch, or a launch for each.
  auto phases = [&](auto& arguments, auto launch) {
    for (int phase : split ? std::vector<int>{LOW_LATENCY_SEND_PHASE, LOW_LATENCY_RECV_PHASE} : std::vector<int>{3}) {
      arguments.phases = phase;
      launch();
    }
  };
  for (uint32_t round = 0; round < rounds && !self.wrong; round++) {
    self.prepare(round);
    phases(dispatch, [&] { kernels.launch("ll_dispatch", {&dispatch}, blocks, warps * 32, 0, cooperative); });
    self.check_dispatch_and_compute(round);
    phases(combine, [&] { kernels.launch("ll_combine", {&combine}, combine_blocks, fit.num_warps * 32, fit.dynamic_smem_bytes, cooperative); });
    self.check_combine(round);
    context.check();
  }
  std::printf("LL, rank %u of %u: %u rounds of %d tokens, %d values are wrong\n", self.rank, self.ranks, rounds, dispatch.numTokens, self.wrong);
  if (self.wrong) return 1;
  FlushArguments delivered{nccl.comm.get(), CONTEXTS};
  kernels.launch("flush", {&delivered}, 1, 1, 0);
  comm.barrier();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

#endif
