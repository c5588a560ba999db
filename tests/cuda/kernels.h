// Compiles the examples as kernels with nvcc, and as plain functions with a host compiler.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#else
#define KERNEL extern "C"
#endif
