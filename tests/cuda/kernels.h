// How the examples are compiled: as kernels by nvcc, as plain functions by a host compiler.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#else
#define KERNEL extern "C"
#endif
