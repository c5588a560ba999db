// Writes to bytes that a peer's put writes or a reader still reads, without an order.
#include "check.h"

KERNEL(two_puts_to_the_same_bytes) {
  ONE_THREAD(0);
  gin.putValue(a.peer, a.window, 0, 1u);  // CHECK write
  FIX(gin.flush();)
  gin.putValue(a.peer, a.window, 0, 2u, SignalInc{0});  // CHECK write
  gin.waitSignal(0, 1);
  gin.flush();
  EXPECT(FIX(WORD(0) == 2) BUG(true));
}

// The peer may have put already when this rank clears the word.
KERNEL(cleared_too_late) {
  ONE_THREAD(0);
  WORD(0) = 0;  // CHECK write
  FIX(gin.signal(a.peer, SignalInc{1}); gin.waitSignal(1, 1);)
  gin.putValue(a.peer, a.window, 0, 100 + a.rank, SignalInc{0});  // CHECK write
  gin.waitSignal(0, 1);
  EXPECT(READ(WORD(0)) == 100 + a.peer);
  gin.flush();
}

// A ring of two slots from rank 0 to rank 1, each with a signal for its bytes and one for its being free. The sender takes a slot one lap early.
KERNEL(ring_one_step_early) {
  ONE_THREAD(0);
  for (uint32_t step = 0; step < 6; step++) {
    uint32_t slot = step % 2, lap = step / 2;
    if (a.rank == 0) {
      if (lap >= FIX(1) BUG(2)) gin.waitSignal(2 + slot, lap - FIX(0) BUG(1));
      gin.putValue(a.peer, a.window, 64 * slot, step, SignalInc{slot});  // CHECK read
    } else {
      gin.waitSignal(slot, lap + 1);
      EXPECT(READ(WORD(64 * slot)) == step);  // CHECK read
      gin.signal(a.peer, SignalInc{2 + slot});
    }
  }
  if (a.rank == 0) {
    gin.waitSignal(2, 3);
    gin.waitSignal(3, 3);
  }
  gin.flush();
}

// The receiver changes what it got in place, and the next put doesn't wait for that.
KERNEL(changed_in_place) {
  ONE_THREAD(0);
  for (uint32_t step = 0; step < 2; step++) {
    gin.putValue(a.peer, a.window, 0, step, SignalInc{0});  // CHECK write
    gin.waitSignal(0, step + 1);
    STORE("relaxed.sys", &WORD(0), 9);  // CHECK write
    FIX(gin.signal(a.peer, SignalInc{1}); gin.waitSignal(1, step + 1); gin.flush();)
  }
  gin.flush();
}

// The thread that clears the bytes doesn't meet the one that lets the peer write them.
KERNEL(cleared_by_another_thread) {
  Gin<> gin(a.handle, 0);
  if (is(32)) WORD(0) = 0;  // CHECK write
  FIX(__syncthreads());
  if (is(0)) {
    gin.signal(a.peer, SignalInc{1});
    gin.waitSignal(1, 1);
    gin.putValue(a.peer, a.window, 0, 100 + a.rank, SignalInc{0});  // CHECK write
    gin.waitSignal(0, 1);
    gin.flush();
  }
}
