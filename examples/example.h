// What the examples share: a kernel is launched on a GPU (nvcc) or called on the CPU (g++ -x c++), and its status is checked.
#pragma once

#include <ferrogin/gin.cuh>
#include <ferrogin/host.hpp>

#include <cstdio>
#include <cstdlib>

// The status of a kernel, and the first operation that failed.
struct Outcome {
  int status;
  int line;
};

// Keeps the first failure. Every thread makes every later call too, because the others wait for it.
#define TRY(operation) note(outcome, (operation), __LINE__)

#ifdef __CUDACC__

#define KERNEL __global__ void
__device__ inline void note(Outcome* outcome, int status, int line) {
  if (status != FGIN_OK && atomicCAS(&outcome->status, FGIN_OK, status) == FGIN_OK) outcome->line = line;
}

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw ferrogin::Error(FERROGIN_CUDA_ERROR, cudaGetErrorString(error));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Outcome*, Parameters...), Arguments... arguments) {
  Outcome* outcome;
  must(cudaMallocManaged(&outcome, sizeof(Outcome)));
  *outcome = {FGIN_OK, 0};
  kernel<<<1, 256>>>(outcome, arguments...);
  must(cudaDeviceSynchronize());
  Outcome found = *outcome;
  must(cudaFree(outcome));
  if (found.status != FGIN_OK) {
    std::fprintf(stderr, "the kernel's operation of line %d returned %d\n", found.line, found.status);
    std::exit(1);
  }
}

#else

#define KERNEL static void
inline void note(Outcome* outcome, int status, int line) {
  if (status != FGIN_OK && outcome->status == FGIN_OK) *outcome = {status, line};
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Outcome*, Parameters...), Arguments... arguments) {
  Outcome outcome = {FGIN_OK, 0};
  kernel(&outcome, arguments...);
  if (outcome.status != FGIN_OK) {
    std::fprintf(stderr, "the kernel's operation of line %d returned %d\n", outcome.line, outcome.status);
    std::exit(1);
  }
}

#endif
