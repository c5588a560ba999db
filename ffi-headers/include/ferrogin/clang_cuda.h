// The part of CUDA that ferrogin/gin.cuh and its kernels need, for clang without NVIDIA's headers:
//
//   clang -x cuda -nocudainc -nocudalib --cuda-device-only --cuda-gpu-arch=sm_75 -include ferrogin/clang_cuda.h ...
#pragma once

// As NVIDIA's headers do for every compiler.
#define __CUDACC__
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ __inline__ __attribute__((always_inline))

// The special registers are builtins; clang's own header names them threadIdx, blockDim and so on.
#include <__clang_cuda_builtin_vars.h>

__device__ inline void __syncwarp(unsigned mask = 0xffffffff) {
  __nvvm_bar_warp_sync(mask);
}
