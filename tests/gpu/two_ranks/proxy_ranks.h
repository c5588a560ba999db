// One rank's use of the RMA plugin through NCCL's proxy (tests/foreign/proxy.h), for two ranks on a GPU.
#pragma once

#include <stddef.h>

#include <memory>

// What the program provides: memory that host and GPU share, zeroed GPU memory, and an exchange with the other rank.
struct ProxyHost {
  void* (*shared)(size_t bytes);
  void* (*device)(size_t bytes);
  bool (*exchange)(const void* mine, void* others, size_t bytes);
};

class ProxyRanks {
 public:
  // Connects, and registers `bytes` of GPU memory at `window`. Throws std::runtime_error that names the failed call.
  ProxyRanks(const char* plugin, int rank, const ProxyHost& host, void* window, size_t bytes, int contexts, int signals,
             int counters);
  ~ProxyRanks();

  // For kernels: the device contexts, and the window.
  void* handle() const;
  void* window() const;
  // Returns whether an operation has failed.
  bool has_failed() const;

 private:
  struct State;
  std::unique_ptr<State> state;
};
