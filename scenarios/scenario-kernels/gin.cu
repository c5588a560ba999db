// The operations of ferrogin/gin.cuh as functions, which the scenarios' programs call with `Api::Cuda`.
#include <ferrogin/gin.cuh>

using namespace ferrogin;

// `Threads` of plan.rs: 8 threads of a warp are a group that the kernel defines; the others are the header's.
enum Threads : uint32_t { One, Tile, Warps, Blocks };

struct Group {
  Threads threads;

  __device__ unsigned thread_rank() const {
    switch (threads) {
      case Tile: return Warp().thread_rank() % 8;
      case Warps: return Warp().thread_rank();
      case Blocks: return Block().thread_rank();
      default: return Thread().thread_rank();
    }
  }
  __device__ unsigned size() const {
    switch (threads) {
      case Tile: return 8;
      case Warps: return Warp().size();
      case Blocks: return Block().size();
      default: return Thread().size();
    }
  }
  __device__ void sync() const {
    switch (threads) {
      case Tile: return __syncwarp(0xffu << (Warp().thread_rank() & 24));
      case Warps: return Warp().sync();
      case Blocks: return Block().sync();
      default: return Thread().sync();
    }
  }
};

#define EXPORT extern "C" __device__ int

// Calls `operation` with the context in the flags' sharing mode.
template <typename Operation>
__device__ int in_mode(const fgin_context* ctx, uint32_t flags, Operation operation) {
  if (flags & FGIN_SHARING_CTA) return operation(Gin<Sharing::Cta>(ctx));
  if (flags & FGIN_SHARING_THREAD) return operation(Gin<Sharing::Thread>(ctx));
  return operation(Gin<>(ctx));
}

// Calls `operation` with a packed action's signal, which the flags may make strong.
template <typename Operation>
__device__ int with_signal(fgin_action action, uint32_t flags, Operation operation) {
  uint32_t slot = action & 0xffff, amount = action >> 32;
  if (slot == 0) return operation(None{});
  if (flags & FGIN_STRONG) return amount == 1 ? operation(StrongSignalInc{slot - 1}) : operation(StrongSignalAdd{slot - 1, amount});
  if (amount == 1) return operation(SignalInc{slot - 1});
  return operation(SignalAdd{slot - 1, amount});
}

static __device__ uint32_t counter_slot(fgin_action action) {
  return action >> 16 & 0xffff;
}

EXPORT gin_open(void* handle, uint32_t id, const fgin_context** out) {
  Gin<> gin(handle, id);
  *out = gin.context();
  return gin.status();
}

EXPORT gin_put(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
               uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags, Threads threads) {
  return in_mode(ctx, flags, [&](auto gin) {
    return with_signal(action, flags, [&](auto signal) {
      uint32_t plain = flags & FGIN_AGGREGATE, counter = counter_slot(action);
      Group group{threads};
      return counter ? gin.put(peer, dst, dst_off, src, src_off, bytes, signal, CounterInc{counter - 1}, group, plain)
                     : gin.put(peer, dst, dst_off, src, src_off, bytes, signal, None{}, group, plain);
    });
  });
}

EXPORT gin_put_value(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                     uint32_t bytes, fgin_action action, uint32_t flags, Threads threads) {
  // The header's putValue has neither other sizes nor counters.
  bool is_c = counter_slot(action) || !(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8);
  Group group{threads};
  if (is_c) {
    group.sync();
    int status = fgin_put_value(ctx, peer, dst, dst_off, value, bytes, action, flags);
    group.sync();
    return status;
  }
  return in_mode(ctx, flags, [&](auto gin) {
    return with_signal(action, flags, [&](auto signal) {
      uint32_t plain = flags & FGIN_AGGREGATE;
      switch (bytes) {
        case 1: return gin.putValue(peer, dst, dst_off, uint8_t(value), signal, group, plain);
        case 2: return gin.putValue(peer, dst, dst_off, uint16_t(value), signal, group, plain);
        case 4: return gin.putValue(peer, dst, dst_off, uint32_t(value), signal, group, plain);
        default: return gin.putValue(peer, dst, dst_off, value, signal, group, plain);
      }
    });
  });
}

EXPORT gin_get(const fgin_context* ctx, uint32_t peer, fgin_window remote, uint64_t remote_off, fgin_window local,
               uint64_t local_off, uint64_t bytes, uint32_t flags, Threads threads) {
  return in_mode(ctx, flags, [&](auto gin) {
    return gin.get(peer, remote, remote_off, local, local_off, bytes, Group{threads}, flags & FGIN_AGGREGATE);
  });
}

EXPORT gin_signal(const fgin_context* ctx, uint32_t peer, fgin_action action, uint32_t flags, Threads threads) {
  Group group{threads};
  if (counter_slot(action)) {
    group.sync();
    int status = fgin_signal(ctx, peer, action, flags);
    group.sync();
    return status;
  }
  return in_mode(ctx, flags, [&](auto gin) {
    return with_signal(action, flags, [&](auto signal) { return gin.signal(peer, signal, group, flags & FGIN_AGGREGATE); });
  });
}

// Calls `operation` with a signal in memory, which the flags may make strong.
template <typename Operation>
__device__ int with_word(fgin_window window, uint64_t offset, uint64_t amount, uint32_t flags, Operation operation) {
  VASignalAdd add{window, offset, amount};
  if (flags & FGIN_STRONG) return amount == 1 ? operation(StrongVASignalInc{window, offset}) : operation(StrongVASignalAdd{window, offset, amount});
  return amount == 1 ? operation(VASignalInc{window, offset}) : operation(add);
}

EXPORT gin_put_signal_at(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, fgin_window src,
                         uint64_t src_off, uint64_t bytes, fgin_window word, uint64_t word_off, uint64_t amount,
                         fgin_action action, uint32_t flags, Threads threads) {
  return in_mode(ctx, flags, [&](auto gin) {
    return with_word(word, word_off, amount, flags, [&](auto signal) {
      uint32_t plain = flags & FGIN_AGGREGATE, counter = counter_slot(action);
      Group group{threads};
      return counter ? gin.put(peer, dst, dst_off, src, src_off, bytes, signal, CounterInc{counter - 1}, group, plain)
                     : gin.put(peer, dst, dst_off, src, src_off, bytes, signal, None{}, group, plain);
    });
  });
}

EXPORT gin_put_value_signal_at(const fgin_context* ctx, uint32_t peer, fgin_window dst, uint64_t dst_off, uint64_t value,
                               uint32_t, fgin_window word, uint64_t word_off, uint64_t amount, uint32_t flags, Threads threads) {
  return in_mode(ctx, flags, [&](auto gin) {
    return with_word(word, word_off, amount, flags, [&](auto signal) {
      return gin.putValue(peer, dst, dst_off, value, signal, Group{threads}, flags & FGIN_AGGREGATE);
    });
  });
}

EXPORT gin_signal_at(const fgin_context* ctx, uint32_t peer, fgin_window word, uint64_t word_off, uint64_t amount,
                     uint32_t flags, Threads threads) {
  return in_mode(ctx, flags, [&](auto gin) {
    return with_word(word, word_off, amount, flags,
                     [&](auto signal) { return gin.signal(peer, signal, Group{threads}, flags & FGIN_AGGREGATE); });
  });
}

// The operations of lanes, each with its own arguments; actions that the header's operations don't support go to gin.h.

EXPORT gin_warp_put(const fgin_context* ctx, uint32_t lanes, uint32_t peer, fgin_window dst, uint64_t dst_off,
                    fgin_window src, uint64_t src_off, uint64_t bytes, fgin_action action, uint32_t flags) {
  return in_mode(ctx, flags, [&](auto gin) {
    uint32_t slot = action & 0xffff, plain = flags & FGIN_AGGREGATE;
    if (slot == 0 && !counter_slot(action)) {
      return gin.put(peer, dst, dst_off, src, src_off, bytes, None{}, None{}, Lanes{lanes}, plain);
    }
    return fgin_warp_put(ctx, lanes, peer, dst, dst_off, src, src_off, bytes, action, flags);
  });
}

EXPORT gin_warp_put_value(const fgin_context* ctx, uint32_t lanes, uint32_t peer, fgin_window dst, uint64_t dst_off,
                          uint64_t value, uint32_t bytes, fgin_action action, uint32_t flags) {
  return in_mode(ctx, flags, [&](auto gin) {
    uint32_t plain = flags & FGIN_AGGREGATE;
    if (counter_slot(action) || bytes != 8) {
      return fgin_warp_put_value(ctx, lanes, peer, dst, dst_off, value, bytes, action, flags);
    }
    return with_signal(action, flags, [&](auto signal) {
      return gin.putValue(peer, dst, dst_off, value, signal, Lanes{lanes}, plain);
    });
  });
}

EXPORT gin_warp_signal(const fgin_context* ctx, uint32_t lanes, uint32_t peer, fgin_action action, uint32_t flags) {
  return in_mode(ctx, flags, [&](auto gin) {
    if (counter_slot(action)) return fgin_warp_signal(ctx, lanes, peer, action, flags);
    return with_signal(action, flags, [&](auto signal) {
      return gin.signal(peer, signal, Lanes{lanes}, flags & FGIN_AGGREGATE);
    });
  });
}

EXPORT gin_flush(const fgin_context* ctx, Threads threads) {
  return Gin<>(ctx).flush(Group{threads});
}

EXPORT gin_flush_async(const fgin_context* ctx, fgin_request* request, Threads threads) {
  return Gin<>(ctx).flushAsync(*request, Group{threads});
}

EXPORT gin_wait_request(const fgin_context* ctx, const fgin_request* request, Threads threads) {
  return Gin<>(ctx).wait(*request, Group{threads});
}

EXPORT gin_wait_signal(const fgin_context* ctx, uint32_t id, uint64_t least, Threads threads) {
  return Gin<>(ctx).waitSignal(id, least, Group{threads});
}

EXPORT gin_wait_counter(const fgin_context* ctx, uint32_t id, uint64_t least, Threads threads) {
  return Gin<>(ctx).waitCounter(id, least, Group{threads});
}
