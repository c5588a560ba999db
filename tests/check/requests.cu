// Requests that read what other requests or the peer write, and bulk copies next to requests.
#include "check.h"

KERNEL(forwarded_before_the_wait) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK read
  FIX(gin.waitSignal(0, 1);)
  gin.put(a.peer, a.window, 2048, a.window, 0, 64, SignalInc{1});  // CHECK read
  gin.waitSignal(0, 1);
  gin.waitSignal(1, 1);
  EXPECT(FIX(WORD(2048) == 100 + a.rank) BUG(true));
  gin.flush();
}

KERNEL(forwarded_before_the_get_is_there) {
  ONE_THREAD(0);
  gin.get(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  FIX(gin.flush();)
  gin.put(a.peer, a.window, 2048, a.window, 1024, 64, SignalInc{0});  // CHECK read
  gin.waitSignal(0, 1);
  gin.flush();
}

// The peer's put lands in the bytes that this rank's put may still read.
KERNEL(overwritten_while_it_is_sent) {
  ONE_THREAD(0);
  FILL(1024);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK read
  FIX(gin.flush();)
  gin.signal(a.peer, SignalInc{0});
  gin.waitSignal(0, 1);
  gin.put(a.peer, a.window, 1024, a.window, 4096, 64, SignalInc{1});  // CHECK read
  gin.waitSignal(1, 1);
  gin.flush();
}

// A get reads at the peer, which has to know when that's over.
KERNEL(changed_while_the_peer_gets_it) {
  ONE_THREAD(0);
  gin.get(a.peer, a.window, 0, a.window, 1024, 64);  // CHECK source
  FIX(gin.flush();)
  gin.signal(a.peer, SignalInc{0});
  BUG(WORD(0) = 5;)  // CHECK source
  gin.waitSignal(0, 1);
  FIX(WORD(0) = 5;)
  gin.flush();
}

// wait_group.read covers what the copy reads, and the put needs what it writes.
KERNEL(put_of_what_a_bulk_copy_still_writes) {
  __shared__ alignas(128) uint32_t x[32];
  ONE_THREAD(0);
  for (int i = 0; i < 32; i++) x[i] = 7;
  PTX("fence.proxy.async.shared::cta;");
  PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;", "l"(a.bytes + 1024), "r"(SHARED(x)));  // CHECK source
  PTX("cp.async.bulk.commit_group;");
  FIX(PTX("cp.async.bulk.wait_group 0;");)
  BUG(PTX("cp.async.bulk.wait_group.read 0;");)
  gin.put(a.peer, a.window, 0, a.window, 1024, 128, SignalInc{0});  // CHECK source
  gin.waitSignal(0, 1);
  gin.flush();
}

// A strong signal of another context covers that context's operations. The peer's wait for the put comes too late.
KERNEL(strong_signal_of_another_context) {
  ONE_THREAD(0);
  Gin<> other(a.handle, 1);
  gin.put(a.peer, a.window, 0, a.window, 1024, 64, SignalInc{0});  // CHECK read
  FIX(gin)BUG(other).signal(a.peer, StrongSignalInc{1});
  FIX(gin)BUG(other).waitSignal(1, 1);
  EXPECT(READ(WORD(0)) == 0);  // CHECK read
  gin.waitSignal(0, 1);
  gin.flush();
}
