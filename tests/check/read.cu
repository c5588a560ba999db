// Reads of bytes that a peer's put writes, without an order.
#include "check.h"

KERNEL(read_without_wait) {
  ONE_THREAD(0);
  gin.putValue(a.peer, a.window, 0, 100 + a.rank, SignalInc{0});  // CHECK read
  FIX(gin.waitSignal(0, 1);)
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  BUG(gin.waitSignal(0, 1);)
  gin.flush();
}

// Either of the two puts may have raised the signal.
KERNEL(wait_for_one_of_two) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});
  gin.put(a.peer, a.window, 64, a.window, 1024, 64, SignalInc{0});  // CHECK read
  gin.waitSignal(0, FIX(2) BUG(1));
  EXPECT(READ(WORD(64)) == 100 + a.peer);  // CHECK read
  BUG(gin.waitSignal(0, 2);)
  gin.flush();
}

// An all-to-all that waits for the signal of another context.
KERNEL(wait_in_another_context) {
  ONE_THREAD(0);
  Gin<> other(a.handle, 1);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK read
  other.signal(a.peer, SignalInc{0});
  other.waitSignal(0, 1);
  FIX(gin.waitSignal(0, 1);)
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  BUG(gin.waitSignal(0, 1);)
  gin.flush();
  other.flush();
}

// A flag that the peer polls, written by a value after a put: the card may deliver the value first.
KERNEL(flag_after_put) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  FIX(gin.flush();)
  gin.putValue(a.peer, a.window, 2048, 1u);
  while (LOAD("acquire.sys", &WORD(2048)) != 1) {}
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  gin.flush();
}

// A poll that doesn't acquire has the flag alone, not what its sender flushed before it.
KERNEL(flag_without_acquire) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  gin.flush();
  gin.putValue(a.peer, a.window, 2048, 1u);
  while (LOAD(FIX("acquire.sys") BUG("relaxed.sys"), &WORD(2048)) != 1) {}
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  gin.flush();
}

KERNEL(flag_without_fence) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  gin.flush();
  gin.putValue(a.peer, a.window, 2048, 1u);
  while (LOAD("relaxed.sys", &WORD(2048)) != 1) {}
  FIX(FENCE("sys"));
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  gin.flush();
}

// A value that is polled needs no signal: it arrives as a whole.
KERNEL(value_that_is_polled) {
  ONE_THREAD(0);
  gin.putValue(a.peer, a.window, 0, 100 + a.rank);
  while (LOAD("relaxed.sys", &WORD(0)) != 100 + a.peer) {}
  gin.flush();
}

// The signal covers the second put only.
KERNEL(signal_of_the_next_put) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  FIX(gin.flush();)
  gin.put(a.peer, a.window, 64, a.window, 1024, 64, SignalInc{0});
  gin.waitSignal(0, 1);
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  gin.flush();
}

KERNEL(wait_for_the_other_signal) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK read
  gin.put(a.peer, a.window, 64, a.window, 1024, 64, SignalInc{1});
  gin.waitSignal(FIX(0) BUG(1), 1);
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
  gin.waitSignal(FIX(1) BUG(0), 1);
  gin.flush();
}

KERNEL(get_without_flush) {
  ONE_THREAD(0);
  gin.get(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  FIX(gin.flush();)
  EXPECT(READ(WORD(1024)) == 0);  // CHECK read
  BUG(gin.flush();)
}

// One thread waits, and a thread of another warp reads.
KERNEL(wait_of_another_thread) {
  Gin<> gin(a.handle, 0);
  if (is(0)) {
    gin.putValue(a.peer, a.window, 0, 100 + a.rank, SignalInc{0});  // CHECK read
    gin.waitSignal(0, 1);
    gin.flush();
  }
  FIX(__syncthreads());
  if (is(32)) EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
}

// A barrier of the ranks orders nothing that wasn't flushed. The driver reads the value.
KERNEL(host_reads_what_was_not_flushed) {
  ONE_THREAD(0);
  gin.putValue(a.peer, a.window, 0, 100 + a.rank);  // CHECK read
  FIX(gin.flush();)
}

KERNEL(barrier_without_flush) {
  ONE_THREAD(0);
  gin.putValue(a.peer, a.window, 0, 100 + a.rank);  // CHECK read
  FIX(gin.flush();)
}
KERNEL(barrier_without_flush_then) {
  ONE_THREAD(0);
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK read
}

// A weak signal covers its own operation, not the put before it.
KERNEL(strong_signal_missing) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK weak
  gin.signal(a.peer, FIX(StrongSignalInc) BUG(SignalInc){0});
  gin.waitSignal(0, 1);
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK weak
  gin.flush();
}

// The same with a signal in the window's memory.
KERNEL(strong_word_missing) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK weak
  gin.signal(a.peer, FIX(StrongVASignalInc) BUG(VASignalInc){a.window, 4096});
  while (LOAD("acquire.sys", &WORD(4096)) != 1) {}
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK weak
  gin.flush();
}

// A signal in memory covers the put that names it, and no other.
KERNEL(strong_word_of_the_next_put) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, FIX(VASignalInc{a.window, 4096}) BUG(None{}));  // CHECK weak
  BUG(gin.putValue(a.peer, a.window, 2048, 1u, VASignalInc{a.window, 4096});)
  while (LOAD("acquire.sys", &WORD(4096)) != 1) {}
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK weak
  gin.flush();
}

// An add that doesn't fit in the put's own request.
KERNEL(strong_big_add_of_the_next_put) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, FIX(SignalAdd{0, 1 << 20}) BUG(None{}));  // CHECK weak
  BUG(gin.putValue(a.peer, a.window, 2048, 1u, SignalAdd{0, 1 << 20});)
  gin.waitSignal(0, 1 << 20);
  EXPECT(READ(WORD(0)) == 100 + a.peer);  // CHECK weak
  gin.flush();
}
