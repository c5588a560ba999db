//! Seeded random programs against an oracle: a plain evaluator, which works bit by bit where PTX defines the result
//! that way.

use crate::arena::{Arena, launch, linked, start};
use ferrogin_test_support::{Random, repetitions};
use std::fmt::Write;

/// Threads per program, in one warp.
const THREADS: usize = 8;
/// Registers of each kind, and words of memory per thread.
const N: usize = 6;

/// A thread's state in the oracle. `regs` has the 16-bit registers, then the 32-bit ones, then the 64-bit ones.
#[derive(Clone, Default)]
struct State {
    regs: [[u64; N]; 3],
    preds: [bool; N],
    memory: [u64; N],
}

/// A program's text so far, and the threads' state after it.
struct Program {
    text: String,
    threads: Vec<State>,
    /// The threads that execute the next instruction.
    active: Vec<bool>,
    labels: usize,
    random: Random,
}

fn bits(width: usize) -> u32 {
    16 << width
}

fn letter(width: usize) -> char {
    ['h', 'r', 'd'][width]
}

fn cut(value: u128, bits: u32) -> u64 {
    (value & ((1u128 << bits) - 1)) as u64
}

/// Returns the number that `bits` bits represent.
fn number(value: u64, bits: u32, signed: bool) -> i128 {
    let value = i128::from(value);
    if signed && value >> (bits - 1) & 1 == 1 { value - (1i128 << bits) } else { value }
}

fn back(value: i128, bits: u32) -> u64 {
    cut(value as u128, bits)
}

fn bit(value: u64, at: u32) -> bool {
    at < 64 && value >> at & 1 == 1
}

/// Returns the value whose bit `at` is `of(at)`.
fn from_bits(bits: u32, of: impl Fn(u32) -> bool) -> u64 {
    (0..bits).map(|at| u64::from(of(at)) << at).sum()
}

/// A format of 16 or 8 bits: the bits of its mantissa, the exponent of 1, its largest number and its NaN.
#[derive(Clone, Copy)]
struct Small {
    name: &'static str,
    mantissa: u32,
    one: i32,
    most: u64,
    nan: u64,
}

const F16: Small = Small { name: "f16", mantissa: 10, one: 15, most: 0x7bff, nan: 0x7fff };
const BF16: Small = Small { name: "bf16", mantissa: 7, one: 127, most: 0x7f7f, nan: 0x7fff };
const E4M3: Small = Small { name: "e4m3", mantissa: 3, one: 7, most: 0x7e, nan: 0x7f };
const E5M2: Small = Small { name: "e5m2", mantissa: 2, one: 15, most: 0x7b, nan: 0x7f };

impl Small {
    /// Returns the size of a finite number as an integer, and the power of two that it is multiplied with.
    fn parts(self, magnitude: u64) -> (u64, i32) {
        let (exponent, fraction) = ((magnitude >> self.mantissa) as i32, magnitude & ((1 << self.mantissa) - 1));
        let whole = if exponent == 0 { 0 } else { 1 << self.mantissa };
        (whole + fraction, exponent.max(1) - self.one - self.mantissa as i32)
    }

    fn size(self, magnitude: u64) -> f64 {
        let (units, power) = self.parts(magnitude);
        units as f64 * f64::from(power).exp2()
    }

    /// Returns the number that 16 bits represent.
    fn number(self, bits: u64) -> f64 {
        let magnitude = bits & 0x7fff;
        let size = match magnitude {
            _ if magnitude <= self.most => self.size(magnitude),
            _ if magnitude == self.most + 1 => f64::INFINITY,
            _ => f64::NAN,
        };
        if bits >> 15 & 1 == 1 { -size } else { size }
    }

    /// Returns the magnitude whose number is nearest, by a search among all. `beyond` compares a magnitude's number
    /// with the wanted one; `half` compares the wanted one with the middle between a magnitude and the next.
    fn nearest(self, beyond: impl Fn(u64) -> bool, half: impl Fn(u64) -> std::cmp::Ordering) -> u64 {
        let all: Vec<u64> = (0..=self.most).collect();
        let below = all.partition_point(|&magnitude| !beyond(magnitude)) as u64 - 1;
        match half(below) {
            std::cmp::Ordering::Less => below,
            std::cmp::Ordering::Equal => below + (below & 1),
            std::cmp::Ordering::Greater => below + 1,
        }
    }

    /// Converts a float of 32 bits.
    fn round_f32(self, value: f32, saturate: bool) -> u64 {
        let sign = u64::from(value.is_sign_negative()) << if self.nan == 0x7f { 7 } else { 15 };
        let value = f64::from(value.abs());
        if value.is_nan() {
            return self.nan;
        }
        if value.is_infinite() {
            return sign | if saturate { self.most } else { self.most + 1 };
        }
        let middle = |at: u64| (self.size(at) + self.size(at + 1)) / 2.0;
        let found = self.nearest(|at| self.size(at) > value, |at| value.total_cmp(&middle(at)));
        sign | if saturate { found.min(self.most) } else { found }
    }

    /// Returns the number nearest to `exact` * 2^-64.
    fn round_exact(self, exact: i128) -> u64 {
        let sign = u64::from(exact < 0) << 15;
        let wanted = exact.unsigned_abs();
        // Exponents far from 1 aren't needed: they would not fit.
        let size = |at: u64| {
            let (units, power) = self.parts(at);
            match power + 65 {
                shift @ ..=0 => u128::from(units) >> (-shift).min(100),
                shift => u128::from(units).checked_shl(shift.min(110) as u32).unwrap_or(u128::MAX),
            }
        };
        sign | self.nearest(|at| size(at) > 2 * wanted, |at| (4 * wanted).cmp(&(size(at) + size(at + 1))))
    }
}

/// An operand: a register, or a constant.
#[derive(Clone, Copy)]
enum Source {
    Register(usize, usize),
    Constant(u64),
}

impl Source {
    fn of(self, state: &State) -> u64 {
        match self {
            Self::Register(width, at) => state.regs[width][at],
            Self::Constant(value) => value,
        }
    }

    fn text(self) -> String {
        match self {
            Self::Register(width, at) => format!("%{}{at}", letter(width)),
            Self::Constant(value) => format!("{value:#x}"),
        }
    }
}

impl Program {
    fn source(&mut self, width: usize) -> Source {
        let interesting =
            [0, 1, 2, 31, 32, 63, 64, 0x7fff, 0x8000, 0x7fff_ffff, 0x8000_0000, 1 << 63, u64::MAX, u64::MAX - 1];
        match self.random.below(4) {
            0 => Source::Constant(cut(u128::from(self.random.of(&interesting)), bits(width))),
            1 if self.random.one_in(2) => Source::Constant(cut(u128::from(self.random.next_u64()), bits(width))),
            _ => Source::Register(width, self.random.index(N)),
        }
    }

    /// Returns an amount that is usually small.
    fn amount(&mut self) -> Source {
        if self.random.one_in(3) { self.source(1) } else { Source::Constant(u64::from(self.random.below(72))) }
    }

    /// Writes an instruction, and applies it to the threads that execute it.
    fn step(&mut self, text: &str, apply: impl Fn(&mut State)) {
        let guard = self.random.one_in(5).then(|| (self.random.index(N), self.random.one_in(2)));
        if let Some((pred, negate)) = guard {
            let _ = write!(self.text, "@{}%p{pred} ", if negate { "!" } else { "" });
        }
        let _ = writeln!(self.text, "{text};");
        for (thread, _) in self.threads.iter_mut().zip(&self.active).filter(|(_, active)| **active) {
            if guard.is_none_or(|(pred, negate)| thread.preds[pred] != negate) {
                apply(thread);
            }
        }
    }

    fn arithmetic(&mut self) {
        let width = self.random.index(3);
        let wide = 1 + self.random.index(2);
        let (n, signed) = (bits(width), self.random.one_in(2));
        let s = if signed { 's' } else { 'u' };
        let (d, a, b, c) = (self.random.index(N), self.source(width), self.source(width), self.source(width));
        let (l, ta, tb, tc) = (letter(width), a.text(), b.text(), c.text());
        let set = |state: &mut State, value: i128| state.regs[width][d] = back(value, n);
        let num = move |source: Source, state: &State| number(source.of(state), n, signed);
        match self.random.below(19) {
            0 => self.step(&format!("add.{s}{n} %{l}{d}, {ta}, {tb}"), |t| set(t, num(a, t) + num(b, t))),
            1 => self.step(&format!("sub.{s}{n} %{l}{d}, {ta}, {tb}"), |t| set(t, num(a, t) - num(b, t))),
            2 => {
                self.step(&format!("mul.lo.{s}{n} %{l}{d}, {ta}, {tb}"), |t| set(t, num(a, t).wrapping_mul(num(b, t))))
            }
            3 => self.step(&format!("mul.hi.{s}{n} %{l}{d}, {ta}, {tb}"), |t| {
                // The product of two unsigned 64-bit words needs all 128 bits.
                let high = if signed {
                    (num(a, t) * num(b, t)) >> n
                } else {
                    ((num(a, t) as u128 * num(b, t) as u128) >> n) as i128
                };
                set(t, high)
            }),
            4 => self.step(&format!("mad.lo.{s}{n} %{l}{d}, {ta}, {tb}, {tc}"), |t| {
                set(t, num(a, t).wrapping_mul(num(b, t)).wrapping_add(num(c, t)))
            }),
            5 if width < 2 => {
                let (up, e) = (letter(width + 1), self.source(width + 1));
                let mad = self.random.one_in(2);
                let text = if mad {
                    format!("mad.wide.{s}{n} %{up}{d}, {ta}, {tb}, {}", e.text())
                } else {
                    format!("mul.wide.{s}{n} %{up}{d}, {ta}, {tb}")
                };
                self.step(&text, |t| {
                    let more = if mad { i128::from(e.of(t)) } else { 0 };
                    t.regs[width + 1][d] = back(num(a, t) * num(b, t) + more, 2 * n);
                });
            }
            6 | 7 => {
                let Source::Constant(divisor @ 1..) = b else { return };
                // The smallest number divided by -1 doesn't fit; hardware wraps around, and so does `back`.
                let by = number(divisor, n, signed);
                self.step(&format!("div.{s}{n} %{l}{d}, {ta}, {tb}"), |t| set(t, num(a, t) / by));
                self.step(&format!("rem.{s}{n} %{l}{d}, {tc}, {tb}"), |t| set(t, num(c, t) % by));
            }
            8 => self.step(&format!("min.{s}{n} %{l}{d}, {ta}, {tb}"), |t| set(t, num(a, t).min(num(b, t)))),
            9 => self.step(&format!("max.{s}{n} %{l}{d}, {ta}, {tb}"), |t| set(t, num(a, t).max(num(b, t)))),
            10 => self.step(&format!("abs.s{n} %{l}{d}, {ta}"), |t| set(t, number(a.of(t), n, true).abs())),
            11 => self.step(&format!("neg.s{n} %{l}{d}, {ta}"), |t| set(t, -num(a, t))),
            12 => self.step(&format!("and.b{n} %{l}{d}, {ta}, {tb}"), |t| {
                t.regs[width][d] = from_bits(n, |at| bit(a.of(t), at) && bit(b.of(t), at))
            }),
            13 => self.step(&format!("or.b{n} %{l}{d}, {ta}, {tb}"), |t| {
                t.regs[width][d] = from_bits(n, |at| bit(a.of(t), at) || bit(b.of(t), at))
            }),
            14 => self.step(&format!("xor.b{n} %{l}{d}, {ta}, {tb}"), |t| {
                t.regs[width][d] = from_bits(n, |at| bit(a.of(t), at) != bit(b.of(t), at))
            }),
            15 => self
                .step(&format!("not.b{n} %{l}{d}, {ta}"), |t| t.regs[width][d] = from_bits(n, |at| !bit(a.of(t), at))),
            16 => {
                let by = self.amount();
                self.step(&format!("shl.b{n} %{l}{d}, {ta}, {}", by.text()), |t| {
                    let by = by.of(t).min(64) as u32;
                    t.regs[width][d] = from_bits(n, |at| at >= by && bit(a.of(t), at - by));
                });
            }
            17 => {
                let by = self.amount();
                self.step(&format!("shr.{s}{n} %{l}{d}, {ta}, {}", by.text()), |t| {
                    let by = by.of(t).min(64) as u32;
                    let sign = signed && bit(a.of(t), n - 1);
                    t.regs[width][d] = from_bits(n, |at| if at + by < n { bit(a.of(t), at + by) } else { sign });
                });
            }
            _ => {
                // Two words with a carry.
                let (a, b, c, e) = (self.source(wide), self.source(wide), self.source(wide), self.source(wide));
                let (n, l, high) = (bits(wide), letter(wide), (d + 1) % N);
                let sub = self.random.one_in(2);
                let name = if sub { "sub" } else { "add" };
                let (low, carry) = ((a, c), (b, e));
                let before = self.random.index(N);
                // No guard: the two instructions share the carry.
                let _ = writeln!(
                    self.text,
                    "{name}.cc.u{n} %{l}{before}, {}, {};\n{name}c.u{n} %{l}{high}, {}, {};",
                    low.0.text(),
                    low.1.text(),
                    carry.0.text(),
                    carry.1.text()
                );
                for (t, _) in self.threads.iter_mut().zip(&self.active).filter(|(_, active)| **active) {
                    let value = |source: Source, t: &State| i128::from(source.of(t));
                    let first = if sub { value(low.0, t) - value(low.1, t) } else { value(low.0, t) + value(low.1, t) };
                    t.regs[wide][before] = back(first, n);
                    let over = first >> n;
                    let second =
                        if sub { value(carry.0, t) - value(carry.1, t) } else { value(carry.0, t) + value(carry.1, t) };
                    t.regs[wide][high] = back(second + over, n);
                }
            }
        }
    }

    fn bit_field(&mut self) {
        let width = 1 + self.random.index(2);
        let (n, l, signed) = (bits(width), letter(width), self.random.one_in(2));
        let s = if signed { 's' } else { 'u' };
        let (d, a, b) = (self.random.index(N), self.source(width), self.source(width));
        let (at, length) = (self.amount(), self.amount());
        let (ta, tb, t_at, t_length) = (a.text(), b.text(), at.text(), length.text());
        let (x, y, z) = (self.source(1), self.source(1), self.amount());
        match self.random.below(10) {
            0 | 1 => self.step(&format!("bfe.{s}{n} %{l}{d}, {ta}, {t_at}, {t_length}"), |t| {
                let (a, at, length) = (a.of(t), at.of(t) as u32 & 255, length.of(t) as u32 & 255);
                let sign = signed && length > 0 && bit(a, (at + length - 1).min(n - 1));
                t.regs[width][d] = from_bits(n, |i| if i < length && at + i < n { bit(a, at + i) } else { sign });
            }),
            2 | 3 => self.step(&format!("bfi.b{n} %{l}{d}, {ta}, {tb}, {t_at}, {t_length}"), |t| {
                let (at, length) = (at.of(t) as u32 & 255, length.of(t) as u32 & 255);
                t.regs[width][d] =
                    from_bits(n, |i| if i >= at && i - at < length { bit(a.of(t), i - at) } else { bit(b.of(t), i) });
            }),
            4 => self.step(&format!("brev.b{n} %{l}{d}, {ta}"), |t| {
                t.regs[width][d] = from_bits(n, |i| bit(a.of(t), n - 1 - i))
            }),
            5 => self.step(&format!("popc.b{n} %r{d}, {ta}"), |t| {
                t.regs[1][d] = (0..n).filter(|&i| bit(a.of(t), i)).count() as u64
            }),
            6 => self.step(&format!("clz.b{n} %r{d}, {ta}"), |t| {
                t.regs[1][d] = (0..n).rev().take_while(|&i| !bit(a.of(t), i)).count() as u64;
            }),
            7 => {
                let shift = self.random.one_in(2);
                let name = if shift { "bfind.shiftamt" } else { "bfind" };
                self.step(&format!("{name}.{s}{n} %r{d}, {ta}"), |t| {
                    let sign = signed && bit(a.of(t), n - 1);
                    let found = (0..n).rev().find(|&i| bit(a.of(t), i) != sign);
                    t.regs[1][d] = found.map_or(0xffff_ffff, |i| u64::from(if shift { n - 1 - i } else { i }));
                });
            }
            8 => {
                let (left, clamp) = (self.random.one_in(2), self.random.one_in(2));
                let name = format!("shf.{}.{}.b32", if left { 'l' } else { 'r' }, if clamp { "clamp" } else { "wrap" });
                self.step(&format!("{name} %r{d}, {}, {}, {}", x.text(), y.text(), z.text()), |t| {
                    let by = if clamp { z.of(t).min(32) } else { z.of(t) % 32 } as u32;
                    let both = y.of(t) << 32 | x.of(t);
                    t.regs[1][d] = from_bits(32, |i| bit(both, if left { i + 32 - by } else { i + by }));
                });
            }
            _ => self.step(&format!("prmt.b32 %r{d}, {}, {}, {}", x.text(), y.text(), z.text()), |t| {
                let both = y.of(t) << 32 | x.of(t);
                t.regs[1][d] = from_bits(32, |i| {
                    let select = z.of(t) >> (i / 8 * 4) & 15;
                    let byte = select as u32 % 8 * 8;
                    bit(both, byte + if select >= 8 { 7 } else { i % 8 })
                });
            }),
        }
    }

    fn predicate(&mut self) {
        let width = self.random.index(3);
        let (n, signed) = (bits(width), self.random.one_in(2));
        let s = if signed { 's' } else { 'u' };
        let (d, a, b) = (self.random.index(N), self.source(width), self.source(width));
        let (p, q) = (self.random.index(N), self.random.index(N));
        let negate = self.random.one_in(2);
        let bang = if negate { "!" } else { "" };
        let (ta, tb) = (a.text(), b.text());
        match self.random.below(4) {
            0 | 1 => {
                let compare = self.random.of(&["eq", "ne", "lt", "le", "gt", "ge"]);
                let combine = self.random.of(&["", "and", "or", "xor"]);
                let other = (d + 1) % N;
                let text = match combine {
                    "" => format!("setp.{compare}.{s}{n} %p{d}|%p{other}, {ta}, {tb}"),
                    _ => format!("setp.{compare}.{combine}.{s}{n} %p{d}|%p{other}, {ta}, {tb}, {bang}%p{p}"),
                };
                self.step(&text, |t| {
                    let (a, b) = (number(a.of(t), n, signed), number(b.of(t), n, signed));
                    let found = match compare {
                        "eq" => a == b,
                        "ne" => a != b,
                        "lt" => a < b,
                        "le" => a <= b,
                        "gt" => a > b,
                        _ => a >= b,
                    };
                    let with = t.preds[p] != negate;
                    let join = |found: bool| match combine {
                        "" => found,
                        "and" => found & with,
                        "or" => found | with,
                        _ => found ^ with,
                    };
                    (t.preds[d], t.preds[other]) = (join(found), join(!found));
                });
            }
            2 => self.step(&format!("selp.b{n} %{}{d}, {ta}, {tb}, %p{p}", letter(width)), |t| {
                t.regs[width][d] = if t.preds[p] { a.of(t) } else { b.of(t) };
            }),
            _ => {
                let op = self.random.of(&["and", "or", "xor"]);
                self.step(&format!("{op}.pred %p{d}, %p{p}, %p{q}"), |t| {
                    let (a, b) = (t.preds[p], t.preds[q]);
                    t.preds[d] = match op {
                        "and" => a & b,
                        "or" => a | b,
                        _ => a ^ b,
                    };
                });
            }
        }
    }

    /// Writes arithmetic on values of 16 bits, or a conversion from or to a format of 16 or 8 bits.
    fn small(&mut self) {
        let (d, a, b, c) = (self.random.index(N), self.random.index(N), self.random.index(N), self.random.index(N));
        let half = if self.random.one_in(2) { F16 } else { BF16 };
        let name = half.name;
        let quarter = if self.random.one_in(2) { E4M3 } else { E5M2 };
        let float = |t: &State, at: usize| f32::from_bits(t.regs[1][at] as u32);
        match self.random.below(7) {
            0 => self.step(&format!("cvt.rn.{name}.f32 %h{d}, %r{a}"), |t| {
                t.regs[0][d] = half.round_f32(float(t, a), false)
            }),
            1 => self.step(&format!("cvt.rn.{name}x2.f32 %r{d}, %r{a}, %r{b}"), |t| {
                t.regs[1][d] = half.round_f32(float(t, a), false) << 16 | half.round_f32(float(t, b), false)
            }),
            2 => self.step(&format!("cvt.rn.satfinite.{}x2.f32 %h{d}, %r{a}, %r{b}", quarter.name), |t| {
                t.regs[0][d] = quarter.round_f32(float(t, a), true) << 8 | quarter.round_f32(float(t, b), true)
            }),
            3 => self.step(&format!("cvt.f32.{name} %r{d}, %h{a}"), |t| {
                let (bits, value) = (t.regs[0][a], half.number(t.regs[0][a]));
                t.regs[1][d] = match value.is_nan() {
                    true if half.one == 15 => 0x7fff_ffff,
                    true => bits << 16,
                    false => u64::from((value as f32).to_bits()),
                };
            }),
            4 => {
                let op = self.random.of(&["min", "max"]);
                self.step(&format!("{op}.{name}x2 %r{d}, %r{a}, %r{b}"), |t| {
                    let lane = |shift: usize| {
                        let [one, other] = [a, b].map(|at| t.regs[1][at] >> shift & 0xffff);
                        // Without NaN, the order of the numbers is that of their bits.
                        let rank = |bits: u64| if bits >> 15 == 1 { -(bits as i64 & 0x7fff) - 1 } else { bits as i64 };
                        let is_nan = |bits: u64| half.number(bits).is_nan();
                        match (is_nan(one), is_nan(other)) {
                            (true, true) => half.nan,
                            (true, false) => other,
                            (false, true) => one,
                            _ if (rank(one) < rank(other)) == (op == "min") => one,
                            _ => other,
                        }
                    };
                    t.regs[1][d] = lane(16) << 16 | lane(0);
                });
            }
            _ => {
                // Numbers of bf16 come near 1, so that exact results fit 128 bits.
                let near =
                    |bits: u64| if name == "f16" { bits } else { bits & 0x807f | (0x3600 + (bits >> 3 & 0x0f80)) };
                let [x, y, z] = [a, b, c].map(|at| near(self.random.next_u64() >> at & 0xffff));
                let op = self.random.of(&["add", "sub", "mul", "fma.rn"]);
                let third = if op == "fma.rn" { format!(", {z:#x}") } else { String::new() };
                let [p, q, r] = [x, y, z].map(|bits| half.number(bits));
                let value = match op {
                    "add" => p + q,
                    "sub" => p - q,
                    "mul" => p * q,
                    _ => p.mul_add(q, r),
                };
                let exact = |bits: u64, power: i32| {
                    let (units, own) = half.parts(bits & 0x7fff);
                    let size = i128::from(units) << (own + power);
                    if bits >> 15 == 1 { -size } else { size }
                };
                let finite = [p, q, r].iter().all(|number| number.is_finite());
                let result = if !finite || value == 0.0 {
                    let sign = u64::from(value.is_sign_negative()) << 15;
                    match value.is_nan() {
                        true => half.nan,
                        false if value == 0.0 => sign,
                        false if value.is_infinite() => sign | (half.most + 1),
                        false => half.round_f32(value as f32, false),
                    }
                } else {
                    half.round_exact(match op {
                        "add" => exact(x, 64) + exact(y, 64),
                        "sub" => exact(x, 64) - exact(y, 64),
                        "mul" => exact(x, 32) * exact(y, 32),
                        _ => exact(x, 32) * exact(y, 32) + exact(z, 64),
                    })
                };
                self.step(&format!("{op}.{name} %h{d}, {x:#x}, {y:#x}{third}"), |t| t.regs[0][d] = result);
            }
        }
    }

    /// Writes bulk copies of a thread's words to shared memory and back.
    fn bulk(&mut self) {
        let units = 1 + self.random.index(N / 2);
        let (from, to) = (2 * self.random.index(N / 2 - units + 1), 2 * self.random.index(N / 2 - units + 1));
        let (d, e, read, write) =
            (self.random.index(N), self.random.index(N), self.random.index(2 * units), self.random.index(2 * units));
        let (bytes, label) = (16 * units, self.labels);
        self.labels += 1;
        let mut lines = [
            format!("mbarrier.arrive.expect_tx.shared::cta.b64 %own2, [%sh+48], {bytes};"),
            format!(
                "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%sh], [%own+{}], {bytes}, [%sh+48];",
                8 * from
            ),
        ];
        if self.random.one_in(2) {
            lines.reverse();
        }
        let wait = self
            .random
            .of(&["try_wait.parity.shared::cta.b64 %q, [%sh+48], 0", "test_wait.shared.b64 %q, [%sh+48], %own2"]);
        let _ = writeln!(
            self.text,
            "mbarrier.init.shared::cta.b64 [%sh+48], 1; fence.proxy.async;\n{}\n\
             $L{label}: mbarrier.{wait}; @!%q bra $L{label};\nmbarrier.inval.shared::cta.b64 [%sh+48];\n\
             ld.shared.b64 %d{d}, [%sh+{}]; st.shared.b64 [%sh+{}], %d{e}; fence.proxy.async.shared::cta;\n\
             cp.async.bulk.global.shared::cta.bulk_group [%own+{}], [%sh], {bytes}; cp.async.bulk.commit_group;\n\
             cp.async.bulk.wait_group 0;",
            lines.join("\n"),
            8 * read,
            8 * write,
            8 * to
        );
        for (t, _) in self.threads.iter_mut().zip(&self.active).filter(|(_, active)| **active) {
            let mut words = t.memory[from..from + 2 * units].to_vec();
            t.regs[2][d] = words[read];
            words[write] = t.regs[2][e];
            t.memory[to..to + 2 * units].copy_from_slice(&words);
        }
    }

    fn convert(&mut self) {
        let (from, to) = (self.random.index(3), self.random.index(3));
        let (from_signed, to_signed) = (self.random.one_in(2), self.random.one_in(2));
        // 8-bit values are parts of registers.
        let from_bits = if self.random.one_in(4) { 8 } else { bits(from) };
        let to_bits = if self.random.one_in(4) { 8 } else { bits(to) };
        let name = |signed: bool, bits: u32| format!("{}{bits}", if signed { 's' } else { 'u' });
        let (d, a) = (self.random.index(N), self.random.index(N));
        if from == 2 && to == 1 && self.random.one_in(2) {
            let half = self.random.index(2);
            let pair = if half == 0 { format!("{{%r{d}, _}}") } else { format!("{{_, %r{d}}}") };
            return self.step(&format!("mov.b64 {pair}, %d{a}"), |t| {
                t.regs[1][d] = cut(u128::from(t.regs[2][a] >> (32 * half)), 32)
            });
        }
        if from == 1 && to == 2 && self.random.one_in(2) {
            let b = self.random.index(N);
            return self.step(&format!("mov.b64 %d{d}, {{%r{a}, %r{b}}}"), |t| {
                t.regs[2][d] = t.regs[1][a] + (t.regs[1][b] << 32)
            });
        }
        if from == 2 && to == 2 && self.random.one_in(2) {
            let (b, e) = (self.random.index(N), (d + 1) % N);
            return self.step(&format!("mov.b128 {{%d{d}, %d{e}}}, {{%d{a}, %d{b}}}"), |t| {
                (t.regs[2][d], t.regs[2][e]) = (t.regs[2][a], t.regs[2][b])
            });
        }
        let text = format!(
            "cvt.{}.{} %{}{d}, %{}{a}",
            name(to_signed, to_bits),
            name(from_signed, from_bits),
            letter(to),
            letter(from)
        );
        self.step(&text, |t| {
            let value = number(cut(u128::from(t.regs[from][a]), from_bits), from_bits, from_signed);
            let value = number(back(value, to_bits), to_bits, to_signed);
            t.regs[to][d] = back(value, bits(to));
        });
    }

    fn memory(&mut self) {
        let width = self.random.index(3);
        let size = if self.random.one_in(4) { 8 } else { bits(width) };
        let (d, l) = (self.random.index(N), letter(width));
        let byte = self.random.below(8 * N as u32 * 8 / size) as usize * size as usize / 8;
        let (word, shift) = (byte / 8, byte % 8 * 8);
        let signed = self.random.one_in(2);
        let order = self.random.of(&[".global", "", ".relaxed.gpu.global", ".volatile.global", ".relaxed.sys"]);
        let mask = cut(u128::MAX, size) << shift;
        match self.random.below(6) {
            0 | 1 => {
                self.step(&format!("ld{order}.{}{size} %{l}{d}, [%own+{byte}]", if signed { 's' } else { 'u' }), |t| {
                    t.regs[width][d] = back(number((t.memory[word] & mask) >> shift, size, signed), bits(width));
                })
            }
            2 | 3 => self.step(&format!("st{order}.b{size} [%own+{byte}], %{l}{d}"), |t| {
                t.memory[word] = t.memory[word] & !mask | t.regs[width][d] << shift & mask;
            }),
            4 => {
                let (at, e) = (self.random.index(N / 2) * 2, self.random.index(N));
                if d == e {
                    return;
                }
                self.step(&format!("ld.global.v2.b64 {{%d{d}, %d{e}}}, [%own+{}]", at * 8), |t| {
                    (t.regs[2][d], t.regs[2][e]) = (t.memory[at], t.memory[at + 1]);
                });
                self.step(&format!("st.global.v4.b32 [%own+{}], {{%r{d}, %r{e}, %r0, %r1}}", at * 8), |t| {
                    t.memory[at] = t.regs[1][d] | t.regs[1][e] << 32;
                    t.memory[at + 1] = t.regs[1][0] | t.regs[1][1] << 32;
                });
            }
            _ => {
                let width = 1 + self.random.index(2);
                let (n, l, word) = (bits(width), letter(width), self.random.index(N));
                let (b, c) = (self.source(width), self.source(width));
                let op = self.random.of(&["add.u", "exch.b", "cas.b", "min.u", "max.s", "and.b", "or.b", "xor.b"]);
                let more = if op == "cas.b" { format!(", {}", c.text()) } else { String::new() };
                // The order that the language gives the modifiers, and the one that NCCL writes.
                let name = if self.random.one_in(2) {
                    format!("acq_rel.gpu.global.{op}{n}")
                } else {
                    format!("{}.relaxed.sys.{}{n}", &op[..op.len() - 2], &op[op.len() - 1..])
                };
                self.step(&format!("atom.{name} %{l}{d}, [%own+{}], {}{more}", word * 8, b.text()), |t| {
                    let old = cut(u128::from(t.memory[word]), n);
                    let (b, c) = (b.of(t), c.of(t));
                    let new = match op {
                        "add.u" => back(i128::from(old) + i128::from(b), n),
                        "exch.b" => b,
                        "cas.b" => {
                            if old == b {
                                c
                            } else {
                                old
                            }
                        }
                        "min.u" => old.min(b),
                        "max.s" => back(number(old, n, true).max(number(b, n, true)), n),
                        "and.b" => old & b,
                        "or.b" => old | b,
                        _ => old ^ b,
                    };
                    t.memory[word] = t.memory[word] - old + new;
                    t.regs[width][d] = old;
                });
            }
        }
    }

    /// Writes a warp instruction for all active threads.
    fn warp(&mut self) {
        let mask = (0..THREADS).filter(|&thread| self.active[thread]).fold(0u64, |mask, thread| mask | 1 << thread);
        if mask == 0 {
            return;
        }
        let (d, a, lane) = (self.random.index(N), self.random.index(N), self.random.index(THREADS));
        let before = self.threads.clone();
        let members: Vec<usize> = (0..THREADS).filter(|&thread| self.active[thread]).collect();
        let kind = self.random.below(5);
        let text = match kind {
            0 => format!("shfl.sync.bfly.b32 %r{d}, %r{a}, {lane}, 31, {mask:#x}"),
            1 => format!("vote.sync.ballot.b32 %r{d}, %p{a}, {mask:#x}"),
            2 => format!("match.any.sync.b64 %r{d}, %d{a}, {mask:#x}"),
            3 => format!("elect.sync %r{d}|%q, {mask:#x}"),
            _ => format!("bar.warp.sync {mask:#x}"),
        };
        let _ = writeln!(self.text, "{text};");
        for &member in &members {
            let result = match kind {
                // A value from outside the mask is undefined: the oracle uses the interpreter's.
                0 if !members.contains(&(member ^ lane)) => 0xa5a5_a5a5,
                0 => before[member ^ lane].regs[1][a],
                1 => members.iter().map(|&other| u64::from(before[other].preds[a]) << other).sum(),
                2 => members
                    .iter()
                    .filter(|&&other| before[other].regs[2][a] == before[member].regs[2][a])
                    .map(|&other| 1 << other)
                    .sum(),
                3 => members[0] as u64,
                _ => continue,
            };
            self.threads[member].regs[1][d] = result;
        }
    }

    /// Writes a branch at which the threads diverge.
    fn branch(&mut self, depth: usize) {
        let (p, negate) = (self.random.index(N), self.random.one_in(2));
        let label = self.labels;
        self.labels += 2;
        let _ = writeln!(self.text, "@{}%p{p} bra $L{label};", if negate { "!" } else { "" });
        let before = self.active.clone();
        let taken: Vec<bool> = self.threads.iter().map(|thread| thread.preds[p] != negate).collect();
        let side = |side: bool| before.iter().zip(&taken).map(|(active, taken)| *active && *taken == side).collect();
        self.active = side(false);
        self.block(depth + 1);
        let _ = writeln!(self.text, "bra.uni $L{};\n$L{label}:", label + 1);
        self.active = side(true);
        self.block(depth + 1);
        let _ = writeln!(self.text, "$L{}:", label + 1);
        self.active = before;
    }

    fn block(&mut self, depth: usize) {
        for _ in 0..2 + self.random.below(if depth == 0 { 28 } else { 6 }) {
            match self.random.below(23) {
                20..=21 => self.small(),
                22 => self.bulk(),
                0..=6 => self.arithmetic(),
                7..=9 => self.bit_field(),
                10..=12 => self.predicate(),
                13..=14 => self.convert(),
                15..=17 => self.memory(),
                18 => self.warp(),
                _ if depth < 3 => self.branch(depth),
                _ => {}
            }
        }
    }
}

/// Runs the program for `seed` on interpreter and oracle. Returns its number of lines.
fn run(seed: u64) -> usize {
    let mut program = Program {
        text: String::new(),
        threads: vec![State::default(); THREADS],
        active: vec![true; THREADS],
        labels: 0,
        random: Random::new(seed),
    };
    let arena = Arena::new(THREADS * 32);
    let mut load = String::new();
    for (thread, state) in program.threads.iter_mut().enumerate() {
        for at in 0..N {
            let value = program.random.next_u64();
            arena.set(thread * 32 + at, value);
            arena.set(thread * 32 + 8 + at, value.rotate_left(9));
            state.memory[at] = value;
            state.regs = std::array::from_fn(|width| {
                let mut registers = state.regs[width];
                registers[at] = cut(u128::from(value.rotate_left(9)), bits(width));
                registers
            });
        }
    }
    for at in 0..N {
        let from = 64 + at * 8;
        let _ = writeln!(
            load,
            "ld.b64 %d{at}, [%own+{from}]; ld.b32 %r{at}, [%own+{from}]; ld.b16 %h{at}, [%own+{from}]; setp.lt.s64 %p{at}, %d{at}, 0;"
        );
        for state in &mut program.threads {
            state.preds[at] = state.regs[2][at] >> 63 == 1;
        }
    }
    program.block(0);
    let mut store = String::new();
    for at in 0..N {
        let _ = writeln!(
            store,
            "st.b64 [%own+{}], %d{at}; st.b32 [%own+{}], %r{at}; st.b16 [%own+{}], %h{at}; selp.b64 %own2, 1, 0, %p{at}; st.b8 [%own+{}], %own2;",
            64 + at * 8,
            112 + at * 8,
            116 + at * 8,
            118 + at * 8
        );
    }
    let text = format!(
        ".version 8.2\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<{N}>; .reg .b16 %h<{N}>; .reg .b32 %r<{N}>; .reg .b64 %d<{N}>; .reg .b64 %own; .reg .b64 %own2; .reg .b32 %t; .reg .b32 %sh;\n\
         .reg .pred %q; .shared .align 16 .b8 room[{}];\n\
         ld.param.u64 %own, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %own, %t, 256, %own;\n\
         mov.u32 %sh, room; mad.lo.u32 %sh, %t, 64, %sh;\n{load}\n{}\n{store}\nret;\n}}\n",
        64 * THREADS,
        program.text
    );
    let arranged = linked(&text);
    let mut launch = launch(&arena, 1, THREADS as u32, seed);
    launch.weak = seed.is_multiple_of(4);
    if let Err(trap) = start(&arranged, &launch, &arena) {
        panic!("seed {seed}: {trap}\n{text}");
    }
    for (thread, state) in program.threads.iter().enumerate() {
        let found = |word: usize| arena.get(thread * 32 + word);
        for at in 0..N {
            let tail = found(14 + at);
            let pairs = [
                ("memory", found(at), state.memory[at]),
                ("%d", found(8 + at), state.regs[2][at]),
                ("%r", tail & 0xffff_ffff, state.regs[1][at]),
                ("%h", tail >> 32 & 0xffff, state.regs[0][at]),
                ("%p", tail >> 48 & 0xff, u64::from(state.preds[at])),
            ];
            for (what, found, expected) in pairs {
                assert_eq!(
                    found, expected,
                    "seed {seed}, thread {thread}: {what}{at} is {found:#x}, not {expected:#x}\n{text}"
                );
            }
        }
    }
    program.text.lines().count()
}

#[test]
fn random_programs_do_what_the_oracle_says() {
    let programs = repetitions("SOFTGPU_PROGRAMS", 10_000, 200_000);
    let instructions: usize = (1..=programs).map(run).sum();
    assert!(instructions as u64 > 10 * programs, "{instructions} instructions in {programs} programs");
}
