// ProxyRanks on the host API: the ranks of `comm`, which has two.
#pragma once

#include <cuda.h>
#include <ferrogin/host.hpp>

#include <string.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "launcher.h"
#include "proxy_ranks.h"

inline std::unique_ptr<ProxyRanks> through_proxy(const ferrogin::Comm& comm, void* window, size_t bytes, int contexts, int signals, int counters) {
  static const ferrogin::Comm& job = comm;
  static const Meeting meeting(comm.rank(), 60);
  static std::vector<ferrogin::Window> windows;
  ProxyHost host;
  host.shared = [](size_t size) {
    void* memory = nullptr;
    if (cuMemHostAlloc(&memory, size, 0) != CUDA_SUCCESS) throw std::runtime_error("cuMemHostAlloc failed");
    return memset(memory, 0, size);
  };
  // GPU memory that a card can register comes from the host API; both ranks allocate it in the same order.
  host.device = [](size_t size) {
    windows.push_back(job.allocate(size, ferrogin::Memory::Device));
    void* memory = windows.back().address();
    if (cuMemsetD8(CUdeviceptr(memory), 0, size) != CUDA_SUCCESS) throw std::runtime_error("cuMemsetD8 failed");
    return memory;
  };
  host.exchange = [](const void* mine, void* others, size_t size) { return meeting.exchange(mine, others, size); };
  return std::make_unique<ProxyRanks>(getenv("NCCL_GIN_PLUGIN"), int(comm.rank()), host, window, bytes, contexts, signals, counters);
}
