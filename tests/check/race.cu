// Races inside a kernel.
#include "check.h"

KERNEL(shared_without_barrier) {
  __shared__ uint32_t x;
  if (is(0)) x = 7;  // CHECK race
  FIX(__syncthreads());
  if (is(32)) EXPECT(READ(x) == 7);  // CHECK race
}

// The loop's second round writes what the first still reads.
KERNEL(shared_reused_early) {
  __shared__ uint32_t x;
  for (uint32_t round = 0; round < 3; round++) {
    if (is(0)) x = round;  // CHECK race
    __syncthreads();
    EXPECT(READ(x) == round);  // CHECK race
    FIX(__syncthreads());
  }
}

KERNEL(shared_never_written) {
  __shared__ uint32_t x[4];
  if (is(0)) {
    FIX(x[3] = 0;)
    x[0] = x[1] = x[2] = 0;
  }
  __syncthreads();
  if (is(1)) EXPECT(READ(x[3]) == 0);  // CHECK unwritten
}

// __syncwarp orders the lanes of one warp only.
KERNEL(warp_barrier_for_a_block) {
  __shared__ uint32_t x[128];
  x[threadIdx.x] = threadIdx.x;  // CHECK race
  FIX(__syncthreads());
  BUG(__syncwarp());
  uint32_t other = (threadIdx.x + 32) % 128;
  EXPECT(READ(x[other]) == other);  // CHECK race
}

KERNEL(lanes_without_barrier) {
  __shared__ uint32_t x[128];
  x[threadIdx.x] = threadIdx.x;  // CHECK race
  FIX(__syncwarp());
  uint32_t other = threadIdx.x ^ 1;
  EXPECT(READ(x[other]) == other);  // CHECK race
}

// A shuffle between the store and the load: PTX gives it no order, and much code assumes one. Silent with --lenient.
KERNEL(lanes_by_shuffle) {
  __shared__ uint32_t x[128];
  x[threadIdx.x] = threadIdx.x;  // CHECK race
  FIX(__syncwarp());
  uint32_t other;
  asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, -1;" : "=r"(other) : "r"(threadIdx.x) : "memory");
  EXPECT(READ(x[other]) == other);  // CHECK race
}

// Two warps meet at a named barrier, and a third reads what they wrote.
KERNEL(barrier_of_two_warps) {
  __shared__ uint32_t x;
  if (is(0)) x = 7;  // CHECK race
  if (threadIdx.x < FIX(96) BUG(64)) asm volatile("bar.sync 1, %0;" ::"r"(FIX(96) BUG(64)) : "memory");
  if (is(64)) EXPECT(READ(x) == 7);  // CHECK race
}

KERNEL(grid_two_stores) {
  if (is(0) && blockIdx.x == FIX(0) BUG(blockIdx.x)) a.memory[0] = blockIdx.x;  // CHECK race
}

KERNEL(grid_relaxed_flag) {
  if (is(0) && blockIdx.x == 0) {
    a.memory[0] = 7;  // CHECK race
    FIX(FENCE("gpu"));
    STORE("relaxed.gpu", &a.memory[32], 1);
  }
  if (is(0) && blockIdx.x == 1) {
    while (LOAD("relaxed.gpu", &a.memory[32]) == 0) {}
    FIX(FENCE("gpu"));
    EXPECT(READ(a.memory[0]) == 7);  // CHECK race
  }
}

KERNEL(grid_flag_without_acquire) {
  if (is(0) && blockIdx.x == 0) {
    a.memory[0] = 7;  // CHECK race
    STORE("release.gpu", &a.memory[32], 1);
  }
  if (is(0) && blockIdx.x == 1) {
    while (LOAD(FIX("acquire.gpu") BUG("relaxed.gpu"), &a.memory[32]) == 0) {}
    EXPECT(READ(a.memory[0]) == 7);  // CHECK race
  }
}

KERNEL(grid_flag_without_release) {
  if (is(0) && blockIdx.x == 0) {
    a.memory[0] = 7;  // CHECK race
    STORE(FIX("release.gpu") BUG("relaxed.gpu"), &a.memory[32], 1);
  }
  if (is(0) && blockIdx.x == 1) {
    while (LOAD("acquire.gpu", &a.memory[32]) == 0) {}
    EXPECT(READ(a.memory[0]) == 7);  // CHECK race
  }
}

KERNEL(grid_fence_of_a_block) {
  if (is(0) && blockIdx.x == 0) {
    a.memory[0] = 7;  // CHECK race
    FENCE(FIX("gpu") BUG("cta"));
    STORE("relaxed.gpu", &a.memory[32], 1);
  }
  if (is(0) && blockIdx.x == 1) {
    while (LOAD("acquire.gpu", &a.memory[32]) == 0) {}
    EXPECT(READ(a.memory[0]) == 7);  // CHECK race
  }
}

// A function without registers.
__device__ __attribute__((noinline)) void fence_in_a_function() {
  FENCE("gpu");
}

KERNEL(grid_fence_in_a_function) {
  if (is(0) && blockIdx.x == 0) {
    a.memory[0] = 7;  // CHECK race
    FIX(fence_in_a_function();)
    STORE("relaxed.gpu", &a.memory[32], 1);
    BUG(fence_in_a_function();)
  }
  if (is(0) && blockIdx.x == 1) {
    while (LOAD("acquire.gpu", &a.memory[32]) == 0) {}
    EXPECT(READ(a.memory[0]) == 7);  // CHECK race
  }
}

// The race of nccl_ep 0.1.0: what the releasing add announces is stored after it.
KERNEL(count_after_release) {
  __shared__ uint32_t count;
  if (is(0)) {
    FIX(count = 7;)
    ADD("release.gpu", &a.memory[0], 1);
    BUG(count = 7;)  // CHECK race
  }
  if (is(32)) {
    while (LOAD("acquire.gpu", &a.memory[0]) == 0) {}
    EXPECT(READ(count) == 7);  // CHECK race
  }
}

// The thread that stores meets the barrier, the one that fenced for it does not order the others' stores.
KERNEL(grid_release_before_barrier) {
  if (blockIdx.x == 0) {
    a.memory[threadIdx.x] = 7;  // CHECK race
    FIX(__syncthreads());
    if (is(0)) STORE("release.gpu", &a.memory[512], 1);
  } else if (is(0)) {
    while (LOAD("acquire.gpu", &a.memory[512]) == 0) {}
    EXPECT(READ(a.memory[100]) == 7);  // CHECK race
  }
}

// A bulk copy reads shared memory through another proxy.
KERNEL(bulk_store_without_proxy_fence) {
  __shared__ alignas(128) uint32_t x[32];
  if (is(0)) {
    for (int i = 0; i < 32; i++) x[i] = 7;  // CHECK race
    FIX(PTX("fence.proxy.async.shared::cta;");)
    PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;", "l"(a.memory), "r"(SHARED(x)));  // CHECK race
    PTX("cp.async.bulk.commit_group;");
    PTX("cp.async.bulk.wait_group 0;");
    EXPECT(READ(a.memory[5]) == 7);
  }
}

KERNEL(bulk_source_reused) {
  __shared__ alignas(128) uint32_t x[32];
  if (is(0)) {
    for (int i = 0; i < 32; i++) x[i] = 7;
    PTX("fence.proxy.async.shared::cta;");
    PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;", "l"(a.memory), "r"(SHARED(x)));  // CHECK race
    PTX("cp.async.bulk.commit_group;");
    FIX(PTX("cp.async.bulk.wait_group.read 0;");)
    for (int i = 0; i < 32; i++) x[i] = 8;  // CHECK race
    PTX("cp.async.bulk.wait_group 0;");
    EXPECT(READ(a.memory[5]) == 7);
  }
}

// wait_group.read covers the source only.
KERNEL(bulk_result_read_early) {
  __shared__ alignas(128) uint32_t x[32];
  if (is(0)) {
    for (int i = 0; i < 32; i++) x[i] = 7;
    PTX("fence.proxy.async.shared::cta;");
    PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;", "l"(a.memory), "r"(SHARED(x)));  // CHECK race
    PTX("cp.async.bulk.commit_group;");
    FIX(PTX("cp.async.bulk.wait_group 0;");)
    BUG(PTX("cp.async.bulk.wait_group.read 0;");)
    EXPECT(READ(a.memory[5]) == 7);  // CHECK race
  }
}

// Whoever has seen the first add may have missed the store before it.
KERNEL(counter_cleared_without_order) {
  __shared__ uint32_t count;
  if (is(0)) {
    count = 0;  // CHECK race
    PTX("red.relaxed.cta.shared.add.u32 [%0], 1;", "r"(SHARED(&count)));
  }
  FIX(__syncthreads());
  if (is(32)) PTX("red.relaxed.cta.shared.add.u32 [%0], 1;", "r"(SHARED(&count)));  // CHECK race
}

// The arrival that ends the wait comes after the initialization, but the wait may begin before it.
KERNEL(mbarrier_initialized_without_order) {
  __shared__ uint64_t arrived;
  if (is(0)) {
    PTX("mbarrier.init.shared.b64 [%0], 1;", "r"(SHARED(&arrived)));  // CHECK race
    PTX("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }", "r"(SHARED(&arrived)));
    FIX(FENCE("cta");)
    STORE("relaxed.cta", &a.memory[0], 1);
  }
  if (is(32)) {
    while (LOAD("relaxed.cta", &a.memory[0]) == 0) {}
    FIX(FENCE("cta");)
    PTX("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }", "r"(SHARED(&arrived)));  // CHECK race
  }
}

KERNEL(mbarrier_initialized_without_fence) {
  __shared__ alignas(128) uint32_t x[32];
  __shared__ uint64_t arrived;
  if (is(0)) {
    PTX("mbarrier.init.shared.b64 [%0], 1;", "r"(SHARED(&arrived)));  // CHECK race
    FIX(PTX("fence.mbarrier_init.release.cluster;");)
    PTX("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], 128; }", "r"(SHARED(&arrived)));
    PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];", "r"(SHARED(x)), "l"(a.memory),  // CHECK race
        "r"(SHARED(&arrived)));
    PTX("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }", "r"(SHARED(&arrived)));
    EXPECT(READ(x[5]) == 0);
  }
}
