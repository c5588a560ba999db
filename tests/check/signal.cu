// Doorbells that nobody rings, baselines of signals that may be too new, and contexts that are closed too early.
#include "check.h"

KERNEL(aggregated_and_never_rung) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, None{}, None{}, Thread{}, FGIN_AGGREGATE);  // CHECK unrung
  FIX(gin.flush();)
}

// The flush comes before the last aggregated put.
KERNEL(flush_before_the_last_put) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, None{}, None{}, Thread{}, FGIN_AGGREGATE);
  BUG(gin.flush();)
  gin.put(a.peer, a.window, 64, a.window, 1024, 64, None{}, None{}, Thread{}, FGIN_AGGREGATE);  // CHECK unrung
  FIX(gin.flush();)
}

// Values have a queue of their own, so this one doesn't ring for the put.
KERNEL(value_rings_another_queue) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, None{}, None{}, Thread{}, FGIN_AGGREGATE);  // CHECK unrung
  gin.putValue(a.peer, a.window, 64, 1u);
  while (LOAD("acquire.sys", &WORD(64)) != 1) {}
  FIX(gin.flush();)
}

// The peer may close its context before the signal is there.
KERNEL(context_closed_early) {
  ONE_THREAD(0);
  gin.signal(a.peer, SignalInc{0});  // CHECK closed
  FIX(gin.waitSignal(0, 1);)
}

KERNEL(signal_without_wait) {
  ONE_THREAD(0);
  gin.signal(a.peer, SignalInc{0});  // CHECK unseen
  gin.flush();
  FIX(gin.waitSignal(0, 1);)
}

// The peer's put may have raised the signal before this rank reads its baseline: then the wait never ends.
KERNEL(baseline_before_barrier) {
  ONE_THREAD(0);
  gin.setTimeout(200000000);
  uint64_t baseline;
  gin.readSignal(0, baseline);  // CHECK baseline
  FIX(gin.signal(a.peer, SignalInc{1}); gin.waitSignal(1, 1);)
  gin.putValue(a.peer, a.window, 0, 100 + a.rank, SignalInc{0});  // CHECK baseline
  EXPECT(gin.waitSignal(0, baseline + 1) == FGIN_OK);
  gin.flush();
}

KERNEL(reset_while_the_peer_signals) {
  ONE_THREAD(0);
  gin.setTimeout(200000000);
  gin.resetSignal(0);  // CHECK baseline
  FIX(gin.signal(a.peer, SignalInc{1}); gin.waitSignal(1, 1);)
  gin.putValue(a.peer, a.window, 0, 100 + a.rank, SignalInc{0});  // CHECK baseline
  EXPECT(gin.waitSignal(0, 1) == FGIN_OK);
  gin.flush();
}
