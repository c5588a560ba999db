//! Arithmetic on register bits.

use crate::code::{Atomic, Class, Combine, Compare, Float, Format, Instruction, Op, low, signed};
use crate::small::{half, integral, recoded, unary};
use std::cmp::Ordering;
use std::ops::{Add, Div, Mul, Sub};

/// Computes the result of an operation that needs nothing but its operands.
#[inline(always)]
pub fn compute(i: &Instruction, get: impl Fn(u16) -> u64 + Copy) -> u64 {
    // An operation reads only the operands that it has. No other closure captures these by reference, because the
    // compiler would then write them to the stack for each instruction.
    let (a, b, c) = (move || get(i.a), move || get(i.b), move || get(i.c));
    let width = i.width;
    let s = |value| signed(value, width);
    let bits = u32::from(width);
    let value = match i.op {
        Op::Mov => a(),
        Op::Add => a().wrapping_add(b()),
        Op::Sub => a().wrapping_sub(b()),
        Op::MulLo => a().wrapping_mul(b()),
        Op::MadLo => a().wrapping_mul(b()).wrapping_add(c()),
        Op::MulHi { signed } => high(a(), b(), width, signed),
        Op::MadHi { signed } => high(a(), b(), width, signed).wrapping_add(c()),
        // The result is twice as wide.
        Op::MulWide { signed } => return low(wide(a(), b(), width, signed), width * 2),
        Op::MadWide { signed } => return low(wide(a(), b(), width, signed).wrapping_add(c()), width * 2),
        // PTX leaves division by zero undefined; GPUs return all ones, and the dividend as the remainder.
        Op::Div { .. } if b() == 0 => u64::MAX,
        Op::Rem { .. } if b() == 0 => a(),
        Op::Div { signed: false } => a() / b(),
        Op::Rem { signed: false } => a() % b(),
        Op::Div { signed: true } => s(a()).wrapping_div(s(b())) as u64,
        Op::Rem { signed: true } => s(a()).wrapping_rem(s(b())) as u64,
        Op::Min { signed: false } => a().min(b()),
        Op::Max { signed: false } => a().max(b()),
        Op::Min { signed: true } => s(a()).min(s(b())) as u64,
        Op::Max { signed: true } => s(a()).max(s(b())) as u64,
        Op::Abs => s(a()).wrapping_abs() as u64,
        Op::Neg => a().wrapping_neg(),
        Op::And => a() & b(),
        Op::Or => a() | b(),
        Op::Xor => a() ^ b(),
        Op::Not => !a(),
        Op::LogicalNot => u64::from(a() == 0),
        Op::Lop3 => {
            let (a, b, c) = (a(), b(), c());
            (0..8)
                .filter(|row| i.imm >> row & 1 == 1)
                .map(|row| pick(a, row >> 2) & pick(b, row >> 1) & pick(c, row))
                .fold(0, |all, term| all | term)
        }
        Op::Shl => {
            if b() >= u64::from(bits) {
                0
            } else {
                a() << b()
            }
        }
        Op::Shr { signed: false } => {
            if b() >= u64::from(bits) {
                0
            } else {
                a() >> b()
            }
        }
        Op::Shr { signed: true } => (s(a()) >> b().min(63)) as u64,
        Op::Funnel { left, clamp } => {
            let shift = if clamp { c().min(32) } else { c() & 31 };
            let both = b() << 32 | a();
            if left { (u128::from(both) << shift >> 32) as u64 } else { both >> shift }
        }
        Op::Popc => return u64::from(a().count_ones()),
        Op::Clz => return u64::from(a().leading_zeros() - (64 - bits)),
        Op::Brev => a().reverse_bits() >> (64 - bits),
        Op::Bfind { signed, shift } => {
            let value = if signed && s(a()) < 0 { low(!a(), width) } else { a() };
            return match value.checked_ilog2() {
                None => 0xffff_ffff,
                Some(found) => u64::from(if shift { bits - 1 - found } else { found }),
            };
        }
        Op::Bfe { signed } => extract(a(), b() & 0xff, c() & 0xff, width, signed),
        Op::Bfi => {
            let (at, length) = (c() & 0xff, get(i.x) & 0xff);
            let mask = if at >= u64::from(bits) { 0 } else { field(length) << at };
            b() & !mask | a().checked_shl(at as u32).unwrap_or(0) & mask
        }
        Op::Prmt => {
            let (bytes, selects) = ((b() << 32 | a()).to_le_bytes(), c());
            (0..4).fold(0, |all, at| {
                let select = selects >> (4 * at);
                let byte = bytes[(select & 7) as usize];
                let byte = if select & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
                all | u64::from(byte) << (8 * at)
            })
        }
        Op::Selp => {
            if c() != 0 {
                a()
            } else {
                b()
            }
        }
        Op::Set { compare, class } => return if compares(compare, class, width, a(), b()) { 0xffff_ffff } else { 0 },
        Op::Convert { from_signed, to_signed } => {
            let from = i.imm as u8;
            let value = if from_signed { signed(low(a(), from), from) as u64 } else { low(a(), from) };
            return if to_signed { low(signed(low(value, width), width) as u64, i.extra) } else { low(value, width) };
        }
        Op::FloatConvert => {
            return if width == 64 { widened(a() as u32) } else { u64::from(narrowed(a())) };
        }
        Op::FloatFromInteger { signed: from_signed } => {
            let from = i.imm as u8;
            let value = low(a(), from);
            return match (width, from_signed) {
                (64, true) => (signed(value, from) as f64).to_bits(),
                (64, false) => (value as f64).to_bits(),
                (_, true) => u64::from((signed(value, from) as f32).to_bits()),
                (_, false) => u64::from((value as f32).to_bits()),
            };
        }
        Op::FloatToIntegral(rounding) => {
            let format = if width == 64 { Format::F64 } else { Format::F32 };
            return format.encode(integral(format.decode(a()), rounding), false);
        }
        Op::FloatToInteger { signed: to_signed, rounding } => {
            let value = if i.imm == 64 { f64::from_bits(a()) } else { f64::from(f32::from_bits(a() as u32)) };
            let value = integral(value, rounding);
            if value.is_nan() {
                let top = if i.imm == 64 || width == 64 { 1 << (bits - 1) } else { 0 };
                return if to_signed { low(signed(top, width) as u64, i.extra) } else { top };
            }
            return if to_signed {
                let least = i64::MIN >> (64 - bits);
                low((value as i64).clamp(least, !least) as u64, i.extra)
            } else {
                (value as u64).min(u64::MAX >> (64 - bits))
            };
        }
        Op::Float(op) if width == 32 => {
            let f = |bits: u64| f32::from_bits(bits as u32);
            let value = float(op, f(a()), f(b()), f(c()), f32::mul_add, f32::sqrt, f32::total_cmp);
            let sign = match op {
                Float::Neg => return a() ^ 1 << 31,
                Float::Abs => return a() & !(1 << 31),
                _ => value,
            };
            return u64::from(if sign.is_nan() { 0x7fff_ffff } else { sign.to_bits() });
        }
        Op::Float(op) => {
            let f = f64::from_bits;
            match op {
                Float::Neg => return a() ^ 1 << 63,
                Float::Abs => return a() & !(1 << 63),
                _ => {}
            }
            let value = float(op, f(a()), f(b()), f(c()), f64::mul_add, f64::sqrt, f64::total_cmp);
            return if value.is_nan() { nan(&[a(), b(), c()][..operands(op)]) } else { value.to_bits() };
        }
        Op::Unary { op, flush } => {
            let value = unary(op, flush, f32::from_bits(a() as u32));
            return u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() });
        }
        Op::Half { op, format } => {
            let operands = [a(), b(), c()];
            let lane = |shift: u32| half(op, format, operands.map(|bits| bits >> shift & 0xffff)) << shift;
            return if width == 32 { lane(16) | lane(0) } else { lane(0) };
        }
        Op::Recode { from, to, saturate, pair } => {
            let one = |bits: u64| recoded(low(bits, from.bits()), from, to, saturate);
            return match (pair, from) {
                (false, _) => one(a()),
                (true, Format::F32) => one(a()) << to.bits() | one(b()),
                (true, _) => one(a() >> from.bits()) << to.bits() | one(a()),
            };
        }
        Op::Pack => return b() << width | a(),
        _ => 0,
    };
    low(value, width)
}

/// Converts a float of 32 bits to one of 64. A NaN keeps its sign and payload, and becomes quiet.
fn widened(bits: u32) -> u64 {
    let value = f32::from_bits(bits);
    if !value.is_nan() {
        return f64::from(value).to_bits();
    }
    u64::from(bits >> 31) << 63 | 0x7ff8 << 48 | u64::from(bits & 0x7f_ffff) << 29
}

/// Converts a float of 64 bits to the nearest one of 32. A NaN keeps its sign and the upper part of its payload, and
/// becomes quiet.
fn narrowed(bits: u64) -> u32 {
    let value = f64::from_bits(bits);
    if !value.is_nan() {
        return (value as f32).to_bits();
    }
    (bits >> 63 << 31) as u32 | 0x7fc0_0000 | (bits >> 29) as u32 & 0x7f_ffff
}

/// Returns `value`, or its complement if the lowest bit of `row` is 0.
fn pick(value: u64, row: i32) -> u64 {
    if row & 1 == 1 { value } else { !value }
}

/// Returns a mask of the lowest `length` bits.
fn field(length: u64) -> u64 {
    if length >= 64 { u64::MAX } else { (1 << length) - 1 }
}

fn wide(a: u64, b: u64, width: u8, sign: bool) -> u64 {
    if sign { signed(a, width).wrapping_mul(signed(b, width)) as u64 } else { a.wrapping_mul(b) }
}

fn high(a: u64, b: u64, width: u8, sign: bool) -> u64 {
    if sign {
        ((i128::from(signed(a, width)) * i128::from(signed(b, width))) >> width) as u64
    } else {
        ((u128::from(a) * u128::from(b)) >> width) as u64
    }
}

fn extract(a: u64, at: u64, length: u64, width: u8, sign: bool) -> u64 {
    let most = u64::from(width) - 1;
    let value = if at > most { 0 } else { a >> at & field(length) };
    let filled = (most + 1).saturating_sub(at).min(length);
    if !sign || length == 0 || filled > most {
        return value;
    }
    let top = a >> (at + length - 1).min(most) & 1;
    if top == 1 { value | !field(filled) } else { value }
}

fn operands(op: Float) -> usize {
    match op {
        Float::Sqrt | Float::Neg | Float::Abs => 1,
        Float::Fma => 3,
        _ => 2,
    }
}

/// Returns the NaN that a 64-bit operation results in: its first NaN operand, made quiet, or the canonical one. Results
/// of 32 bits are always canonical.
fn nan(operands: &[u64]) -> u64 {
    let first = operands.iter().find(|bits| f64::from_bits(**bits).is_nan());
    first.map_or(0xfff8_0000_0000_0000, |bits| bits | 1 << 51)
}

/// Returns the operand that is `wanted` relative to the other. A number wins over NaN, and -0 is less than +0.
fn extreme<F: PartialOrd>(a: F, b: F, total: fn(&F, &F) -> Ordering, wanted: Ordering) -> F {
    let is_nan = |value: &F| value.partial_cmp(value).is_none();
    if is_nan(&b) || !is_nan(&a) && total(&a, &b) == wanted { a } else { b }
}

fn float<F>(op: Float, a: F, b: F, c: F, fma: fn(F, F, F) -> F, sqrt: fn(F) -> F, total: fn(&F, &F) -> Ordering) -> F
where
    F: Add<Output = F> + Sub<Output = F> + Mul<Output = F> + Div<Output = F> + PartialOrd,
{
    match op {
        Float::Add => a + b,
        Float::Sub => a - b,
        Float::Mul => a * b,
        Float::Div => a / b,
        Float::Fma => fma(a, b, c),
        Float::Min => extreme(a, b, total, Ordering::Less),
        Float::Max => extreme(a, b, total, Ordering::Greater),
        Float::Sqrt => sqrt(a),
        Float::Neg | Float::Abs => a,
    }
}

/// Compares two values of `width` bits.
#[inline(always)]
pub fn compares(compare: Compare, class: Class, width: u8, a: u64, b: u64) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = match class {
        Class::Unsigned => Some(a.cmp(&b)),
        Class::Signed => Some(signed(a, width).cmp(&signed(b, width))),
        Class::Float if width == 32 => f32::from_bits(a as u32).partial_cmp(&f32::from_bits(b as u32)),
        Class::Float => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
    };
    match compare {
        Compare::Eq => order == Some(Equal),
        Compare::Ne => matches!(order, Some(Less | Greater)),
        Compare::Lt => order == Some(Less),
        Compare::Le => matches!(order, Some(Less | Equal)),
        Compare::Gt => order == Some(Greater),
        Compare::Ge => matches!(order, Some(Greater | Equal)),
        Compare::Equ => matches!(order, None | Some(Equal)),
        Compare::Neu => order != Some(Equal),
        Compare::Ltu => matches!(order, None | Some(Less)),
        Compare::Leu => order != Some(Greater),
        Compare::Gtu => matches!(order, None | Some(Greater)),
        Compare::Geu => order != Some(Less),
        Compare::Num => order.is_some(),
        Compare::Nan => order.is_none(),
    }
}

/// Combines a comparison with a predicate.
#[inline(always)]
pub fn combined(combine: Combine, found: bool, other: bool) -> bool {
    match combine {
        Combine::None => found,
        Combine::And => found && other,
        Combine::Or => found || other,
        Combine::Xor => found != other,
    }
}

/// Returns the value that an atomic replaces `old` with.
pub fn changed(op: Atomic, old: u64, b: u64, c: u64, width: u8, sign: bool) -> u64 {
    let less = |one: u64, other: u64| if sign { signed(one, width) < signed(other, width) } else { one < other };
    match op {
        Atomic::Add => old.wrapping_add(b),
        Atomic::Exchange => b,
        Atomic::CompareExchange => {
            if old == b {
                c
            } else {
                old
            }
        }
        Atomic::Min => {
            if less(b, old) {
                b
            } else {
                old
            }
        }
        Atomic::Max => {
            if less(old, b) {
                b
            } else {
                old
            }
        }
        Atomic::And => old & b,
        Atomic::Or => old | b,
        Atomic::Xor => old ^ b,
        Atomic::Increment => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        Atomic::Decrement => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}
