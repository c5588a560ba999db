// Mixture of experts, dispatch and combine: each rank has tokens and one expert. Dispatch puts each token to its expert's rank, and combine
// puts the expert's result back. Token counts travel as values, and tokens as puts by warps. Both may arrive in any order, so an expert
// first waits for a rank's count, and then for that many of its tokens.
//
// With FERROGIN_ON_PEER_FAILURE=isolate, the ranks go on without one that is lost: its tokens and those for its expert are dropped.
// That's why each peer has its own signals, and why the kernels that wait can run again.
#include "example.h"

#include <csignal>

using namespace ferrogin;

constexpr uint32_t TOKENS = 96, HIDDEN = 128;
constexpr uint64_t ROW = HIDDEN * sizeof(float);

enum Signal : uint32_t { COUNTED, DISPATCHED, COMBINED, SIGNALS };

FGIN_API uint32_t signal_from(uint32_t peer, Signal signal) {
  return peer * SIGNALS + signal;
}

// Byte offsets in the window. Tables of `ranks` by TOKENS rows have a row for every token of every rank.
struct Layout {
  uint64_t ranks;
  uint64_t lost;        // whether each rank is lost
  uint64_t dispatched;  // how many tokens each rank had for this rank's expert in earlier rounds
  uint64_t combined;    // how many results each rank's expert had for this rank in earlier rounds
  uint64_t sent;        // how many tokens this rank has for each expert; put to the ranks' `counts`
  uint64_t experts;     // the expert of each of this rank's tokens
  uint64_t slots;       // each token's number among those this rank has for the same expert
  uint64_t tokens;      // this rank's tokens
  uint64_t inbox;       // the expert's tokens from all ranks, by rank and slot
  uint64_t outbox;      // the expert's results, by rank and slot
  uint64_t results;     // the results for this rank's tokens, by expert and slot
  uint64_t bytes;

  FGIN_API explicit Layout(uint64_t ranks)
    : ranks(ranks),
      lost(2 * ranks * sizeof(uint64_t)),
      dispatched(lost + ranks * sizeof(uint64_t)),
      combined(dispatched + ranks * sizeof(uint64_t)),
      sent(combined + ranks * sizeof(uint64_t)),
      experts(sent + ranks * sizeof(uint64_t)),
      slots(experts + TOKENS * sizeof(uint32_t)),
      tokens(slots + TOKENS * sizeof(uint32_t)),
      inbox(tokens + TOKENS * ROW),
      outbox(inbox + ranks * TOKENS * ROW),
      results(outbox + ranks * TOKENS * ROW),
      bytes(results + ranks * TOKENS * ROW) {}

  // How many tokens each rank has for this rank's expert. A rank may begin its next round while another one is still in this one, but no
  // more.
  FGIN_API uint64_t counts(uint64_t round) const {
    return round % 2 * ranks * sizeof(uint64_t);
  }
};

// What rank `expert`'s expert computes from a number.
FGIN_API float apply(uint32_t expert, float x) {
  return x * float(expert + 2) + 1;
}

template <typename T>
FGIN_API T* at(char* base, uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

// Posts to a lost rank are refused, and nothing else changes for them.
FGIN_API int unless_lost(int status) {
  return status == FGIN_PEER_LOST ? FGIN_OK : status;
}

KERNEL dispatch(Outcome* outcome, void* handle, fgin_window window, char* base, uint64_t round, uint32_t rank, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  Warp warp;
  Layout layout(ranks);
  uint32_t warps = block.size() / warp.size(), own = block.thread_rank() / warp.size();
  SignalInc counted{signal_from(rank, COUNTED)}, dispatched{signal_from(rank, DISPATCHED)};

  for (uint32_t peer = 0; peer < ranks; peer++) {
    uint64_t count = at<uint64_t>(base, layout.sent)[peer], to = layout.counts(round) + rank * sizeof(count);
    TRY(unless_lost(gin.putValue(peer, window, to, count, counted, block)));
  }
  for (uint32_t token = own; token < TOKENS; token += warps) {
    uint32_t expert = at<uint32_t>(base, layout.experts)[token], slot = at<uint32_t>(base, layout.slots)[token];
    uint64_t to = layout.inbox + (rank * TOKENS + slot) * ROW, from = layout.tokens + token * ROW;
    TRY(unless_lost(gin.put(expert, window, to, window, from, ROW, dispatched, None{}, warp)));
  }
}

KERNEL compute(Outcome* outcome, void* handle, char* base, uint64_t round, uint32_t rank, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  Layout layout(ranks);

  for (uint32_t peer = 0; peer < ranks; peer++) {
    if (at<uint64_t>(base, layout.lost)[peer]) continue;
    TRY(gin.waitSignal(signal_from(peer, COUNTED), round, block));
    uint64_t count = at<const volatile uint64_t>(base, layout.counts(round))[peer];
    TRY(gin.waitSignal(signal_from(peer, DISPATCHED), at<uint64_t>(base, layout.dispatched)[peer] + count, block));
    uint64_t first = uint64_t(peer) * TOKENS * HIDDEN;
    for (uint64_t i = block.thread_rank(); i < count * HIDDEN; i += block.size()) {
      at<float>(base, layout.outbox)[first + i] = apply(rank, at<float>(base, layout.inbox)[first + i]);
    }
  }
}

KERNEL combine(Outcome* outcome, void* handle, fgin_window window, char* base, uint64_t round, uint32_t rank, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  Warp warp;
  Layout layout(ranks);
  uint32_t warps = block.size() / warp.size(), own = block.thread_rank() / warp.size();

  for (uint32_t peer = 0; peer < ranks; peer++) {
    if (at<uint64_t>(base, layout.lost)[peer]) continue;
    uint64_t count = at<uint64_t>(base, layout.counts(round))[peer];
    for (uint64_t slot = own; slot < count; slot += warps) {
      uint64_t to = layout.results + (rank * TOKENS + slot) * ROW, from = layout.outbox + (peer * TOKENS + slot) * ROW;
      TRY(unless_lost(gin.put(peer, window, to, window, from, ROW, SignalInc{signal_from(rank, COMBINED)}, None{}, warp)));
    }
  }
}

KERNEL collect(Outcome* outcome, void* handle, char* base, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  Layout layout(ranks);

  for (uint32_t peer = 0; peer < ranks; peer++) {
    if (at<uint64_t>(base, layout.lost)[peer]) continue;
    uint64_t results = at<uint64_t>(base, layout.combined)[peer] + at<uint64_t>(base, layout.sent)[peer];
    TRY(gin.waitSignal(signal_from(peer, COMBINED), results, block));
  }
  TRY(gin.flush(block));
}

// Tells the other ranks that this one is done.
KERNEL leave(Outcome* outcome, void* handle, uint32_t rank, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  for (uint32_t peer = 0; peer < ranks; peer++) {
    TRY(unless_lost(gin.signal(peer, SignalInc{signal_from(rank, COUNTED)}, Block{})));
  }
}

KERNEL wait_for_all(Outcome* outcome, void* handle, char* base, uint64_t rounds, uint32_t ranks) {
  Gin<Sharing::Cta> gin(handle, 0);
  for (uint32_t peer = 0; peer < ranks; peer++) {
    if (!at<uint64_t>(base, Layout(ranks).lost)[peer]) TRY(gin.waitSignal(signal_from(peer, COUNTED), rounds + 1, Block{}));
  }
}

// Runs a kernel that waits, and runs it again without the ranks that were lost meanwhile.
template <typename Run>
void without_lost_ranks(const Context& context, uint64_t* lost, Run run) {
  for (;;) {
    try {
      return run();
    } catch (const PeerLost&) {
      auto ranks = context.lost_ranks();
      for (uint32_t rank : ranks) lost[rank] = 1;
      context.acknowledge_lost(ranks);
    }
  }
}

// moe [ROUNDS [RANK]]: RANK ends without a word in the middle of round ROUNDS / 2.
int main(int argc, char** argv) try {
  uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  auto comm = Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks(), dies = argc > 2 ? uint32_t(std::atoi(argv[2])) : ranks;
  Layout layout(ranks);
  auto window = comm.allocate(layout.bytes, Memory::Host);
  ContextOptions options;
  options.signals = ranks * SIGNALS;
  auto context = comm.context(options);

  auto* host = static_cast<char*>(window.host_address());
  auto* base = static_cast<char*>(window.address());
  auto *lost = at<uint64_t>(host, layout.lost), *sent = at<uint64_t>(host, layout.sent);
  auto *dispatched = at<uint64_t>(host, layout.dispatched), *combined = at<uint64_t>(host, layout.combined);
  auto *experts = at<uint32_t>(host, layout.experts), *slots = at<uint32_t>(host, layout.slots);
  auto *tokens = at<float>(host, layout.tokens), *results = at<float>(host, layout.results);
  int wrong = 0, dropped = 0;
  for (uint64_t round = 1; round <= rounds; round++) {
    for (uint32_t expert = 0; expert < ranks; expert++) sent[expert] = 0;
    for (uint32_t token = 0; token < TOKENS; token++) {
      // An uneven choice: experts get different numbers of tokens.
      experts[token] = uint32_t((token * token + 7 * rank + round) % (ranks + 1) % ranks);
      slots[token] = uint32_t(sent[experts[token]]++);
      for (uint32_t i = 0; i < HIDDEN; i++) tokens[token * HIDDEN + i] = float(rank * 1000 + token + round) + float(i) / HIDDEN;
    }
    LAUNCH(dispatch, context, window.handle(), base, round, rank, ranks);
    if (round == rounds / 2 && rank == dies) std::raise(SIGKILL);
    without_lost_ranks(context, lost, [&] { LAUNCH(compute, context, base, round, rank, ranks); });
    LAUNCH(combine, context, window.handle(), base, round, rank, ranks);
    without_lost_ranks(context, lost, [&] { LAUNCH(collect, context, base, ranks); });

    for (uint32_t peer = 0; peer < ranks; peer++) {
      dispatched[peer] += at<uint64_t>(host, layout.counts(round))[peer];
      combined[peer] += sent[peer];
    }
    for (uint32_t token = 0; token < TOKENS; token++) {
      uint32_t expert = experts[token];
      dropped += lost[expert] != 0;
      for (uint32_t i = 0; i < HIDDEN && !lost[expert]; i++) {
        float found = results[(expert * TOKENS + slots[token]) * HIDDEN + i];
        // A GPU may round once where the CPU rounds twice.
        float expected = apply(expert, tokens[token * HIDDEN + i]);
        wrong += !(found >= expected * 0.99999f && found <= expected * 1.00001f);
      }
    }
  }
  context.check();
  std::printf("rank %u of %u: %u tokens (%d dropped), %d numbers differ\n", rank, ranks, uint32_t(TOKENS * rounds), dropped, wrong);
  LAUNCH(leave, context, rank, ranks);
  without_lost_ranks(context, lost, [&] { LAUNCH(wait_for_all, context, base, rounds, ranks); });
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
