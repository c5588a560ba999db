//! Arithmetic, moves, conversions and comparisons.

use super::form::{Form, Instr, blank};
use crate::code::{Class, Combine, Compare, Float, Format, Op, Rounding, Unary};
use crate::error::{Error, Kind};
use crate::operand::{Operand, Type};
use crate::parse::parser::Parser;

/// The types that a comparison takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Domain {
    All,
    Unsigned,
    Floats,
}

const COMPARES: &[(&str, (Compare, Domain))] = &[
    ("eq", (Compare::Eq, Domain::All)),
    ("ne", (Compare::Ne, Domain::All)),
    ("lt", (Compare::Lt, Domain::All)),
    ("le", (Compare::Le, Domain::All)),
    ("gt", (Compare::Gt, Domain::All)),
    ("ge", (Compare::Ge, Domain::All)),
    ("lo", (Compare::Lt, Domain::Unsigned)),
    ("ls", (Compare::Le, Domain::Unsigned)),
    ("hi", (Compare::Gt, Domain::Unsigned)),
    ("hs", (Compare::Ge, Domain::Unsigned)),
    ("equ", (Compare::Equ, Domain::Floats)),
    ("neu", (Compare::Neu, Domain::Floats)),
    ("ltu", (Compare::Ltu, Domain::Floats)),
    ("leu", (Compare::Leu, Domain::Floats)),
    ("gtu", (Compare::Gtu, Domain::Floats)),
    ("geu", (Compare::Geu, Domain::Floats)),
    ("num", (Compare::Num, Domain::Floats)),
    ("nan", (Compare::Nan, Domain::Floats)),
];
const COMBINES: &[(&str, Combine)] = &[("and", Combine::And), ("or", Combine::Or), ("xor", Combine::Xor)];

/// Returns a float format, and whether two values of it are packed.
fn format_of(name: &str) -> Option<(Format, bool)> {
    Some(match name {
        "f32" => (Format::F32, false),
        "f64" => (Format::F64, false),
        "f16" => (Format::F16, false),
        "bf16" => (Format::Bf16, false),
        "f16x2" => (Format::F16, true),
        "bf16x2" => (Format::Bf16, true),
        "e4m3x2" => (Format::E4m3, true),
        "e5m2x2" => (Format::E5m2, true),
        _ => return None,
    })
}

/// Returns a format of 16 bits.
fn half_format(name: &str) -> Option<(Format, bool)> {
    format_of(name).filter(|(format, _)| format.bits() == 16)
}

impl<'a> Parser<'a> {
    pub(super) fn arithmetic(
        &mut self,
        form: &mut Form<'_, 'a>,
        base: &str,
        operands: &[Operand<'a>],
    ) -> Result<Instr, Error> {
        if let Some(format) = form.text.rsplit('.').next().and_then(half_format) {
            return self.half(form, base, operands, format);
        }
        if form.text.contains(".f32") || form.text.contains(".f64") {
            return self.float(form, base, operands);
        }
        let word = Type { kind: 'u', bits: 32 };
        match base {
            "add" | "sub" | "addc" | "subc" => {
                let take = base.ends_with('c');
                let give = form.take("cc");
                let ty = self.kinds(form, "us", if take || give { 32 } else { 16 })?;
                let op = match (base.starts_with("add"), take || give) {
                    (true, false) => Op::Add,
                    (false, false) => Op::Sub,
                    (true, true) => Op::AddCarry { take, give },
                    (false, true) => Op::SubBorrow { take, give },
                };
                self.plain(form, op, operands, &[ty, ty, ty])
            }
            "mul" | "mad" => {
                let which = form.pick(&[("lo", 0), ("hi", 1), ("wide", 2)]).ok_or_else(|| self.unknown_form(form))?;
                let ty = self.kinds(form, "us", 16)?;
                if which == 2 && ty.bits == 64 {
                    return Err(self.unknown_form(form));
                }
                let signed = ty.signed();
                let result = Type { kind: ty.kind, bits: if which == 2 { ty.bits * 2 } else { ty.bits } };
                let mut made = if base == "mul" {
                    let op = [Op::MulLo, Op::MulHi { signed }, Op::MulWide { signed }][which];
                    self.plain(form, op, operands, &[result, ty, ty])?
                } else {
                    let op = [Op::MadLo, Op::MadHi { signed }, Op::MadWide { signed }][which];
                    self.plain(form, op, operands, &[result, ty, ty, result])?
                };
                made.width = ty.bits;
                Ok(made)
            }
            "div" | "rem" | "min" | "max" | "abs" | "neg" => {
                let ty = self.kinds(form, "us", 16)?;
                let signed = ty.signed();
                if matches!(base, "abs" | "neg") && !signed {
                    return Err(self.unknown_form(form));
                }
                let op = match base {
                    "div" => Op::Div { signed },
                    "rem" => Op::Rem { signed },
                    "min" => Op::Min { signed },
                    "max" => Op::Max { signed },
                    "abs" => Op::Abs,
                    _ => Op::Neg,
                };
                let types = [ty; 3];
                self.plain(form, op, operands, &types[..if matches!(base, "abs" | "neg") { 2 } else { 3 }])
            }
            "and" | "or" | "xor" | "not" => {
                let ty = self.ty(form)?;
                if !matches!(ty.kind, 'b' | 'p') || !matches!(ty.bits, 1 | 16 | 32 | 64) {
                    return Err(self.unknown_form(form));
                }
                let op = match base {
                    "and" => Op::And,
                    "or" => Op::Or,
                    "xor" => Op::Xor,
                    _ => Op::Not,
                };
                self.plain(form, op, operands, &[ty; 3][..if base == "not" { 2 } else { 3 }])
            }
            "cnot" => {
                let ty = self.kinds(form, "b", 16)?;
                self.plain(form, Op::LogicalNot, operands, &[ty, ty])
            }
            "lop3" => {
                let ty = self.kinds(form, "b", 32)?;
                let [.., Operand::Integer(table @ 0..=255)] = *operands else {
                    return Err(self.bad(form, "the table is a number from 0 to 255"));
                };
                if ty.bits != 32 {
                    return Err(self.unknown_form(form));
                }
                let mut made = self.plain(form, Op::Lop3, &operands[..operands.len() - 1], &[ty; 4])?;
                made.imm = table as i32;
                Ok(made)
            }
            "shl" | "shr" => {
                let ty = self.kinds(form, "bus", 16)?;
                let op = match (base, ty.kind) {
                    ("shl", 'b') => Op::Shl,
                    ("shr", _) => Op::Shr { signed: ty.signed() },
                    _ => return Err(self.unknown_form(form)),
                };
                self.plain(form, op, operands, &[ty, ty, word])
            }
            "shf" => {
                let left = form.pick(&[("l", true), ("r", false)]).ok_or_else(|| self.unknown_form(form))?;
                let clamp = form.pick(&[("clamp", true), ("wrap", false)]).ok_or_else(|| self.unknown_form(form))?;
                let ty = self.kinds(form, "b", 32)?;
                if ty.bits != 32 {
                    return Err(self.unknown_form(form));
                }
                self.plain(form, Op::Funnel { left, clamp }, operands, &[ty, ty, ty, word])
            }
            "popc" | "clz" | "brev" => {
                let ty = self.kinds(form, "b", 32)?;
                let (op, result) = match base {
                    "popc" => (Op::Popc, word),
                    "clz" => (Op::Clz, word),
                    _ => (Op::Brev, ty),
                };
                let mut made = self.plain(form, op, operands, &[result, ty])?;
                made.width = ty.bits;
                Ok(made)
            }
            "bfind" => {
                let shift = form.take("shiftamt");
                let ty = self.kinds(form, "us", 32)?;
                let mut made = self.plain(form, Op::Bfind { signed: ty.signed(), shift }, operands, &[word, ty])?;
                made.width = ty.bits;
                Ok(made)
            }
            "bfe" => {
                let ty = self.kinds(form, "us", 32)?;
                self.plain(form, Op::Bfe { signed: ty.signed() }, operands, &[ty, ty, word, word])
            }
            "bfi" => {
                let ty = self.kinds(form, "b", 32)?;
                self.plain(form, Op::Bfi, operands, &[ty, ty, ty, word, word])
            }
            "prmt" => {
                let ty = self.kinds(form, "b", 32)?;
                if ty.bits != 32 {
                    return Err(self.unknown_form(form));
                }
                self.plain(form, Op::Prmt, operands, &[ty; 4])
            }
            _ => Err(self.unknown_form(form)),
        }
    }

    /// Decodes an instruction whose operands are, in order, `d`, `a`, `b`, `c`, `x`.
    pub(super) fn plain(
        &self,
        form: &mut Form<'_, 'a>,
        op: Op,
        operands: &[Operand<'a>],
        types: &[Type],
    ) -> Result<Instr, Error> {
        self.count(form, operands, types.len())?;
        let mut made = blank(op, types[0].bits);
        let mut slots = [0; 4];
        for ((slot, operand), &ty) in slots.iter_mut().zip(&operands[1..]).zip(&types[1..]) {
            *slot = self.value(form, operand, ty)?;
        }
        [made.a, made.b, made.c, made.x] = slots;
        made.d = self.result(form, &operands[0], types[0].bits)?;
        Ok(made)
    }

    fn float(&self, form: &mut Form<'_, 'a>, base: &str, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let approximate = form.take("approx");
        let rounded = form.take("rn");
        let flush = form.take("ftz");
        let ty = self.ty(form)?;
        let unary = match (base, approximate, rounded) {
            // Where the result is approximate, this is the nearest number.
            ("rcp", _, _) if approximate != rounded => Some(Unary::Reciprocal),
            ("lg2", true, false) => Some(Unary::Log2),
            ("ex2", true, false) => Some(Unary::Exp2),
            _ => None,
        };
        if let Some(op) = unary
            && ty == (Type { kind: 'f', bits: 32 })
        {
            return self.plain(form, Op::Unary { op, flush }, operands, &[ty; 2]);
        }
        if approximate || flush {
            return Err(self.unknown_form(form));
        }
        let (op, count) = match (base, rounded) {
            ("add", _) => (Float::Add, 3),
            ("sub", _) => (Float::Sub, 3),
            ("mul", _) => (Float::Mul, 3),
            ("div", true) => (Float::Div, 3),
            ("fma", true) => (Float::Fma, 4),
            ("neg", false) => (Float::Neg, 2),
            ("abs", false) => (Float::Abs, 2),
            ("min", false) => (Float::Min, 3),
            ("max", false) => (Float::Max, 3),
            ("sqrt", true) => (Float::Sqrt, 2),
            _ => return Err(self.unknown_form(form)),
        };
        if !ty.float() || !matches!(ty.bits, 32 | 64) {
            return Err(self.unknown_form(form));
        }
        self.plain(form, Op::Float(op), operands, &[ty; 4][..count])
    }

    /// Decodes arithmetic on one or two values of 16 bits.
    fn half(
        &self,
        form: &mut Form<'_, 'a>,
        base: &str,
        operands: &[Operand<'a>],
        (format, pair): (Format, bool),
    ) -> Result<Instr, Error> {
        let rounded = form.take("rn");
        form.rest.next();
        self.done(form)?;
        let (op, count) = match (base, rounded) {
            ("add", _) => (Float::Add, 3),
            ("sub", _) => (Float::Sub, 3),
            ("mul", _) => (Float::Mul, 3),
            ("fma", true) => (Float::Fma, 4),
            ("neg", false) => (Float::Neg, 2),
            ("abs", false) => (Float::Abs, 2),
            ("min", false) => (Float::Min, 3),
            ("max", false) => (Float::Max, 3),
            _ => return Err(self.unknown_form(form)),
        };
        let ty = Type { kind: 'b', bits: if pair { 32 } else { 16 } };
        self.plain(form, Op::Half { op, format }, operands, &[ty; 4][..count])
    }

    /// Decodes a conversion from or to a format of 16 or 8 bits.
    fn recode(
        &self,
        form: &mut Form<'_, 'a>,
        operands: &[Operand<'a>],
        (to, to_pair): (Format, bool),
        (from, from_pair): (Format, bool),
    ) -> Result<Instr, Error> {
        let rounded = form.take("rn");
        let saturate = form.take("satfinite");
        form.rest.next();
        form.rest.next();
        self.done(form)?;
        let narrows = to.bits() < from.bits();
        // Two values of 32 bits are two operands.
        let two = to_pair && from == Format::F32;
        let is_small = |format: Format| matches!(format, Format::E4m3 | Format::E5m2);
        let known = match (to, from) {
            _ if is_small(to) => two && saturate || from_pair && from == Format::F16 && saturate,
            (Format::F16, _) if is_small(from) => from_pair && rounded && !saturate,
            (Format::F16 | Format::Bf16, Format::F32) => rounded && !saturate,
            (Format::F16, Format::F64) => rounded && !saturate,
            (Format::F32, Format::F16 | Format::Bf16) | (Format::F64, Format::F16) => !rounded && !saturate,
            _ => false,
        };
        if !known || narrows && !rounded || to_pair != (from_pair || two) {
            return Err(self.unknown_form(form));
        }
        let ty = |format: Format, pair: bool| Type {
            kind: if format.bits() > 16 { 'f' } else { 'b' },
            bits: if pair { 2 * format.bits() } else { format.bits() },
        };
        let source = ty(from, from_pair);
        let types = [ty(to, to_pair), source, source];
        let op = Op::Recode { from, to, saturate, pair: to_pair };
        self.plain(form, op, operands, &types[..if two { 3 } else { 2 }])
    }

    pub(super) fn mov(&self, form: &mut Form<'_, 'a>, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let ty = self.ty(form)?;
        if !matches!(ty.bits, 1 | 16 | 32 | 64 | 128) {
            return Err(self.unknown_form(form));
        }
        self.count(form, operands, 2)?;
        let half = Type { kind: 'b', bits: ty.bits / 2 };
        match operands {
            [to, from] if ty.bits == 128 => {
                let mut made = blank(Op::MovPair, half.bits);
                [made.a, made.b] = match from {
                    Operand::Vector(parts) if parts.len() == 2 => {
                        [self.value(form, &parts[0], half)?, self.value(form, &parts[1], half)?]
                    }
                    _ => self.wide(form, from)?,
                };
                [made.d, made.x] = match to {
                    Operand::Vector(parts) if parts.len() == 2 => {
                        [self.result(form, &parts[0], half.bits)?, self.result(form, &parts[1], half.bits)?]
                    }
                    _ => self.wide(form, to)?,
                };
                Ok(made)
            }
            [Operand::Vector(parts), value] | [value, Operand::Vector(parts)] if ty.bits > 16 => {
                let [first, second] = &parts[..] else {
                    return Err(self.error(
                        Kind::Form,
                        form.line,
                        form.text,
                        "the interpreter packs and unpacks two halves",
                    ));
                };
                if matches!(operands[0], Operand::Vector(_)) {
                    let mut made = blank(Op::Unpack, half.bits);
                    made.a = self.value(form, value, ty)?;
                    made.d = self.result(form, first, half.bits)?;
                    made.x = self.result(form, second, half.bits)?;
                    Ok(made)
                } else {
                    let mut made = blank(Op::Pack, half.bits);
                    made.a = self.value(form, first, half)?;
                    made.b = self.value(form, second, half)?;
                    made.d = self.result(form, value, ty.bits)?;
                    Ok(made)
                }
            }
            _ => self.plain(form, Op::Mov, operands, &[ty, ty]),
        }
    }

    pub(super) fn convert(&self, form: &mut Form<'_, 'a>, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let mut names = form.text.rsplit('.').map(format_of);
        if let (Some(Some(from)), Some(Some(to))) = (names.next(), names.next())
            && from.0.bits().min(to.0.bits()) <= 16
        {
            return self.recode(form, operands, to, from);
        }
        let roundings =
            [("rni", Rounding::Nearest), ("rzi", Rounding::Zero), ("rmi", Rounding::Down), ("rpi", Rounding::Up)];
        let integral = form.pick(&roundings);
        let rounded = form.take("rn");
        let to = form.rest.next().and_then(Type::parse).ok_or_else(|| self.unknown_form(form))?;
        let from = self.ty(form)?;
        self.count(form, operands, 2)?;
        let fits = |ty: Type| if ty.float() { ty.bits >= 32 } else { matches!(ty.kind, 'u' | 's') };
        if !fits(to) || !fits(from) {
            return Err(self.unknown_form(form));
        }
        let op = match (to.float(), from.float(), integral, rounded) {
            (false, false, None, false) => Op::Convert { from_signed: from.signed(), to_signed: to.signed() },
            (true, false, None, true) => Op::FloatFromInteger { signed: from.signed() },
            (false, true, Some(rounding), false) => Op::FloatToInteger { signed: to.signed(), rounding },
            (true, true, Some(rounding), false) if to.bits == from.bits => Op::FloatToIntegral(rounding),
            (true, true, None, false) if to.bits > from.bits => Op::FloatConvert,
            (true, true, None, true) if to.bits < from.bits => Op::FloatConvert,
            _ => return Err(self.unknown_form(form)),
        };
        let wider = |ty: Type| !ty.float();
        let (a, _) = self.value_of(form, &operands[1], from, wider(from))?;
        let (d, width) = self.target(form, &operands[0], to.bits, wider(to))?;
        let mut made = blank(op, to.bits);
        (made.a, made.d) = (a, d);
        made.extra = width;
        made.imm = i32::from(from.bits);
        Ok(made)
    }

    pub(super) fn compare(&self, form: &mut Form<'_, 'a>, set: bool, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let (compare, domain) = form.pick(COMPARES).ok_or_else(|| self.unknown_form(form))?;
        let combine = form.pick(COMBINES).unwrap_or(Combine::None);
        if set {
            let to = form.rest.next().and_then(Type::parse).filter(|ty| matches!(ty.kind, 'u' | 's') && ty.bits == 32);
            let (Some(to), Combine::None) = (to, combine) else {
                return Err(self.unknown_form(form));
            };
            let ty = self.ty(form)?;
            let class = self.class(form, ty, compare, domain)?;
            let mut made = self.plain(form, Op::Set { compare, class }, operands, &[to, ty, ty])?;
            made.width = ty.bits;
            return Ok(made);
        }
        let ty = self.ty(form)?;
        let class = self.class(form, ty, compare, domain)?;
        self.count(form, operands, if combine == Combine::None { 3 } else { 4 })?;
        let mut made = blank(Op::Setp { compare, class, combine }, ty.bits);
        made.a = self.value(form, &operands[1], ty)?;
        made.b = self.value(form, &operands[2], ty)?;
        if let Some(other) = operands.get(3) {
            let (slot, negate) = self.predicate(form, other)?;
            (made.c, made.imm) = (slot, i32::from(negate));
        }
        let (first, second) = match operands[0] {
            Operand::Pair(first, second) => (Operand::Name(first), Operand::Name(second)),
            ref only => (only.clone(), Operand::Name("_")),
        };
        made.d = self.result(form, &first, 1)?;
        made.x = self.result(form, &second, 1)?;
        Ok(made)
    }

    fn class(&self, form: &Form<'_, '_>, ty: Type, compare: Compare, domain: Domain) -> Result<Class, Error> {
        match ty.kind {
            _ if domain == Domain::Unsigned && ty.kind != 'u' => Err(self.unknown_form(form)),
            'f' if ty.bits >= 32 => Ok(Class::Float),
            _ if domain == Domain::Floats || !(16..=64).contains(&ty.bits) => Err(self.unknown_form(form)),
            'b' if !matches!(compare, Compare::Eq | Compare::Ne) => Err(self.unknown_form(form)),
            's' => Ok(Class::Signed),
            'b' | 'u' => Ok(Class::Unsigned),
            _ => Err(self.unknown_form(form)),
        }
    }
}
