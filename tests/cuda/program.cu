// The main function of a program with several translation units, each of which includes one of ferrogin's headers.
#include <ferrogin/gin.cuh>
#include <ferrogin/nccl_gin.cuh>

#include <cuda_runtime.h>
#include <stdio.h>

#include "kernels.h"

KERNEL void gin_all(void* handle, uint32_t peer, fgin_window dst, fgin_window src, uint64_t bytes, int* status);
KERNEL void nccl_all(ncclDevComm comm, int peer, ncclWindow_t dst, ncclWindow_t src, size_t bytes, uint64_t* out);

// Without a communicator there is no context, so every operation returns an error.
__global__ void refuse(int* status) {
  ferrogin::Gin<> gin(nullptr, 0);
  *status = gin.status() == FGIN_INVALID_ARGUMENT && gin.flush() == FGIN_INVALID_ARGUMENT &&
            gin.putValue(0, nullptr, 0, 1) == FGIN_INVALID_ARGUMENT;
}

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("no GPU\n");
    return 77;
  }
  cudaFuncAttributes attributes;
  int* refused = nullptr;
  cudaError_t error = cudaFuncGetAttributes(&attributes, (const void*)gin_all);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, (const void*)nccl_all);
  if (error == cudaSuccess) error = cudaMallocManaged(&refused, sizeof(int));
  if (error == cudaSuccess) {
    refuse<<<1, 1>>>(refused);
    error = cudaDeviceSynchronize();
  }
  if (error != cudaSuccess || !*refused) {
    printf("failed: %s\n", cudaGetErrorString(error));
    return 1;
  }
  printf("refused as it should\n");
  return 0;
}
