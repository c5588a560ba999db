//! Each form on given operands, against results worked out by hand.

use crate::arena::{Arena, kernel, run_text};

/// Instructions that leave their result in `%d0`, `%r0`, `%h0` or `%p0`, and the expected result.
const FORMS: &[(&str, u64)] = &[
    ("mov.b64 %d0, 0xfedcba9876543210", 0xfedc_ba98_7654_3210),
    ("mov.u32 %r0, -2", 0xffff_fffe),
    ("mov.pred %p0, -1", 1),
    ("mov.b64 %d1, 0x1122334455667788; mov.b64 {_, %r0}, %d1", 0x1122_3344),
    ("mov.b64 %d1, 0x1122334455667788; mov.b64 {%r0, _}, %d1", 0x5566_7788),
    ("mov.b64 %d0, {%r3, %r4}", 0x0000_0004_0000_0003),
    ("mov.b32 %r0, {%h3, %h4}", 0x0004_0003),
    ("{ .reg .b128 q; mov.b128 q, {%d3, 0x1234567890}; mov.b128 {_, %d0}, q; }", 0x12_3456_7890),
    (
        "{ .reg .b128 q<3>; mov.b128 q1, {%d4, %d5}; mov.b128 q2, q1; mov.b128 q1, {%d3, %d3}; mov.b128 {%d0, _}, q2; }",
        4,
    ),
    ("{ .reg .b128 q; mov.b128 q, {%d4, %d5}; @%p2 mov.b128 q, {%d3, %d3}; mov.b128 {_, %d0}, q; }", 5),
    ("mov.b128 {%d3, %d4}, {%d4, %d3}; sub.s64 %d0, %d3, %d4", 1),
    ("add.s64 %d0, %d3, -5", u64::MAX - 1),
    ("add.u32 %r0, %r3, 0xfffffffe", 1),
    ("add.s16 %h0, %h3, -4", 0xffff),
    ("add.cc.u32 %r1, %r3, 0xffffffff; addc.u32 %r0, %r3, %r4", 8),
    ("sub.cc.u64 %d1, %d3, %d4; subc.u64 %d0, %d5, %d3", 1),
    ("sub.cc.u32 %r1, %r3, %r4; addc.u32 %r0, 0, 0", 0),
    ("sub.cc.u32 %r1, %r4, %r3; addc.u32 %r0, 0, 0", 1),
    ("add.cc.u32 %r1, %r3, %r4; subc.u32 %r0, %r5, 0", 4),
    ("add.cc.u32 %r1, %r3, -1; subc.u32 %r0, %r5, 0", 5),
    ("sub.s32 %r0, %r3, %r4", 0xffff_ffff),
    ("mul.lo.s32 %r0, %r3, -4", 0xffff_fff4),
    ("mul.hi.s32 %r0, %r3, -4", 0xffff_ffff),
    ("mul.hi.u32 %r0, %r3, -4", 2),
    ("mul.hi.u64 %d0, %d3, -4", 2),
    ("mul.hi.s64 %d0, %d3, -4", u64::MAX),
    ("mul.wide.u32 %d0, %r3, -1", 0x2_ffff_fffd),
    ("mul.wide.s32 %d0, %r3, -1", u64::MAX - 2),
    ("mul.wide.u16 %r0, %h3, 0xffff", 0x2_fffd),
    ("mad.lo.s32 %r0, %r3, %r4, %r5", 17),
    ("mad.lo.s64 %d0, %d3, %d4, %d5", 17),
    ("mad.wide.u32 %d0, %r3, -1, %d5", 0x3_0000_0002),
    ("mad.hi.u32 %r0, %r3, -1, %r5", 7),
    ("div.s32 %r0, -7, %r3", 0xffff_fffe),
    ("div.u32 %r0, -7, %r3", 0x5555_5553),
    ("div.s32 %r0, 0x80000000, -1", 0x8000_0000),
    ("rem.s64 %d0, -7, %d3", u64::MAX),
    ("rem.u64 %d0, 7, %d3", 1),
    ("min.s32 %r0, %r3, -1", 0xffff_ffff),
    ("min.u32 %r0, %r3, -1", 3),
    ("max.s64 %d0, %d3, -1", 3),
    ("max.u16 %h0, %h3, -1", 0xffff),
    ("abs.s32 %r0, -9", 9),
    ("neg.s16 %h0, %h3", 0xfffd),
    ("and.b32 %r0, %r3, 6", 2),
    ("or.b64 %d0, %d3, 8", 11),
    ("xor.b16 %h0, %h3, -1", 0xfffc),
    ("not.b32 %r0, %r3", 0xffff_fffc),
    ("not.pred %p0, %p2", 1),
    ("and.pred %p0, %p1, %p2", 0),
    ("or.pred %p0, %p1, %p2", 1),
    ("xor.pred %p0, %p1, %p1", 0),
    ("cnot.b32 %r0, 0", 1),
    ("lop3.b32 %r0, 0x0f, 0x33, 0x55, 0x96", 0x69),
    ("lop3.b32 %r0, 0xf0, 0xcc, 0xaa, 0x80", 0x80),
    ("shl.b32 %r0, %r3, 31", 0x8000_0000),
    ("shl.b32 %r0, %r3, 32", 0),
    ("shl.b64 %d0, %d3, %r5", 96),
    ("shr.u64 %d0, -1, 60", 15),
    ("shr.u64 %d0, -1, 64", 0),
    ("shr.s32 %r0, 0x80000000, 99", 0xffff_ffff),
    ("shr.s64 %d0, 0x8000000000000000, 63", u64::MAX),
    ("shr.b16 %h0, %h5, 1", 2),
    ("shf.l.wrap.b32 %r0, 0x80000001, 0x40000002, 33", 0x8000_0005),
    ("shf.l.clamp.b32 %r0, 0x80000001, 0x40000002, 33", 0x8000_0001),
    ("shf.r.wrap.b32 %r0, 0x80000001, 0x40000002, 1", 0x4000_0000),
    ("shf.r.clamp.b32 %r0, 0x80000001, 0x40000002, 40", 0x4000_0002),
    ("popc.b64 %r0, -1", 64),
    ("popc.b32 %r0, %r3", 2),
    ("clz.b32 %r0, %r3", 30),
    ("clz.b64 %r0, 0", 64),
    ("brev.b32 %r0, %r3", 0xc000_0000),
    ("brev.b64 %d0, 1", 1 << 63),
    ("bfind.u32 %r0, %r5", 2),
    ("bfind.u32 %r0, 0", 0xffff_ffff),
    ("bfind.s32 %r0, -1", 0xffff_ffff),
    ("bfind.s64 %r0, -9", 3),
    ("bfind.shiftamt.u32 %r0, %r5", 29),
    ("bfe.u32 %r0, 0xabcd, 4, 8", 0xbc),
    ("bfe.s32 %r0, 0xabcd, 4, 8", 0xffff_ffbc),
    ("bfe.s32 %r0, 0x80000000, 28, 8", 0xffff_fff8),
    ("bfe.u64 %d0, -1, 60, 8", 15),
    ("bfe.s64 %d0, -1, 3, 0", 0),
    ("bfe.s32 %r0, 0x80000000, 40, 4", 0xffff_ffff),
    ("bfi.b32 %r0, 0xff, 0, 4, 8", 0xff0),
    ("bfi.b64 %d0, 0, -1, 62, 8", 0x3fff_ffff_ffff_ffff),
    ("prmt.b32 %r0, 0x33221100, 0x77665544, 0x0246", 0x0022_4466),
    ("prmt.b32 %r0, 0x80, 0, 0x8888", 0xffff_ffff),
    ("selp.b32 %r0, 1, 2, %p1", 1),
    ("selp.b64 %d0, 1, 2, %p2", 2),
    ("selp.b32 %r0, 1, 2, !%p1", 2),
    ("selp.u64 %d0, 1, 2, !%p2", 1),
    ("selp.f64 %g0, 0d3FF0000000000000, 0d4000000000000000, !%p1; mov.b64 %d0, %g0", 2 << 61),
    ("mov.pred %p0, !%p1", 0),
    ("not.pred %p0, !%p1", 1),
    ("and.pred %p0, %p1, !%p2", 1),
    ("or.pred %p0, !%p1, %p2", 0),
    ("xor.pred %p0, !%p1, !%p2", 1),
    ("mov.pred %p0, 1 == 2", 0),
    ("setp.lt.s32 %p0, -1, 0", 1),
    ("setp.lt.u32 %p0, -1, 0", 0),
    ("setp.hs.u64 %p0, 5, %d5", 1),
    ("setp.lo.or.u32 %p0|%p5, 5, 4, !%p2", 1),
    ("setp.lt.and.f32 %p0, 0f80000000, 0f00000000, !%p2", 0),
    ("setp.eq.b16 %p0, %h3, 3", 1),
    ("setp.ne.b64 %p0, %d3, %d4", 1),
    ("setp.gt.and.s32 %p0|%p5, 1, 0, !%p2", 1),
    ("setp.gt.and.s32 %p5|%p0, 1, 0, !%p2", 0),
    ("setp.gt.xor.s32 %p0, 1, 0, %p1", 0),
    ("set.lt.u32.s32 %r0, -1, 0", 0xffff_ffff),
    ("cvt.u64.u32 %d0, -1", 0xffff_ffff),
    ("cvt.s64.s32 %d0, -1", u64::MAX),
    ("cvt.u32.u64 %r0, 0x123456789", 0x2345_6789),
    ("cvt.u16.u64 %h0, 0x123456789", 0x6789),
    ("cvt.s32.s8 %r0, 0x80", 0xffff_ff80),
    ("cvt.s8.s32 %r0, 0x180", 0xffff_ff80),
    ("cvt.u8.u32 %r0, 0x180", 0x80),
    ("cvt.rn.f32.s32 %f0, -3; mov.b32 %r0, %f0", 0xc040_0000),
    ("cvt.rzi.s32.f32 %r0, 0fC0700000", 0xffff_fffd),
    ("cvt.rzi.u32.f32 %r0, 0fC0700000", 0),
    // NaN becomes 0 from 32 to at most 32 bits, and otherwise the top bit.
    ("cvt.rzi.s32.f32 %r0, 0f7FC00000", 0),
    ("cvt.rzi.u16.f32 %h0, 0fFFC00000", 0),
    ("cvt.rzi.s64.f32 %d0, 0f7FC00000", 1 << 63),
    ("cvt.rzi.u64.f32 %d0, 0f7FC00000", 1 << 63),
    ("cvt.rzi.s32.f64 %r0, 0d7FF8000000000000", 1 << 31),
    ("cvt.rzi.u32.f64 %r0, 0dFFF0000000000001", 1 << 31),
    ("cvt.rzi.u64.f64 %d0, 0d7FF8000000000000", 1 << 63),
    ("cvt.rzi.s16.f64 %h0, 0d7FF8000000000000", 1 << 15),
    ("cvt.rzi.s8.f64 %r0, 0d7FF8000000000000", 0xffff_ff80),
    ("cvt.rzi.u8.f64 %r0, 0d7FF8000000000000", 0x80),
    ("cvt.rzi.s8.f32 %r0, 0fC3960000", 0xffff_ff80),
    ("cvt.rzi.u8.f32 %r0, 0f43960000", 0xff),
    ("cvt.rzi.u64.f64 %d0, 0dC3E0000000000000", 0),
    ("cvt.rzi.s64.f64 %d0, 0d7FF0000000000000", i64::MAX as u64),
    ("cvt.rn.f32.s8 %f0, 0x80; mov.b32 %r0, %f0", 0xc300_0000),
    ("cvt.rn.f32.u64 %f0, 0xfffffffffffffbff; mov.b32 %r0, %f0", 0x5f80_0000),
    ("cvt.f64.f32 %g0, 0fFF812345; mov.b64 %d0, %g0", 0xfff8_2468_a000_0000),
    ("cvt.rn.f32.f64 %f0, 0dFFF8000000000001; mov.b32 %r0, %f0", 0xffc0_0000),
    ("min.f32 %f0, 0f00000000, 0f80000000; mov.b32 %r0, %f0", 1 << 31),
    ("min.f32 %f0, 0f80000000, 0f00000000; mov.b32 %r0, %f0", 1 << 31),
    ("max.f32 %f0, 0f80000000, 0f00000000; mov.b32 %r0, %f0", 0),
    ("max.f64 %g0, 0d8000000000000000, 0d0000000000000000; mov.b64 %d0, %g0", 0),
    ("min.f64 %g0, 0d0000000000000000, 0d8000000000000000; mov.b64 %d0, %g0", 1 << 63),
    ("max.f32 %f0, 0f7F800001, 0fBF800000; mov.b32 %r0, %f0", 0xbf80_0000),
    ("min.f64 %g0, 0d3FF0000000000000, 0d7FF0000000000001; mov.b64 %d0, %g0", 0x3ff0_0000_0000_0000),
    ("min.f32 %f0, 0f7FC00001, 0fFFC00002; mov.b32 %r0, %f0", 0x7fff_ffff),
    ("max.f64 %g0, 0d7FF0000000000001, 0dFFF8000000000002; mov.b64 %d0, %g0", 0x7ff8_0000_0000_0001),
    ("neg.f32 %f0, 0f7FC00001; mov.b32 %r0, %f0", 0xffc0_0001),
    ("abs.f64 %g0, 0dFFF8000000000001; mov.b64 %d0, %g0", 0x7ff8_0000_0000_0001),
    ("mul.rn.f32 %f0, 0f7F800000, 0f00000000; mov.b32 %r0, %f0", 0x7fff_ffff),
    ("mul.f64 %g0, 0d7FF0000000000000, 0d0000000000000000; mov.b64 %d0, %g0", 0xfff8_0000_0000_0000),
    ("sqrt.rn.f64 %g0, 0dBFF0000000000000; mov.b64 %d0, %g0", 0xfff8_0000_0000_0000),
    ("add.f64 %g0, 0d3FF0000000000000, 0d7FF0000000000123; mov.b64 %d0, %g0", 0x7ff8_0000_0000_0123),
    ("mul.f32 %f0, 0f00800000, 0f3F000000; mov.b32 %r0, %f0", 0x0040_0000),
    ("cvt.f64.f32 %g0, 0f40400000; mov.b64 %d0, %g0", 0x4008_0000_0000_0000),
    ("add.f32 %f0, 0f3F800000, 0f40000000; mov.b32 %r0, %f0", 0x4040_0000),
    (
        "fma.rn.f64 %g0, 0d4008000000000000, 0d4000000000000000, 0d3FF0000000000000; mov.b64 %d0, %g0",
        0x401c_0000_0000_0000,
    ),
    // Formats of 16 and 8 bits. 1 + 2^-8 lies between two bf16; 0x3f81 is 1 + 2^-7.
    ("cvt.rn.bf16.f32 %h0, 0f3F808000", 0x3f80),
    ("cvt.rn.bf16.f32 %h0, 0f3F808001", 0x3f81),
    ("cvt.rn.bf16.f32 %h0, 0f3F818000", 0x3f82),
    ("cvt.rn.bf16.f32 %h0, 0f7F7FFFFF", 0x7f80),
    ("cvt.rn.bf16.f32 %h0, 0fFFC00001", 0x7fff),
    ("cvt.rn.bf16.f32 %h0, 0f80010000", 0x8001),
    ("mov.b16 %h1, 0x3f81; cvt.f32.bf16 %f0, %h1; mov.b32 %r0, %f0", 0x3f81_0000),
    ("cvt.rn.bf16x2.f32 %r0, 0f3F800000, 0fC0000000", 0x3f80_c000),
    ("cvt.rn.f16.f32 %h0, 0f477FEFFF", 0x7bff),
    ("cvt.rn.f16.f32 %h0, 0f477FF000", 0x7c00),
    ("cvt.rn.f16.f32 %h0, 0f33800000", 0x0001),
    ("cvt.rn.f16.f32 %h0, 0f33000000", 0x0000),
    ("cvt.rn.f16.f32 %h0, 0fB87FC000", 0x83ff),
    ("cvt.rn.f16.f32 %h0, 0fB87FE000", 0x8400),
    ("cvt.rn.f16.f64 %h0, 0d3FF0000000000000", 0x3c00),
    ("mov.b16 %h1, 0x0001; cvt.f32.f16 %f0, %h1; mov.b32 %r0, %f0", 0x3380_0000),
    ("mov.b16 %h1, 0xfc00; cvt.f32.f16 %f0, %h1; mov.b32 %r0, %f0", 0xff80_0000),
    ("mov.b16 %h1, 0x7c01; cvt.f32.f16 %f0, %h1; mov.b32 %r0, %f0", 0x7fff_ffff),
    ("mov.b16 %h1, 0xbc00; cvt.f64.f16 %g0, %h1; mov.b64 %d0, %g0", 0xbff0_0000_0000_0000),
    ("cvt.rn.f16x2.f32 %r0, 0f3F800000, 0fC0000000", 0x3c00_c000),
    // e4m3: 448 is the greatest number, 0.0078125 is 4 of the smallest ones; e5m2: 57344 is the greatest.
    ("cvt.rn.satfinite.e4m3x2.f32 %h0, 0f43E00000, 0fC47A0000", 0x7efe),
    ("cvt.rn.satfinite.e4m3x2.f32 %h0, 0f3C000000, 0f7FC00000", 0x047f),
    ("cvt.rn.satfinite.e4m3x2.f32 %h0, 0f3F880000, 0f3F980000", 0x383a),
    ("cvt.rn.satfinite.e5m2x2.f32 %h0, 0f3F800000, 0f47800000", 0x3c7b),
    ("mov.b16 %h1, 0x7e81; cvt.rn.f16x2.e4m3x2 %r0, %h1", 0x5f00_9800),
    ("mov.b16 %h1, 0x7f38; cvt.rn.f16x2.e4m3x2 %r0, %h1", 0x7fff_3c00),
    ("mov.b16 %h1, 0x7c3c; cvt.rn.f16x2.e5m2x2 %r0, %h1", 0x7c00_3c00),
    ("cvt.rn.satfinite.e4m3x2.f16x2 %h0, 0x5f00b800", 0x7eb0),
    ("add.bf16x2 %r0, 0x3f803f80, 0x3f80bf80", 0x4000_0000),
    ("add.rn.bf16x2 %r0, 0x43803f80, 0x3f803b80", 0x4380_3f80),
    ("sub.f16x2 %r0, 0x3c004000, 0x3c003c00", 0x0000_3c00),
    ("mul.bf16 %h0, 0x3fc0, 0x4000", 0x4040),
    ("fma.rn.bf16x2 %r0, 0x3f803f81, 0x3f803f81, 0x3f803f80", 0x4000_4001),
    // The product is half way between two numbers, and the addend far below decides.
    ("fma.rn.f16 %h0, 0x3c01, 0x4600, 0x0001", 0x4602),
    ("fma.rn.bf16 %h0, 0x3f81, 0x3fc0, 0x0001", 0x3fc2),
    ("fma.rn.bf16 %h0, 0x3f81, 0x3fc0, 0x8001", 0x3fc1),
    ("min.bf16x2 %r0, 0x80007fc0, 0x0000bf80", 0x8000_bf80),
    ("max.bf16x2 %r0, 0x80007fc0, 0x0000ffc0", 0x0000_7fff),
    ("max.f16 %h0, 0x3c00, 0x4000", 0x4000),
    ("neg.bf16x2 %r0, 0x3f80ffc1", 0xbf80_7fc1),
    ("abs.f16x2 %r0, 0xbc00fe01", 0x3c00_7e01),
    ("lg2.approx.f32 %f0, 0f41000000; mov.b32 %r0, %f0", 0x4040_0000),
    ("lg2.approx.ftz.f32 %f0, 0f00000001; mov.b32 %r0, %f0", 0xff80_0000),
    ("lg2.approx.f32 %f0, 0f00000001; mov.b32 %r0, %f0", 0xc315_0000),
    ("lg2.approx.f32 %f0, 0fBF800000; mov.b32 %r0, %f0", 0x7fff_ffff),
    ("ex2.approx.f32 %f0, 0fC0400000; mov.b32 %r0, %f0", 0x3e00_0000),
    ("ex2.approx.ftz.f32 %f0, 0fC2FE0000; mov.b32 %r0, %f0", 0),
    ("rcp.rn.f32 %f0, 0f40400000; mov.b32 %r0, %f0", 0x3eaa_aaab),
    ("rcp.approx.ftz.f32 %f0, 0f80000001; mov.b32 %r0, %f0", 0xff80_0000),
    ("cvt.rmi.s32.f32 %r0, 0fC0200000", 0xffff_fffd),
    ("cvt.rpi.s32.f32 %r0, 0fC0200000", 0xffff_fffe),
    ("cvt.rni.u32.f32 %r0, 0f40200000", 2),
    ("cvt.rmi.f32.f32 %f0, 0fC0200000; mov.b32 %r0, %f0", 0xc040_0000),
    ("cvt.rni.f64.f64 %g0, 0d400C000000000000; mov.b64 %d0, %g0", 0x4010_0000_0000_0000),
    ("setp.lt.f32 %p0, 0f7FC00000, 0f00000000", 0),
    ("setp.ltu.f32 %p0, 0f7FC00000, 0f00000000", 1),
    ("@%p2 mov.u32 %r5, 9; mov.u32 %r0, %r5", 5),
    ("@!%p2 mov.u32 %r5, 9; mov.u32 %r0, %r5", 9),
    ("mov.u32 %r0, %ntid.x", 1),
    ("mov.u32 %r0, %lanemask_ge", 0xffff_ffff),
    ("mov.u32 %r0, %lanemask_lt", 0),
    ("mov.u32 %r0, WARP_SZ", 32),
    ("mov.u32 %r0, %cluster_ctarank", 0),
    ("mov.u32 %r0, %cluster_nctarank", 1),
    ("mov.u32 %r0, %cluster_nctaid.y", 1),
    ("mov.u32 %r0, %nclusterid.x", 1),
    ("mov.pred %p0, %is_explicit_cluster", 0),
    ("mov.u32 %r0, %envreg1", 0),
    ("setmaxnreg.dec.sync.aligned.u32 24; mov.u32 %r0, 7", 7),
    ("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 %r0, 7", 7),
    // Constant expressions, as ptxas folds them.
    ("mov.u64 %d0, (1+2)*4-7/2", 9),
    ("mov.u64 %d0, -1 >> 60", u64::MAX),
    ("mov.u64 %d0, 0xffffffffffffffff >> 60", 15),
    ("mov.u64 %d0, (.s64) 0xffffffffffffffff >> 60", u64::MAX),
    ("mov.u64 %d0, (.u64) -1 >> 60", 15),
    ("mov.u64 %d0, -1U >> 60", 15),
    ("mov.u64 %d0, (-1 & -1) >> 60", u64::MAX),
    ("mov.u64 %d0, (~0) >> 60", 15),
    ("mov.u64 %d0, -7/2", (-3i64) as u64),
    ("mov.u64 %d0, 7 % -2", 7),
    ("mov.u64 %d0, (7 % 4) > -1", 0),
    ("mov.u64 %d0, -1 > 0U", 1),
    ("mov.u64 %d0, 1 << 65", 2),
    ("mov.u64 %d0, !5 || 3 == 3", 1),
    ("mov.u64 %d0, 2+3*4 == 14 && 1|2^3&1", 1),
    ("mov.u64 %d0, 0 ? 2 : 3 ? 4 : 5", 4),
    ("add.u32 %r0, %r3, 1<<4", 19),
    ("ld.global.u64 %d0, [%out+2*8]", 2),
    ("ld.global.u64 %d0, [%out+(8+8)]", 2),
    // Memory: word 1 of the arena is 0x8899aabbccddeeff; words 2 to 7 hold their own numbers.
    ("ld.global.b8 %r0, [%out+15]", 0x88),
    ("ld.global.s8 %r0, [%out+15]", 0xffff_ff88),
    ("ld.s16 %d0, [%out+8]", 0xffff_ffff_ffff_eeff),
    ("ld.u16 %h0, [%out+8]", 0xeeff),
    ("ld.v2.b32 {%r1, %r0}, [%out+8]", 0x8899_aabb),
    ("ld.global.nc.L1::no_allocate.v2.u64 {%d1, %d0}, [%out+16]", 3),
    ("ld.L1::no_allocate.L2::cache_hint.global.nc.v4.s32 {%r1, %r2, %r0, %r3}, [%out+16], %d3", 3),
    ("st.global.L2::cache_hint.b64 [%out+16], 9, %d3; ld.global.b64 %d0, [%out+16]", 9),
    ("{ .reg .b128 q; ld.relaxed.sys.global.b128 q, [%out+16]; mov.b128 {_, %d0}, q; }", 3),
    ("{.reg .b128 q; mov.b128 q,{%d5,%d4}; st.relaxed.sys.global.b128 [%out+16],q; } ld.global.b64 %d0, [%out+24];", 4),
    (
        "{.reg .b128 q; mov.b128 q,{%d5,%d4}; st.b128 [%out+16],q; ld.b128 q,[%out+32]; } ld.global.b64 %d0, [%out+16];",
        5,
    ),
    ("ld.relaxed.sys.global.L1::no_allocate.b8 %h0, [%out+15]", 0x88),
    ("ld.relaxed.sys.global.L1::no_allocate.b32 %r0, [%out+8]", 0xccdd_eeff),
    ("st.weak.cs.v2.b64 [%out+16], {%d5, %d4}; ld.global.b64 %d0, [%out+24]", 4),
    ("st.global.wt.v4.u32 [%out+16],{%r5,%r4,%r3,%r3}; ld.global.b64 %d0, [%out+24]", 0x3_0000_0003),
    ("ld.volatile.global.u32 %r0, [%out+8]", 0xccdd_eeff),
    ("ld.relaxed.sys.global.b64 %d0, [%out+16]", 2),
    ("ld.acquire.gpu.b32 %r0, [%out+16]", 2),
    ("ld.mmio.relaxed.sys.global.u32 %r0, [%out+16]", 2),
    ("st.global.v2.b64 [%out+16], {%d5, %d4}; ld.global.b64 %d0, [%out+24]", 4),
    ("st.global.v4.b32 [%out+16], {%r5, %r4, %r3, %r3}; ld.global.b64 %d0, [%out+16]", 0x4_0000_0005),
    ("st.release.sys.global.u8 [%out+17], %r5; ld.global.b64 %d0, [%out+16]", 0x502),
    ("st.global.wt.u64 [%out+16], 7; ld.global.b64 %d0, [%out+16]", 7),
    ("st.local.b32 [spot+4], %r5; ld.local.b32 %r0, [spot+4]", 5),
    ("mov.b64 %d1, spot; cvta.local.u64 %d2, %d1; st.b64 [%d2+8], 77; ld.local.b64 %d0, [%d1+8]", 77),
    ("st.shared.b32 [room+4], %r5; ld.shared.b32 %r0, [room+4]", 5),
    ("mov.u32 %r1, room; st.shared.b64 [%r1+8], 78; cvta.shared.u64 %d2, 8; ld.b64 %d0, [%d2]", 78),
    ("mov.u64 %d1, room; cvta.shared.u64 %d1, %d1; cvta.to.shared.u64 %d2, %d1; mov.b64 %d0, %d2", 0),
    ("mov.u64 %d1, room; cvta.shared.u64 %d1, %d1; isspacep.shared %p0, %d1", 1),
    ("isspacep.global %p0, %out", 1),
    ("atom.global.add.u64 %d0, [%out+16], 5", 2),
    ("atom.add.release.gpu.global.s32 %r1, [%out+16], 5; ld.global.b64 %d0, [%out+16]", 7),
    ("red.add.release.gpu.global.u32 [%out+16], 5; ld.global.b64 %d0, [%out+16]", 7),
    ("fence.sys.acq_rel; fence.acq_rel.sys; fence.gpu; mov.u32 %r0, 7", 7),
    (
        "fence.proxy.async; fence.proxy.async.global; fence.proxy.async.shared::cta; fence.mbarrier_init.release.cluster; mov.u32 %r0, 7",
        7,
    ),
    ("atom.add.u32 %r1, [%out+16], 5; ld.global.b64 %d0, [%out+16]", 7),
    ("atom.acq_rel.gpu.global.cas.b64 %d1, [%out+16], 2, 9; ld.global.b64 %d0, [%out+16]", 9),
    ("atom.relaxed.sys.global.cas.b32 %r1, [%out+16], 3, 9; ld.global.b64 %d0, [%out+16]", 2),
    ("atom.global.exch.b64 %d1, [%out+16], 9; ld.global.b64 %d0, [%out+16]", 9),
    ("atom.global.max.s32 %r1, [%out+16], -1; ld.global.b64 %d0, [%out+16]", 2),
    ("atom.global.max.u64 %d1, [%out+16], -1; ld.global.b64 %d0, [%out+16]", u64::MAX),
    ("atom.global.min.s64 %d1, [%out+16], -1; ld.global.b64 %d0, [%out+16]", u64::MAX),
    ("atom.global.inc.u32 %r1, [%out+16], 2; ld.global.b64 %d0, [%out+16]", 0),
    ("atom.global.dec.u32 %r1, [%out+16], 2; ld.global.b64 %d0, [%out+16]", 1),
    ("atom.add.relaxed.cta.u32 %r1,[%out+16],%r5; ld.global.b64 %d0, [%out+16]", 7),
    ("atom.add.relaxed.gpu.u32 %r1,[%out+16],%r5; ld.global.b64 %d0, [%out+16]", 7),
    ("atom.add.relaxed.sys.u64 %d1,[%out+16],%d5; ld.global.b64 %d0, [%out+16]", 7),
    ("atom.max.acquire.cta.u64 %d1,[%out+16],%d5; ld.global.b64 %d0, [%out+16]", 5),
    ("atom.max.relaxed.sys.u64 %d0,[%out+16],%d5", 2),
    ("atom.cas.release.gpu.b32 %r1,[%out+16],2,%r5; ld.global.b64 %d0, [%out+16]", 5),
    ("red.global.add.u64 [%out+16], 3; ld.global.b64 %d0, [%out+16]", 5),
    ("red.release.gpu.global.or.b32 [%out+16], 8; ld.global.b64 %d0, [%out+16]", 10),
    ("atom.acquire.cta.shared.add.u64 %d1, [room+8], 1; ld.shared.b64 %d2, [room+8]; sub.s64 %d0, %d2, %d1", 1),
    ("fence.acq_rel.sys; fence.sc.gpu; membar.gl; fence.acq_rel.cta; fence.gpu; mov.u32 %r0, 1", 1),
    ("shfl.sync.idx.b32 %r0|%p5, %r3, 0, 31, -1", 3),
    ("vote.sync.ballot.b32 %r0, %p1, 1", 1),
    ("vote.sync.all.pred %p0, !%p1, 1", 0),
    ("match.any.sync.b64 %r0, %d3, 0xffffffff", 1),
    ("match.all.sync.b32 %r0|%p5, %r3, 1", 1),
    ("redux.sync.add.u32 %r0, %r3, 1", 3),
    ("elect.sync _|%p0, 1", 1),
    ("mov.u32 %r0, 9; elect.sync %r0|%p1, 1", 0),
    ("activemask.b32 %r0", 1),
    ("bar.warp.sync -1; bar.sync 0; barrier.sync 1; bar.red.popc.u32 %r0, 2, %p1", 1),
    ("nanosleep.u32 20; mov.u32 %r0, 1", 1),
    ("mov.u32 %r0, 0; $L: add.s32 %r0, %r0, 1; setp.ne.s32 %p5, %r0, 10; @%p5 bra.uni $L", 10),
    ("bra $over; mov.u32 %r3, 0; $over: mov.u32 %r0, %r3", 3),
    (
        "targets: .branchtargets $A, $B; brx.idx %r1, targets; $A: mov.u32 %r0, 100; bra $end; $B: mov.u32 %r0, 200; $end:",
        200,
    ),
    (
        "{ .reg .u32 t; mov.u32 t, 5; $L: mov.u32 %r0, t; } { .reg .u64 t; mov.u64 t, 6; bra $L; $L: cvt.u32.u64 %r0, t; }",
        6,
    ),
];

#[test]
fn each_form_has_the_result_by_hand() {
    let mut failed = Vec::new();
    for (form, expected) in FORMS {
        let last =
            ["%d0", "%r0", "%h0", "%p0"].into_iter().filter_map(|name| form.rfind(name).map(|at| (at, name))).max();
        let store = match last.expect("a result").1 {
            "%d0" => "st.global.u64 [%out], %d0;",
            "%r0" => "st.global.u32 [%out], %r0;",
            "%h0" => "st.global.u16 [%out], %h0;",
            _ => "selp.b64 %d9, 1, 0, %p0; st.global.u64 [%out], %d9;",
        };
        let mut before = String::from(".local .align 8 .b8 spot[16]; .shared .align 8 .b8 room[16];\n");
        before += "mov.pred %p1, 1; mov.pred %p2, 0; mov.u32 %r1, 1;\n";
        for n in 3..6 {
            before += &format!("mov.b16 %h{n}, {n}; mov.b32 %r{n}, {n}; mov.b64 %d{n}, {n};\n");
        }
        let arena = Arena::new(64);
        for word in 1..8 {
            arena.set(word, word as u64);
        }
        arena.set(1, 0x8899_aabb_ccdd_eeff);
        if form.contains("inc.u32") {
            arena.set(2, 2);
        }
        let end = if form.starts_with('{') || form.ends_with(':') { "" } else { ";" };
        let text = kernel(&before, &format!("{form}{end}\n{store}"));
        match run_text(&text, &arena, 1) {
            Ok(_) if arena.get(0) == *expected => {}
            Ok(_) => failed.push(format!("{form}: {:#x}, not {expected:#x}", arena.get(0))),
            Err(trap) => failed.push(format!("{form}: {trap}")),
        }
    }
    assert!(failed.is_empty(), "{} of {} forms:\n{}", failed.len(), FORMS.len(), failed.join("\n"));
}

#[test]
fn calls_pass_arguments_and_results_by_value() {
    let text = ".version 7.0\n.target sm_80\n.address_size 64\n\
        .func (.param .align 16 .b8 pair[16]) swap(.param .b64 a, .param .b32 b) {\n\
          .reg .b64 %d<4>; .reg .b32 %r<2>;\n\
          ld.param.u64 %d1, [a]; ld.param.u32 %r1, [b]; cvt.u64.u32 %d2, %r1;\n\
          st.param.v2.b64 [pair], {%d2, %d1}; ret; }\n\
        .func (.param .b64 sum) chain(.param .b64 n) {\n\
          .reg .b64 %d<9>; .reg .pred %p<2>; .local .align 8 .b64 own;\n\
          ld.param.u64 %d1, [n]; st.local.b64 [own], %d1; mov.b64 %d5, 0;\n\
          setp.eq.u64 %p1, %d1, 0; @%p1 bra $done;\n\
          sub.u64 %d2, %d1, 1;\n\
          { .param .b64 x; .param .b64 y; st.param.b64 [x], %d2; call.uni (y), chain, (x); ld.param.b64 %d3, [y]; }\n\
          ld.local.b64 %d4, [own]; add.u64 %d5, %d3, %d4;\n\
          $done: st.param.b64 [sum], %d5; ret; }\n\
        .visible .entry k(.param .u64 out) { .reg .b64 %d<9>;\n\
          ld.param.u64 %d1, [out];\n\
          { .param .b64 x; .param .b32 y; .param .align 16 .b8 z[16]; st.param.b64 [x], 11; st.param.b32 [y], 22;\n\
            call (z), swap, (x, y); ld.param.v2.b64 {%d2, %d3}, [z]; }\n\
          { .param .b64 x; .param .b64 y; st.param.b64 [x], 50; call.uni (y), chain, (x); ld.param.b64 %d4, [y]; }\n\
          st.global.v2.b64 [%d1], {%d2, %d3}; st.global.b64 [%d1+16], %d4; ret; }\n";
    let arena = Arena::new(8);
    run_text(text, &arena, 4).unwrap_or_else(|trap| panic!("{trap}"));
    assert_eq!([arena.get(0), arena.get(1), arena.get(2)], [22, 11, 1275]);
}

/// Two functions, a table of their addresses, and a kernel that calls one of them through its address in `%d2`.
fn indirect(call: &str) -> String {
    format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n\
         .func (.param .b32 r) twice(.param .b64 x); .func (.param .b32 r) deep(.param .b64 x); .func nothing();\n\
         .const .align 8 .u64 table[3] = {{twice, deep, nothing}};\n\
         .func (.param .b32 r) twice(.param .b64 x) {{ .reg .b64 %d<3>; .reg .b32 %r;\n\
           ld.param.b64 %d1, [x]; shl.b64 %d2, %d1, 1; cvt.u32.u64 %r, %d2; st.param.b32 [r], %r; ret; }}\n\
         .func (.param .b32 r) deep(.param .b64 x) {{ .reg .b64 %d<3>; .reg .b32 %r; .shared .b64 own; .local .b64 spot;\n\
           ld.param.b64 %d1, [x]; st.shared.b64 [own], %d1; st.local.b64 [spot], 100; ld.shared.b64 %d1, [own];\n\
           ld.local.b64 %d2, [spot]; add.s64 %d2, %d2, %d1; cvt.u32.u64 %r, %d2; st.param.b32 [r], %r; ret; }}\n\
         .func nothing() {{ ret; }}\n\
         .visible .entry k(.param .u64 out) {{ .reg .b64 %d<9>; .reg .b32 %r<3>; .reg .pred %p; .param .b64 x; .param .b32 y; .param .b64 z;\n\
           ld.param.b64 %d1, [out]; st.param.b64 [x], 21; mov.b32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 8;\n\
           mov.b64 %d4, table; add.s64 %d4, %d4, %d3; add.s64 %d3, %d3, %d1;\n{call}\n\
           ld.param.b32 %r2, [y]; st.global.b32 [%d3], %r2; ret; }}\n"
    )
}

fn run_with_table(text: &str, arena: &Arena, threads: u32) -> Result<(), String> {
    let program = crate::arena::linked(text);
    // The table comes after the results.
    let table = program.initial(0, &[arena.address() + 64]);
    for (word, bytes) in table.chunks_exact(8).enumerate() {
        arena.set(8 + word, u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
    }
    let loaded = program.clone().load(&[arena.address() + 64]);
    let launch = crate::arena::launch(arena, 1, threads, 1);
    let stop = std::sync::atomic::AtomicBool::new(false);
    soft_gpu_ptx::run(&loaded, program.kernel("k").expect("a kernel k"), &launch, arena, &stop)
        .map(|_| ())
        .map_err(|trap| trap.to_string())
}

const PROTOTYPE: &str = "p: .callprototype (.param .b32 _) _ (.param .b64 _);";

#[test]
fn indirect_calls_reach_the_functions_in_a_table() {
    let arena = Arena::new(16);
    let text = indirect(&format!("ld.const.b64 %d2, [%d4]; {PROTOTYPE} call (y), %d2, (x), p;"));
    run_with_table(&text, &arena, 2).unwrap_or_else(|trap| panic!("{trap}"));
    assert_eq!([arena.get(0), arena.get(1)], [42, 121]);
    let arena = Arena::new(16);
    let text = indirect(&format!("mov.b64 %d2, deep; {PROTOTYPE} call (y), %d2, (x), p;"));
    run_with_table(&text, &arena, 1).unwrap_or_else(|trap| panic!("{trap}"));
    assert_eq!(arena.get(0), 121);
}

#[test]
fn a_wrong_indirect_call_is_a_trap_with_its_cause() {
    let cases = [
        ("mov.b64 %d2, 64; call (y), %d2, (x), p;", "0x40, which is no function's address"),
        ("mov.b64 %d2, deep; add.s64 %d2, %d2, 1; call (y), %d2, (x), p;", "no function's address"),
        ("mov.b64 %d2, deep; add.s64 %d2, %d2, 32; call (y), %d2, (x), p;", "no function's address"),
        ("ld.const.b64 %d2, [%d4+16]; call (y), %d2, (x), p;", "nothing, whose parameters or results differ"),
        ("mov.b64 %d2, deep; ld.b64 %d2, [%d2];", "neither device memory"),
    ];
    for (call, cause) in cases {
        let trap = run_with_table(&indirect(&format!("{PROTOTYPE} {call}")), &Arena::new(16), 1);
        let trap = trap.expect_err(call);
        assert!(trap.contains(cause), "{call}: {trap}");
    }
}

#[test]
fn a_failed_assertion_says_what_and_where() {
    let arena = Arena::new(16);
    let words =
        |at: usize, text: &[u8]| arena.set(at, text.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)));
    words(1, b"x > 0");
    words(2, b"a.cu");
    words(3, b"f()");
    let text = ".version 7.0\n.target sm_80\n.address_size 64\n\
        .extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);\n\
        .visible .entry k(.param .u64 out) { .reg .b64 %d<4>; .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;\n\
        ld.param.b64 %d0, [out]; add.s64 %d1, %d0, 8; add.s64 %d2, %d0, 16; add.s64 %d3, %d0, 24;\n\
        st.param.b64 [a], %d1; st.param.b64 [b], %d2; st.param.b32 [c], 77; st.param.b64 [d], %d3; st.param.b64 [e], 1;\n\
        call.uni __assertfail, (a, b, c, d, e); ret; }\n";
    let trap = run_text(text, &arena, 1).expect_err("an assertion").to_string();
    assert!(trap.contains("the assertion `x > 0` failed in a.cu:77, f()"), "{trap}");
}

#[test]
fn libdevice_functions_have_the_results_by_hand() {
    let cases: &[(&str, u32, &[u64], u32, u64)] = &[
        ("umulhi", 32, &[0x8000_0000, 6], 32, 3),
        ("mulhi", 32, &[0x8000_0000, 6], 32, 0xffff_fffd),
        ("umul64hi", 64, &[1 << 63, 6], 64, 3),
        ("popc", 32, &[0xf0], 32, 4),
        ("popcll", 64, &[u64::MAX], 32, 64),
        ("clz", 32, &[1], 32, 31),
        ("brevll", 64, &[1], 64, 1 << 63),
        ("min", 32, &[0xffff_ffff, 1], 32, 0xffff_ffff),
        ("umin", 32, &[0xffff_ffff, 1], 32, 1),
        ("llmax", 64, &[u64::MAX, 1], 64, 1),
        ("ullmax", 64, &[u64::MAX, 1], 64, u64::MAX),
        ("ffs", 32, &[0x50], 32, 5),
        ("ffs", 32, &[0], 32, 0),
        ("ffsll", 64, &[1 << 40], 32, 41),
        ("byte_perm", 32, &[0x3322_1100, 0x7766_5544, 0x0246], 32, 0x0022_4466),
    ];
    for (name, bits, arguments, result, expected) in cases {
        let parameters: Vec<_> = (0..arguments.len()).map(|at| format!(".param .b{bits} a{at}")).collect();
        let names: Vec<_> = (0..arguments.len()).map(|at| format!("a{at}")).collect();
        let mut call = String::new();
        for (at, value) in arguments.iter().enumerate() {
            call += &format!(".param .b{bits} a{at}; st.param.b{bits} [a{at}], {value:#x};\n");
        }
        let text = format!(
            ".version 7.0\n.target sm_80\n.address_size 64\n.extern .func (.param .b{result} r) __nv_{name}({});\n\
             .visible .entry k(.param .u64 out) {{ .reg .b64 %d<2>; .reg .b{result} %r; ld.param.u64 %d1, [out];\n\
             {{ .param .b{result} r; {call} call (r), __nv_{name}, ({}); ld.param.b{result} %r, [r]; }}\n\
             st.global.b{result} [%d1], %r; ret; }}\n",
            parameters.join(", "),
            names.join(", ")
        );
        let arena = Arena::new(8);
        run_text(&text, &arena, 1).unwrap_or_else(|trap| panic!("{name}: {trap}"));
        assert_eq!(arena.get(0), *expected, "{name}");
    }
}
