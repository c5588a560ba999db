/* ferrogin: the host API for C++17. Objects close what they own; a failed call throws ferrogin::Error, except in a destructor.
 *
 * A window or context is destroyed before its communicator. ferrogin/host.h describes the calls.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef FERROGIN_HOST_HPP
#define FERROGIN_HOST_HPP

#include <ferrogin/host.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ferrogin {

// A failed call: what() has the cause and the fix.
class Error : public std::runtime_error {
 public:
  Error(int status, const char* text) : std::runtime_error(text), status_(status) {}

  // A ferrogin_status.
  int status() const noexcept {
    return status_;
  }

 private:
  int status_;
};

enum class Memory : uint32_t { Host = FERROGIN_MEMORY_HOST, Device = FERROGIN_MEMORY_DEVICE };

// ferrogin_options with its size set, and defaults.
struct Options : ferrogin_options {
  Options() : ferrogin_options{FERROGIN_OPTIONS, 0, 0} {}
};

// ferrogin_context_options with its size set, and defaults.
struct ContextOptions : ferrogin_context_options {
  ContextOptions() : ferrogin_context_options{FERROGIN_CONTEXT_OPTIONS, 0, 0, 0, 0, 0, 0, 0, 0} {}
};

namespace host_detail {

inline void check(int status) {
  if (status != FERROGIN_OK) throw Error(status, ferrogin_error());
}

inline void* check(void* pointer) {
  if (pointer == nullptr) throw Error(FERROGIN_INVALID_ARGUMENT, ferrogin_error());
  return pointer;
}

// A handle with one owner.
template <typename T, int (*Close)(T*)>
class Owner {
 public:
  Owner() = default;
  Owner(Owner&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owner& operator=(Owner&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owner() {
    if (handle_) (void)Close(handle_);
  }

  // Closes the handle now. On an error, throws and leaves it open.
  void close() {
    if (handle_) check(Close(handle_));
    handle_ = nullptr;
  }

  T* get() const noexcept {
    return handle_;
  }

 protected:
  T* handle_ = nullptr;
};

}  // namespace host_detail

class Window : public host_detail::Owner<ferrogin_window, ferrogin_window_free> {
 public:
  // For kernels.
  fgin_window handle() const {
    return host_detail::check(ferrogin_window_handle(handle_));
  }
  void* address() const {
    return host_detail::check(ferrogin_window_address(handle_));
  }
  void* host_address() const {
    return host_detail::check(ferrogin_window_host_address(handle_));
  }
  // For kernels: the first byte of this window on another rank of the LSA team.
  void* lsa_address(uint32_t lsa_rank) const {
    return host_detail::check(ferrogin_window_lsa_address(handle_, lsa_rank));
  }
  // The bytes of the window on `rank`.
  size_t size(uint32_t rank) const {
    size_t bytes = 0;
    host_detail::check(ferrogin_window_size(handle_, rank, &bytes));
    return bytes;
  }

 private:
  friend class Comm;
};

class Context : public host_detail::Owner<ferrogin_context, ferrogin_context_destroy> {
 public:
  // For kernels.
  void* handle() const {
    return host_detail::check(ferrogin_context_handle(handle_));
  }
  // With FERROGIN_ISOLATE: the lost ranks, in order.
  std::vector<uint32_t> lost_ranks() const {
    std::vector<uint32_t> ranks;
    for (uint32_t n = 0;;) {
      host_detail::check(ferrogin_lost_ranks(handle_, ranks.data(), uint32_t(ranks.size()), &n));
      if (n == ranks.size()) return ranks;
      ranks.resize(n);
    }
  }
  // With FERROGIN_ISOLATE: waits report the loss of these ranks no more.
  void acknowledge_lost(const std::vector<uint32_t>& ranks) const {
    host_detail::check(ferrogin_acknowledge_lost(handle_, ranks.data(), uint32_t(ranks.size())));
  }
  // Throws if a request has failed.
  void check() const {
    host_detail::check(ferrogin_context_check(handle_));
  }

 private:
  friend class Comm;
};

class Comm : public host_detail::Owner<ferrogin_comm, ferrogin_close> {
 public:
  // `allgather(const void* own, void* all, size_t bytes)` gathers every rank's bytes in rank order; it may throw.
  template <typename Allgather>
  static Comm open(uint32_t rank, uint32_t ranks, Allgather allgather, const Options& options = {}) {
    struct Call {
      Allgather& allgather;
      std::exception_ptr error;
      static int run(void* arg, const void* own, void* all, size_t bytes) noexcept {
        Call& call = *static_cast<Call*>(arg);
        try {
          call.allgather(own, all, bytes);
          return 0;
        } catch (...) {
          call.error = std::current_exception();
          return 1;
        }
      }
    } call{allgather, nullptr};
    Comm comm;
    int status = ferrogin_open(rank, ranks, Call::run, &call, &options, &comm.handle_);
    if (call.error) std::rethrow_exception(call.error);
    host_detail::check(status);
    return comm;
  }

  static Comm open(const std::string& address, uint32_t rank, uint32_t ranks, const Options& options = {}) {
    Comm comm;
    host_detail::check(ferrogin_open_at(address.c_str(), rank, ranks, &options, &comm.handle_));
    return comm;
  }

  // With the launcher's variables.
  static Comm open(const Options& options = {}) {
    Comm comm;
    host_detail::check(ferrogin_open_env(&options, &comm.handle_));
    return comm;
  }

  uint32_t rank() const {
    return place().first;
  }
  uint32_t ranks() const {
    return place().second;
  }
  // This rank's number in the LSA team, and how many ranks it has.
  std::pair<uint32_t, uint32_t> lsa() const {
    std::pair<uint32_t, uint32_t> place;
    host_detail::check(ferrogin_lsa_rank(handle_, &place.first, &place.second));
    return place;
  }
  uint32_t lsa_world_rank(uint32_t lsa_rank) const {
    uint32_t rank;
    host_detail::check(ferrogin_lsa_world_rank(handle_, lsa_rank, &rank));
    return rank;
  }
  void barrier() const {
    host_detail::check(ferrogin_barrier(handle_));
  }

  Window allocate(size_t bytes, Memory memory) const {
    Window window;
    host_detail::check(ferrogin_window_allocate(handle_, bytes, uint32_t(memory), &window.handle_));
    return window;
  }
  Window register_memory(void* address, size_t bytes, Memory memory) const {
    Window window;
    host_detail::check(ferrogin_window_register(handle_, address, bytes, uint32_t(memory), &window.handle_));
    return window;
  }
  Window register_dma_buf(void* address, size_t bytes, int fd, uint64_t offset) const {
    Window window;
    host_detail::check(ferrogin_window_register_dma_buf(handle_, address, bytes, fd, offset, &window.handle_));
    return window;
  }
  Context context(const ContextOptions& options = {}) const {
    Context context;
    host_detail::check(ferrogin_context_create(handle_, &options, &context.handle_));
    return context;
  }

 private:
  std::pair<uint32_t, uint32_t> place() const {
    std::pair<uint32_t, uint32_t> place;
    host_detail::check(ferrogin_rank(handle_, &place.first, &place.second));
    return place;
  }
};

}  // namespace ferrogin

#endif  // FERROGIN_HOST_HPP
