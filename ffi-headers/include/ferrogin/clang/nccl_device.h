// The part of <nccl_device.h> with GIN and the barriers of a node's ranks. The rest needs CUDA's types for small
// floating-point numbers.
#pragma once

#include <nccl.h>
#include <nccl_device/host.h>
#include <nccl_device/impl/core__funcs.h>
#include <nccl_device/impl/gin__funcs.h>
#include <nccl_device/impl/gin_barrier__funcs.h>
#include <nccl_device/impl/lsa_barrier__funcs.h>
