// The part of <cuda_fp16.h> that EP kernels use.
#pragma once

#include "device.h"

struct __half {
  _Float16 value;

  __half() = default;
  FGIN_CLANG __half(float from) : value(_Float16(from)) {}
  FGIN_CLANG operator float() const {
    return float(value);
  }
};
struct alignas(4) __half2 {
  __half x, y;

  __half2() = default;
  FGIN_CLANG __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;

FGIN_CLANG __half __float2half(float from) {
  return __half(from);
}
FGIN_CLANG float __half2float(__half from) {
  return from;
}
FGIN_CLANG float2 __half22float2(__half2 from) {
  return {from.x, from.y};
}
FGIN_CLANG __half2 __float22half2_rn(float2 from) {
  return {from.x, from.y};
}
