// The part of <cuda_fp8.h> that EP kernels use.
#pragma once

#include "device.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

// PTX has only conversions that saturate.
FGIN_CLANG __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 from, __nv_saturation_t, __nv_fp8_interpretation_t to) {
  unsigned short bits;
  if (to == __NV_E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(from.y), "f"(from.x));
  else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(from.y), "f"(from.x));
  return bits;
}

struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;

  __nv_fp8_e4m3() = default;
  FGIN_CLANG explicit __nv_fp8_e4m3(float from)
    : __x(__nv_fp8_storage_t(__nv_cvt_float2_to_fp8x2({from, 0}, __NV_SATFINITE, __NV_E4M3))) {}
  FGIN_CLANG explicit operator float() const {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)__x));
    return float(__builtin_bit_cast(_Float16, (unsigned short)halves));
  }
};
