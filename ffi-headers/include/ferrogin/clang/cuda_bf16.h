// The part of <cuda_bf16.h> that EP kernels use.
#pragma once

#include "device.h"

struct __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;
  FGIN_CLANG __nv_bfloat16(float from) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(from));
  }
  FGIN_CLANG operator float() const {
    return __builtin_bit_cast(float, unsigned(bits) << 16);
  }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;

  __nv_bfloat162() = default;
  FGIN_CLANG __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

FGIN_CLANG __nv_bfloat16 __float2bfloat16(float from) {
  return __nv_bfloat16(from);
}
FGIN_CLANG float __bfloat162float(__nv_bfloat16 from) {
  return from;
}
FGIN_CLANG float2 __bfloat1622float2(__nv_bfloat162 from) {
  return {from.x, from.y};
}
FGIN_CLANG __nv_bfloat162 __float22bfloat162_rn(float2 from) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(from.y), "f"(from.x));
  return __builtin_bit_cast(__nv_bfloat162, bits);
}
FGIN_CLANG __nv_bfloat162 operator+(__nv_bfloat162 a, __nv_bfloat162 b) {
  unsigned bits;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(__builtin_bit_cast(unsigned, a)), "r"(__builtin_bit_cast(unsigned, b)));
  return __builtin_bit_cast(__nv_bfloat162, bits);
}
FGIN_CLANG __nv_bfloat162& operator+=(__nv_bfloat162& a, __nv_bfloat162 b) {
  return a = a + b;
}

FGIN_CLANG __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) {
  return float(a) > float(b) ? a : b;
}
FGIN_CLANG __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  unsigned bits;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(__builtin_bit_cast(unsigned, a)), "r"(__builtin_bit_cast(unsigned, b)));
  return __builtin_bit_cast(__nv_bfloat162, bits);
}
FGIN_CLANG __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) {
  unsigned bits;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(__builtin_bit_cast(unsigned, a)), "r"(__builtin_bit_cast(unsigned, b)));
  return __builtin_bit_cast(__nv_bfloat162, bits);
}
FGIN_CLANG __nv_bfloat162 __habs2(__nv_bfloat162 a) {
  return __builtin_bit_cast(__nv_bfloat162, __builtin_bit_cast(unsigned, a) & 0x7fff7fff);
}

#define CUDART_ZERO_BF16 __nv_bfloat16(0.0f)
#define CUDART_INF_BF16 __nv_bfloat16(__builtin_inff())
