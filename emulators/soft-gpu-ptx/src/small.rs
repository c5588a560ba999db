//! Floats of 16 and 8 bits, and functions of a float.

use crate::code::{Float, Format, Rounding, Unary};

impl Format {
    /// Returns the number of bits.
    pub fn bits(self) -> u8 {
        match self {
            Self::F64 => 64,
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 | Self::E5m2 => 8,
        }
    }

    /// Returns the bits of the mantissa, and the exponent of 1.
    fn shape(self) -> (u32, i32) {
        match self {
            Self::F64 => (52, 1023),
            Self::F32 => (23, 127),
            Self::F16 => (10, 15),
            Self::Bf16 => (7, 127),
            Self::E4m3 => (3, 7),
            Self::E5m2 => (2, 15),
        }
    }

    /// Returns the bits of the greatest finite number, and of NaN.
    fn limits(self) -> (u64, u64) {
        match self {
            Self::F64 => (0x7fef_ffff_ffff_ffff, 0x7fff_ffff_ffff_ffff),
            Self::F32 => (0x7f7f_ffff, 0x7fff_ffff),
            Self::F16 => (0x7bff, 0x7fff),
            Self::Bf16 => (0x7f7f, 0x7fff),
            // It has no infinity.
            Self::E4m3 => (0x7e, 0x7f),
            Self::E5m2 => (0x7b, 0x7f),
        }
    }

    /// Returns the number that the bits represent.
    pub fn decode(self, bits: u64) -> f64 {
        match self {
            Self::F64 => return f64::from_bits(bits),
            Self::F32 => return f64::from(f32::from_bits(bits as u32)),
            _ => {}
        }
        let (mantissa, one) = self.shape();
        let sign = 1u64 << (self.bits() - 1);
        let magnitude = bits & (sign - 1);
        let (exponent, fraction) = ((magnitude >> mantissa) as i32, (magnitude & ((1 << mantissa) - 1)) as f64);
        let (greatest, _) = self.limits();
        let value = if magnitude <= greatest {
            let scale = (exponent.max(1) - one - mantissa as i32) as f64;
            let whole = if exponent == 0 { 0.0 } else { f64::from(1u32 << mantissa) };
            (whole + fraction) * scale.exp2()
        } else if magnitude == greatest + 1 && self != Self::E4m3 {
            f64::INFINITY
        } else {
            f64::NAN
        };
        if bits & sign == 0 { value } else { -value }
    }

    /// Returns the bits of the nearest number, of two equally near ones the even one. With `saturate`, numbers that are
    /// too large become the greatest finite one.
    pub fn encode(self, value: f64, saturate: bool) -> u64 {
        let (greatest, nan) = self.limits();
        match self {
            _ if value.is_nan() => return nan,
            Self::F64 => return value.to_bits(),
            Self::F32 => return u64::from((value as f32).to_bits()),
            _ => {}
        }
        let sign = u64::from(value.is_sign_negative()) << (self.bits() - 1);
        let (mantissa, one) = self.shape();
        let size = value.abs();
        let exponent = ((size.to_bits() >> 52) as i32 - 1023).max(1 - one);
        // In units of the last bit.
        let units = if size.is_infinite() {
            u64::MAX
        } else {
            (size * f64::from(mantissa as i32 - exponent).exp2()).round_ties_even() as u64
        };
        // A carry out of the mantissa goes to the exponent.
        let base = ((exponent + one - 1) as u64) << mantissa;
        let bits = base.saturating_add(units);
        if bits <= greatest {
            sign | bits
        } else if saturate {
            sign | greatest
        } else if self == Self::E4m3 {
            nan
        } else {
            sign | (greatest + 1)
        }
    }
}

/// Converts a value from one format to another.
pub fn recoded(bits: u64, from: Format, to: Format, saturate: bool) -> u64 {
    // These have the same exponents, and a NaN keeps its payload.
    if (from, to) == (Format::Bf16, Format::F32) {
        return bits << 16;
    }
    to.encode(from.decode(bits), saturate)
}

/// Computes in a format of 16 bits.
pub fn half(op: Float, format: Format, bits: [u64; 3]) -> u64 {
    let sign = 1 << 15;
    match op {
        Float::Neg => return bits[0] ^ sign,
        Float::Abs => return bits[0] & !sign,
        _ => {}
    }
    let [a, b, c] = bits.map(|bits| format.decode(bits));
    let value = match op {
        // 53 bits are more than twice those of the format, so rounding twice is as good as once.
        Float::Add => a + b,
        Float::Sub => a - b,
        Float::Mul => a * b,
        Float::Fma => return format.encode(odd_sum(a * b, c), false),
        Float::Min | Float::Max => {
            let first = match a.partial_cmp(&b) {
                None => b.is_nan(),
                // -0 is less than +0.
                Some(_) => (a.total_cmp(&b).is_lt()) == (op == Float::Min),
            };
            if first { a } else { b }
        }
        Float::Div | Float::Sqrt | Float::Neg | Float::Abs => f64::NAN,
    };
    format.encode(value, false)
}

/// Adds two numbers. A sum that isn't exact gets an odd last bit, so that rounding it again to fewer bits gives the
/// nearest number.
fn odd_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let other = sum - a;
    let error = (a - (sum - other)) + (b - other);
    if error == 0.0 || !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// Computes a function of a float. With `flush`, subnormal operands and results are zero.
pub fn unary(op: Unary, flush: bool, a: f32) -> f32 {
    let flushed = |value: f32| if flush && value.is_subnormal() { 0f32.copysign(value) } else { value };
    let a = f64::from(flushed(a));
    let value = match op {
        Unary::Reciprocal => 1.0 / a,
        Unary::Log2 => a.log2(),
        Unary::Exp2 => a.exp2(),
    };
    flushed(value as f32)
}

/// Rounds to an integer.
pub fn integral(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}
