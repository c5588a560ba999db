// Ordinary kernels for NCCL's device API, which don't mention ferrogin.
#include <nccl_device.h>

extern "C" __global__ void nccl_put_value(ncclDevComm comm, ncclTeam team, int peer, ncclWindow_t win, size_t off,
                                          int value, ncclGinSignal_t signal) {
  ncclGin gin{comm, 0};
  gin.putValue<int>(team, peer, win, off, value, ncclGin_SignalInc{signal});
}

extern "C" __global__ void nccl_put(ncclDevComm comm, ncclTeam team, int peer, ncclWindow_t dst, size_t dst_off,
                                    ncclWindow_t src, size_t src_off, size_t bytes, ncclGinSignal_t signal) {
  ncclGin gin{comm, 0};
  gin.put(team, peer, dst, dst_off, src, src_off, bytes, ncclGin_SignalInc{signal});
}

extern "C" __global__ void nccl_flush(ncclDevComm comm) {
  ncclGin gin{comm, 0};
  gin.flush(ncclCoopThread());
}

#ifndef ONLY_POSTS

extern "C" __global__ void nccl_all(ncclDevComm comm, int peer, ncclWindow_t dst, ncclWindow_t src, size_t bytes,
                                    uint64_t* out) {
  ncclGin gin{comm, 0, NCCL_GIN_RESOURCE_SHARING_CTA};
  ncclTeam team = ncclTeamWorld(comm);
  ncclGinRequest_t request;
  gin.put(team, peer, dst, 0, src, 0, bytes, ncclGin_SignalAdd{1, 3}, ncclGin_CounterInc{0}, ncclCoopCta());
  gin.put(team, peer, dst, 0, src, 0, bytes, ncclGin_None{}, ncclGin_None{}, ncclCoopWarp());
  gin.putValue<uint8_t>(team, peer, dst, 0, 1);
  gin.putValue<double>(team, peer, dst, 8, 2.0, ncclGin_StrongSignalInc{0}, ncclCoopWarp());
  gin.put(team, peer, dst, 0, src, 0, bytes, ncclGin_StrongSignalAdd{1, 3});
  gin.put(team, peer, dst, 0, src, 0, bytes, ncclGin_VASignalInc{dst, 16}, ncclGin_WeakCounterInc{0}, ncclCoopCta());
  gin.putValue<uint64_t>(team, peer, dst, 8, 2, ncclGin_StrongVASignalInc{dst, 16}, ncclCoopWarp());
  gin.signal(team, peer, ncclGin_WeakVASignalAdd{dst, 16, uint64_t(1) << 40});
  gin.get(team, peer, dst, 0, src, 0, bytes);
  gin.signal(team, peer, ncclGin_SignalInc{0});
  gin.flushAsync(team, peer, &request);
  gin.wait(request);
  (void)gin.wait(request, ncclCoopThread(), ncclGin_None{}, cuda::memory_order_acquire, 1000);
  gin.flush(ncclCoopCta());
  (void)gin.flush(ncclCoopCta(), cuda::memory_order_acquire, ncclGin_None{}, 1000);
  gin.waitSignal(ncclCoopCta(), 0, 1);
  gin.waitSignal(ncclCoopCta(), dst, 16, 1);
  gin.waitCounter(ncclCoopCta(), 0, 1);
  *out = gin.readSignal(dst, 16) + gin.readSignal(0) + gin.readCounter(0) + gin._supportsStrongSignal();
  gin.resetSignal(0);
  gin.resetSignal(dst, 16);
  gin.resetCounter(0);
  ncclGinBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), gin, ncclTeamTagWorld(), 0);
  barrier.sync(ncclCoopCta(), cuda::memory_order_relaxed, ncclGinFenceLevel::Relaxed);
}

#endif
