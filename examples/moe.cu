// Mixture of experts, dispatch and combine: each rank has tokens and one expert. Dispatch puts each token to its expert's rank, and combine
// puts the expert's result back. Token counts travel as values, and tokens as puts by warps. Both may arrive in any order, so an expert
// first waits for the counts of all ranks, adds them up, and waits for that many tokens.
#include "example.h"

using namespace ferrogin;

constexpr uint32_t TOKENS = 96, HIDDEN = 128;
constexpr uint64_t ROW = HIDDEN * sizeof(float);

enum : uint32_t { COUNTED, DISPATCHED, COMBINED, SIGNALS };

// Byte offsets in the window. Tables of `ranks` by TOKENS rows have a row for every token of every rank.
struct Layout {
  uint64_t counts;    // how many tokens each rank has for this rank's expert
  uint64_t sent;      // how many tokens this rank has for each expert; put to the ranks' `counts`
  uint64_t experts;   // the expert of each of this rank's tokens
  uint64_t slots;     // each token's number among those this rank has for the same expert
  uint64_t tokens;    // this rank's tokens
  uint64_t inbox;     // the expert's tokens from all ranks, by rank and slot
  uint64_t results;   // the expert's results, by rank and slot
  uint64_t combined;  // the results for this rank's tokens, by expert and slot
  uint64_t bytes;

  FGIN_API explicit Layout(uint64_t ranks)
    : counts(0),
      sent(counts + ranks * sizeof(uint64_t)),
      experts(sent + ranks * sizeof(uint64_t)),
      slots(experts + TOKENS * sizeof(uint32_t)),
      tokens(slots + TOKENS * sizeof(uint32_t)),
      inbox(tokens + TOKENS * ROW),
      results(inbox + ranks * TOKENS * ROW),
      combined(results + ranks * TOKENS * ROW),
      bytes(combined + ranks * TOKENS * ROW) {}
};

// What rank `expert`'s expert computes from a number.
FGIN_API float apply(uint32_t expert, float x) {
  return x * float(expert + 2) + 1;
}

template <typename T>
FGIN_API T* at(char* base, uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

KERNEL dispatch_and_combine(Outcome* outcome, void* handle, fgin_window window, char* base, uint32_t rank,
                            uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  Warp warp;
  Layout layout(ranks);
  uint32_t warps = block.size() / warp.size(), own = block.thread_rank() / warp.size();

  for (uint32_t peer = 0; peer < ranks; peer++) {
    uint64_t count = at<uint64_t>(base, layout.sent)[peer];
    TRY(gin.putValue(peer, window, layout.counts + rank * sizeof(count), count, SignalInc{COUNTED}, block));
  }
  for (uint32_t token = own; token < TOKENS; token += warps) {
    uint32_t expert = at<uint32_t>(base, layout.experts)[token], slot = at<uint32_t>(base, layout.slots)[token];
    uint64_t to = layout.inbox + (rank * TOKENS + slot) * ROW, from = layout.tokens + token * ROW;
    TRY(gin.put(expert, window, to, window, from, ROW, SignalInc{DISPATCHED}, None{}, warp));
  }

  TRY(gin.waitSignal(COUNTED, ranks, block));
  const volatile uint64_t* counts = at<uint64_t>(base, layout.counts);
  uint64_t total = 0;
  for (uint32_t peer = 0; peer < ranks; peer++) total += counts[peer];
  TRY(gin.waitSignal(DISPATCHED, total, block));

  for (uint32_t peer = 0; peer < ranks; peer++) {
    uint64_t first = uint64_t(peer) * TOKENS * HIDDEN;
    for (uint64_t i = block.thread_rank(); i < counts[peer] * HIDDEN; i += block.size()) {
      at<float>(base, layout.results)[first + i] = apply(rank, at<float>(base, layout.inbox)[first + i]);
    }
  }
  block.sync();
  for (uint32_t peer = 0; peer < ranks; peer++) {
    for (uint64_t slot = own; slot < counts[peer]; slot += warps) {
      uint64_t to = layout.combined + (rank * TOKENS + slot) * ROW;
      uint64_t from = layout.results + (peer * TOKENS + slot) * ROW;
      TRY(gin.put(peer, window, to, window, from, ROW, SignalInc{COMBINED}, None{}, warp));
    }
  }
  TRY(gin.waitSignal(COMBINED, TOKENS, block));
  TRY(gin.flush(block));
}

int main() try {
  auto comm = Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks();
  Layout layout(ranks);
  auto window = comm.allocate(layout.bytes, Memory::Host);
  ContextOptions options;
  options.signals = SIGNALS;
  auto context = comm.context(options);

  auto* base = static_cast<char*>(window.host_address());
  for (uint32_t token = 0; token < TOKENS; token++) {
    // An uneven choice: experts get different numbers of tokens.
    uint32_t expert = (token * token + 7 * rank) % (ranks + 1) % ranks;
    at<uint32_t>(base, layout.experts)[token] = expert;
    at<uint32_t>(base, layout.slots)[token] = uint32_t(at<uint64_t>(base, layout.sent)[expert]++);
    float* row = at<float>(base, layout.tokens) + token * HIDDEN;
    for (uint32_t i = 0; i < HIDDEN; i++) row[i] = float(rank * 1000 + token) + float(i) / HIDDEN;
  }
  LAUNCH(dispatch_and_combine, context, window.handle(), static_cast<char*>(window.address()), rank, ranks);
  context.check();

  int wrong = 0;
  for (uint32_t token = 0; token < TOKENS; token++) {
    uint32_t expert = at<uint32_t>(base, layout.experts)[token], slot = at<uint32_t>(base, layout.slots)[token];
    for (uint32_t i = 0; i < HIDDEN; i++) {
      float found = at<float>(base, layout.combined)[(expert * TOKENS + slot) * HIDDEN + i];
      // A GPU may round once where the CPU rounds twice.
      float expected = apply(expert, at<float>(base, layout.tokens)[token * HIDDEN + i]);
      wrong += !(found >= expected * 0.99999f && found <= expected * 1.00001f);
    }
  }
  std::printf("rank %u of %u: %u tokens, %d numbers differ\n", rank, ranks, TOKENS, wrong);
  comm.barrier();
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
