// The functions of NCCL's bitcode that reach a GIN backend, with ferrogin's in place of EFA_GDA's. nccl_bitcode.py
// compiles this file with the headers of the user's NCCL, and links the result over that NCCL's libnccl_device.bc.
//
// SPDX-License-Identifier: Apache-2.0
#define __clang_llvm_bitcode_lib__
// NCCL compiles its own for CUDA 12.6 or newer, in which a barrier may use multicast memory.
#define CUDART_VERSION CUDA_VERSION

#include <nccl.h>

extern "C" __device__ __attribute__((noreturn)) void __assertfail(const char* text, const char* file, unsigned line, const char* function,
                                                                 size_t char_size);

// What NCCL's dispatch does for a backend that isn't compiled in.
__device__ __attribute__((noreturn, noinline)) inline void ferrogin_other_backend() {
  __assertfail("libnccl_device.bc by ferrogin has no GDAKI and no GPI backend: for those GPUs and cards, unset NCCL_HOME and use NCCL's own file",
               "ferrogin/nccl_bitcode.cu", 0, "ncclGin", 1);
}
#define __builtin_unreachable() ferrogin_other_backend()
#include <nccl_device/gin/gin_device_common.h>
#undef __builtin_unreachable

#include <ferrogin/nccl_gin_backend.cuh>

// Functions of C linkage that are defined, not inlined.
#undef NCCL_DEVICE_INLINE
#define NCCL_DEVICE_INLINE __device__ __attribute__((always_inline))

#include <nccl_device/impl/core__funcs.h>
#include <nccl_device/impl/comm__funcs.h>
#include <nccl_device/impl/gin__funcs.h>
#include <nccl_device/impl/lsa_barrier__funcs.h>
#include <nccl_device/impl/gin_barrier__funcs.h>
#include <nccl_device/impl/barrier__funcs.h>

struct ncclGinBarrierSession_C {
  ncclGinBarrierSession<ncclCoopAny> bar;
};
struct ncclBarrierSession_C {
  ncclBarrierSession<ncclCoopAny> bar;
};

// The fields that the two have in common come first.
static_assert(sizeof(ncclGin_C) == sizeof(ncclGin) + alignof(ncclGin_C), "ncclGin_C is an ncclGin and a mask");
static __device__ const ncclGin& gin(const ncclGin_C* net) {
  return *reinterpret_cast<const ncclGin*>(net);
}

extern "C" {

__device__ size_t ncclGinBarrierSession_C_size() {
  return sizeof(ncclGinBarrierSession_C);
}
__device__ size_t ncclBarrierSession_C_size() {
  return sizeof(ncclBarrierSession_C);
}

__device__ void ncclGinBarrierSessionInit(ncclGinBarrierSession_C* session, ncclCoopAny coop, const ncclGin_C* net, ncclTeam team,
                                          ncclGinBarrierHandle handle, uint32_t index) {
  ::new (&session->bar) ncclGinBarrierSession<ncclCoopAny>(coop, gin(net), team, handle, index);
}
__device__ void ncclGinBarrierSessionInitAllContexts(ncclGinBarrierSession_C* session, ncclCoopAny coop, const ncclDevComm& comm, ncclTeam team,
                                                     ncclGinBarrierHandle handle, uint32_t index) {
  ::new (&session->bar) ncclGinBarrierSession<ncclCoopAny>(coop, ncclGinAllContexts{comm}, team, handle, index);
}
__device__ void ncclGinBarrierSessionSync(ncclGinBarrierSession_C* session, ncclCoopAny coop, cuda::memory_order order, ncclGinFenceLevel fence) {
  session->bar.sync(coop, order, fence);
}
__device__ void ncclBarrierSessionInit(ncclBarrierSession_C* session, ncclCoopAny coop, ncclTeam innerTeam, ncclTeam outerTeam,
                                       const ncclGin_C* net, const ncclLsaBarrierHandle innerBarHandle, const ncclGinBarrierHandle outerBarHandle,
                                       uint32_t index, bool multimem, const ncclMultimemHandle innerMmHandle) {
  ::new (&session->bar) ncclBarrierSession<ncclCoopAny>(coop, innerTeam, outerTeam, gin(net), innerBarHandle, outerBarHandle, index, multimem,
                                                        innerMmHandle);
}
__device__ void ncclBarrierSessionSync(ncclBarrierSession_C* session, ncclCoopAny coop, cuda::memory_order order, ncclGinFenceLevel fence) {
  session->bar.sync(coop, order, fence);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
__device__ void ncclGinBarrierSessionDestroy(ncclGinBarrierSession_C* session) {
  session->bar.~ncclGinBarrierSession<ncclCoopAny>();
}
__device__ void ncclBarrierSessionDestroy(ncclBarrierSession_C* session) {
  session->bar.~ncclBarrierSession<ncclCoopAny>();
}
#endif

}  // extern "C"
