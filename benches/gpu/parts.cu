// Measures the parts of a post separately: fences, atomics, doorbells, and ways to store a 64-byte work request. One
// thread runs, or eight where they share a request. The host program is benches/benches/gpu.rs, whose `PARTS` has the
// names.
#include <stdint.h>

static __device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

static __device__ void fence() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

static __device__ void mmio(uint64_t* at, uint64_t value) {
  asm volatile("st.mmio.relaxed.sys.global.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// `word` is a counter or a doorbell, and `ring` has 256 requests of 64 bytes. `rounds` gets the number of rounds.
extern "C" __global__ void parts(uint32_t part, uint32_t count, uint64_t* ring, uint64_t* word, uint64_t* times, uint64_t* rounds) {
  uint64_t begin = now(), seen = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint64_t* slot = ring + (i & 255) * 8;
    switch (part) {
      case 0: fence(); break;
      case 1: asm volatile("fence.sc.sys;" ::: "memory"); break;
      case 2: asm volatile("fence.acq_rel.gpu;" ::: "memory"); break;
      case 3: {
        uint64_t old;
        asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(1ull) : "memory");
        seen += old;
        break;
      }
      case 4: {
        uint64_t old;
        asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(word), "l"(seen), "l"(seen) : "memory");
        seen = old;
        break;
      }
      case 5: {
        uint64_t value;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
        seen += value;
        break;
      }
      case 6: asm volatile("st.mmio.relaxed.sys.global.b32 [%0], %1;" ::"l"(word), "r"(i) : "memory"); break;
      case 7:
        asm volatile("st.mmio.relaxed.sys.global.b32 [%0], %1;" ::"l"(word), "r"(i) : "memory");
        fence();
        break;
      // The ways to store a request, each with the fence that must follow before the doorbell.
      case 8:
        for (int at = 0; at < 8; at++) mmio(slot + at, i);
        fence();
        break;
      case 9:
        for (int at = 0; at < 8; at++) {
          asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(slot + at), "l"(uint64_t(i)) : "memory");
        }
        fence();
        break;
      case 10:
        for (int at = 0; at < 8; at += 2) {
          asm volatile("st.global.v2.b64 [%0], {%1, %1};" ::"l"(slot + at), "l"(uint64_t(i)) : "memory");
        }
        fence();
        break;
      case 11:
        for (int at = 0; at < 8; at++) asm volatile("st.global.wt.b64 [%0], %1;" ::"l"(slot + at), "l"(uint64_t(i)) : "memory");
        fence();
        break;
      // Eight threads store a word each, then the first one fences.
      case 12:
        mmio(slot + threadIdx.x, i);
        __syncwarp(0xff);
        if (threadIdx.x == 0) fence();
        break;
      default:
        asm volatile("st.global.b64 [%0], %1;" ::"l"(slot + threadIdx.x), "l"(uint64_t(i)) : "memory");
        __syncwarp(0xff);
        if (threadIdx.x == 0) fence();
    }
  }
  uint64_t end = now();
  if (threadIdx.x == 0) {
    times[0] = begin;
    times[1] = end;
    // Uses `seen`, so that the compiler keeps the reads.
    *rounds = seen == ~0ull ? 0 : count;
  }
}
