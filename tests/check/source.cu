// Sources of puts that are changed too early, or too late.
#include "check.h"

KERNEL(source_reused) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK source
  FIX(gin.flush();)
  WORD(1024) = 1;  // CHECK source
  gin.waitSignal(0, 1);
  EXPECT(READ(WORD(0)) == 100 + a.peer);
  gin.flush();
}

// The counter says that one of the two has completed, not which.
KERNEL(counter_of_two_puts) {
  ONE_THREAD(0);
  FILL(1024);
  FILL(2048);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, None{}, CounterInc{0});  // CHECK source
  gin.put(a.peer, a.window, 64, a.window, 2048, 64, None{}, CounterInc{0});
  gin.waitCounter(0, FIX(2) BUG(1));
  WORD(1024) = 1;  // CHECK source
  gin.flush();
}

KERNEL(flush_of_another_context) {
  ONE_THREAD(0);
  Gin<> other(a.handle, 1);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK source
  FIX(gin.flush();)
  other.flush();
  WORD(1024) = 1;  // CHECK source
  gin.flush();
}

// The peer's signal says that its put has arrived, nothing about this rank's.
KERNEL(signal_taken_for_a_flush) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK source
  gin.waitSignal(0, 1);
  FIX(gin.flush();)
  WORD(1024) = 1;  // CHECK source
  gin.flush();
}

// Another warp changes the source without meeting the thread that flushes.
KERNEL(source_reused_by_another_thread) {
  Gin<> gin(a.handle, 0);
  if (is(32)) FILL(1024);
  __syncthreads();
  if (is(0)) {
    gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK source
    gin.flush();
  }
  FIX(__syncthreads());
  if (is(32)) WORD(1028) = 1;  // CHECK source
}

// A flush covers the context's earlier puts, also those that other flushes have waited for. The third one takes the queue out of the set of used
// ones, so that the next finds nothing to look at.
KERNEL(source_reused_after_another_threads_flush) {
  Gin<> gin(a.handle, 0);
  if (is(32)) {
    FILL(1024);
    gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK source
    STORE("relaxed.gpu", a.memory, 1);
    while (LOAD("relaxed.gpu", a.memory) != 2) {}
    FIX(gin.flush();)
    WORD(1024) = 1;  // CHECK source
  } else if (is(0)) {
    while (LOAD("relaxed.gpu", a.memory) != 1) {}
    for (int n = 0; n < 3; n++) gin.flush();
    STORE("relaxed.gpu", a.memory, 2);
  }
}

// The card may read before the other warp has written.
KERNEL(source_not_written_yet) {
  Gin<> gin(a.handle, 0);
  if (is(32)) WORD(1024) = 100 + a.rank;  // CHECK source
  FIX(__syncthreads());
  if (is(0)) {
    gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK source
    gin.waitSignal(0, 1);
    EXPECT(READ(WORD(0)) == 100 + a.peer);
    gin.flush();
  }
}

KERNEL(kernel_end_taken_for_a_flush) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK source
  FIX(gin.flush();)
}
KERNEL(kernel_end_taken_for_a_flush_then) {
  ONE_THREAD(0);
  WORD(1024) = 1;  // CHECK source
}

// The driver frees the source after the kernel.
KERNEL(freed_source) {
  ONE_THREAD(0);
  gin.put(a.peer, a.window, 0, a.freed, 0, 64);  // CHECK source
  FIX(gin.flush();)
}
