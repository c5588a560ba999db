// Shared by the examples. Launches a kernel on a GPU, through CUDA's runtime (nvcc) or through the driver as PTX (clang or nvcc -ptx;
// PTX names the files), or calls it on the CPU (g++ -x c++), then checks its status.
#pragma once

// clang's own <new> for CUDA needs this first.
#include <cstdlib>

#include <ferrogin/gin.cuh>
#include <ferrogin/host.hpp>

#include <cstdio>

// A kernel's status, and the line of the first operation that failed.
struct Outcome {
  int status;
  int line;
};

// Keeps the first failure. Every thread still makes all later calls, because the other threads of its block wait for it; after a failure,
// the context's waits end at once. A lost rank ends them until the program acknowledges the loss.
#define TRY(operation) note(gin, outcome, (operation), __LINE__)

#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void
#ifndef __NVCC__
// NVIDIA's headers define it, and clang compiles without them.
__device__ inline int atomicCAS(int* word, int expected, int value) {
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
#endif
template <typename Context>
__device__ void note(const Context& gin, Outcome* outcome, int status, int line) {
  if (status == FGIN_OK) return;
  if (atomicCAS(&outcome->status, FGIN_OK, status) == FGIN_OK) outcome->line = line;
  if (status != FGIN_PEER_LOST) gin.setTimeout(1);
}
#else
#define KERNEL static void
template <typename Context>
void note(const Context& gin, Outcome* outcome, int status, int line) {
  if (status == FGIN_OK) return;
  if (outcome->status == FGIN_OK) {
    *outcome = {status, line};
    // A later failure would replace the reason. For a GPU's kernels, the library prints it.
    if (status != FGIN_PEER_LOST) std::fprintf(stderr, "%s\n", ferrogin_error());
  }
  if (status != FGIN_PEER_LOST) gin.setTimeout(1);
}
#endif

// With FERROGIN_ON_PEER_FAILURE=isolate: a kernel's wait reported a lost rank.
struct PeerLost : ferrogin::Error {
  PeerLost()
    : Error(FERROGIN_INVALID_USAGE, "a rank is lost, which this program does not go on without") {}
};

// Throws if one of the kernel's operations failed.
inline void check(const Outcome& outcome, const ferrogin::Context& context) {
  if (outcome.status == FGIN_OK) return;
  if (outcome.status == FGIN_PEER_LOST) throw PeerLost();
  std::fprintf(stderr, "the kernel's operation in line %d returned %s\n", outcome.line, fgin_status_name(outcome.status));
  context.check();
  throw ferrogin::Error(FERROGIN_INVALID_USAGE, "the kernel failed");
}

// Launches a kernel whose first arguments are its outcome and the context's handle.
#define LAUNCH(kernel, ...) launch(#kernel, kernel, __VA_ARGS__)

#if defined(PTX) && defined(__CUDACC__)

// The CUDA compiler only compiles the kernels.
template <typename... Arguments>
void launch(const char* name, Arguments&&... arguments);

#elif defined(PTX)

extern "C" {
#include <cuda.h>
}
#include <string>
#include <tuple>

inline void must(CUresult result, const char* call) {
  const char* name = nullptr;
  if (result == CUDA_SUCCESS) return;
  cuGetErrorName(result, &name);
  throw ferrogin::Error(FERROGIN_CUDA_ERROR, (std::string(call) + " failed: " + (name ? name : "unknown")).c_str());
}
#define MUST(call) must(call, #call)

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*)(Outcome*, void*, Parameters...), const ferrogin::Context& gin, Arguments... arguments) {
  CUcontext context;
  CUlinkState link;
  CUmodule module;
  CUfunction function;
  void *image, *outcome;
  size_t bytes;
  MUST(cuInit(0));
  MUST(cuDevicePrimaryCtxRetain(&context, 0));
  MUST(cuCtxSetCurrent(context));
  MUST(cuLinkCreate(0, nullptr, nullptr, &link));
  for (const char* file : PTX) must(cuLinkAddFile(link, CU_JIT_INPUT_PTX, file, 0, nullptr, nullptr), file);
  MUST(cuLinkComplete(link, &image, &bytes));
  MUST(cuModuleLoadData(&module, image));
  MUST(cuLinkDestroy(link));
  MUST(cuModuleGetFunction(&function, module, name));
  MUST(cuMemHostAlloc(&outcome, sizeof(Outcome), 0));
  auto* found = new (outcome) Outcome{FGIN_OK, 0};
  // Converts the arguments to the types of the kernel's parameters.
  std::tuple<Outcome*, void*, Parameters...> values(found, gin.handle(), arguments...);
  std::apply([&](auto&... value) {
    void* parameters[] = {&value...};
    MUST(cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, nullptr, parameters, nullptr));
  }, values);
  MUST(cuCtxSynchronize());
  check(*found, gin);
  MUST(cuMemFreeHost(outcome));
  MUST(cuModuleUnload(module));
  MUST(cuDevicePrimaryCtxRelease(0));
}

#elif defined(__CUDACC__)

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw ferrogin::Error(FERROGIN_CUDA_ERROR, cudaGetErrorString(error));
}

template <typename... Parameters, typename... Arguments>
void launch(const char*, void (*kernel)(Outcome*, void*, Parameters...), const ferrogin::Context& gin, Arguments... arguments) {
  Outcome* outcome;
  must(cudaMallocManaged(&outcome, sizeof(Outcome)));
  *outcome = {FGIN_OK, 0};
  kernel<<<1, 256>>>(outcome, gin.handle(), arguments...);
  must(cudaDeviceSynchronize());
  Outcome found = *outcome;
  must(cudaFree(outcome));
  check(found, gin);
}

#else

#include <csignal>
#include <unistd.h>

// Says where a kernel left its memory; on a GPU, the driver does. The next access ends the process.
inline void explain_fault(int signal, siginfo_t* fault, void*) {
  char text[160];
  int length = std::snprintf(text, sizeof text, "the kernel accessed address %p, which is in no window: is a window too small?\n",
                             fault->si_addr);
  if (write(STDERR_FILENO, text, length) < 0) {}
  std::signal(signal, SIG_DFL);
}

template <typename... Parameters, typename... Arguments>
void launch(const char*, void (*kernel)(Outcome*, void*, Parameters...), const ferrogin::Context& gin, Arguments... arguments) {
  struct sigaction action = {}, before;
  action.sa_sigaction = explain_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &before);
  Outcome outcome = {FGIN_OK, 0};
  kernel(&outcome, gin.handle(), arguments...);
  sigaction(SIGSEGV, &before, nullptr);
  check(outcome, gin);
}

#endif
