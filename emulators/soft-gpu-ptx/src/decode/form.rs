//! An instruction's modifiers, and its operands as slots.

pub use crate::code::blank;
use crate::code::{Atomic, Instruction, Op, Scope, Space, Special, Symbol, low};
use crate::error::{Error, Kind};
use crate::module::Place;
use crate::operand::{Operand, Type};
use crate::parse::context::{Context, Local};
use crate::parse::parser::Parser;

/// An instruction that is being decoded: its opcode's remaining modifiers, and the function that it is added to.
pub struct Form<'f, 'a> {
    pub text: &'a str,
    pub line: u32,
    pub rest: std::iter::Peekable<std::str::Split<'a, char>>,
    pub context: &'f mut Context<'a>,
}

impl Form<'_, '_> {
    /// Takes the next modifier if it is this one.
    pub fn take(&mut self, modifier: &str) -> bool {
        self.rest.next_if(|next| *next == modifier).is_some()
    }

    /// Takes the next modifier if it is in the table.
    pub fn pick<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let next = *self.rest.peek()?;
        let found = table.iter().find(|entry| entry.0 == next)?.1;
        self.rest.next();
        Some(found)
    }
}

pub const SCOPES: &[(&str, Scope)] =
    &[("cta", Scope::Block), ("cluster", Scope::Gpu), ("gpu", Scope::Gpu), ("sys", Scope::System)];
pub const SPACES: &[(&str, Space)] = &[
    ("global", Space::Global),
    ("const", Space::Constant),
    ("shared", Space::Shared),
    ("shared::cta", Space::Shared),
    ("local", Space::Local),
    ("param", Space::Param),
    ("param::entry", Space::Param),
    ("param::func", Space::Param),
];
pub const ATOMICS: &[(&str, Atomic)] = &[
    ("add", Atomic::Add),
    ("exch", Atomic::Exchange),
    ("cas", Atomic::CompareExchange),
    ("min", Atomic::Min),
    ("max", Atomic::Max),
    ("and", Atomic::And),
    ("or", Atomic::Or),
    ("xor", Atomic::Xor),
    ("inc", Atomic::Increment),
    ("dec", Atomic::Decrement),
];

/// A decoded address operand.
pub struct Address {
    pub slot: u16,
    pub offset: i32,
    pub space: Space,
}

pub type Instr = Instruction;

impl<'a> Parser<'a> {
    pub fn bad(&self, form: &Form<'_, '_>, cause: impl Into<String>) -> Error {
        self.error(Kind::Operand, form.line, form.text, cause)
    }

    pub fn unknown_form(&self, form: &Form<'_, '_>) -> Error {
        if form.text.contains("cluster") || form.text.starts_with("mapa") || form.text.starts_with("getctarank") {
            return self.no_distributed(form);
        }
        self.error(
            Kind::Form,
            form.line,
            form.text,
            "the interpreter does not support this form of the instruction; see the table in emulators/soft-gpu-ptx/README.md",
        )
    }

    /// Checks that no modifiers are left.
    pub fn done(&self, form: &mut Form<'_, '_>) -> Result<(), Error> {
        if form.rest.peek().is_some() { Err(self.unknown_form(form)) } else { Ok(()) }
    }

    /// Takes the last modifier, a type.
    pub fn ty(&self, form: &mut Form<'_, '_>) -> Result<Type, Error> {
        let ty = form.rest.next().and_then(Type::parse).ok_or_else(|| self.unknown_form(form))?;
        self.done(form)?;
        Ok(ty)
    }

    /// Takes the last modifier, an integer type of one of the kinds (`b`, `u`, `s`), of `least` to 64 bits.
    pub fn kinds(&self, form: &mut Form<'_, '_>, kinds: &str, least: u8) -> Result<Type, Error> {
        let ty = self.ty(form)?;
        if kinds.contains(ty.kind) && (least..=64).contains(&ty.bits) { Ok(ty) } else { Err(self.unknown_form(form)) }
    }

    pub fn count(&self, form: &Form<'_, '_>, operands: &[Operand<'a>], count: usize) -> Result<(), Error> {
        if operands.len() == count {
            return Ok(());
        }
        Err(self.bad(form, format!("the instruction has {count} operands, not {}", operands.len())))
    }

    /// Returns the slot of a source operand of exactly the type's width.
    pub fn value(&self, form: &mut Form<'_, 'a>, operand: &Operand<'a>, ty: Type) -> Result<u16, Error> {
        self.value_of(form, operand, ty, false).map(|(slot, _)| slot)
    }

    /// Like `value`, but with `wider` a register may have more bits. Also returns the register's width.
    pub fn value_of(
        &self,
        form: &mut Form<'_, 'a>,
        operand: &Operand<'a>,
        ty: Type,
        wider: bool,
    ) -> Result<(u16, u8), Error> {
        let fits = |width: u8| width == ty.bits || wider && width > ty.bits && ty.bits > 1 && width <= 64;
        match *operand {
            Operand::Name(name) => match form.context.find(name) {
                Some(Local::Register { slot, width }) if fits(width) => Ok((slot, width)),
                Some(Local::Register { width, .. }) => {
                    Err(self.bad(form, format!("{name} has {width} bits, and the instruction takes {}", ty.bits)))
                }
                Some(_) => self.address_value(form, name, 0, ty),
                None if name == "WARP_SZ" => Ok((self.constant(form.context, 32, form.line)?, ty.bits)),
                None => match special(name) {
                    Some((special, bits)) if (16..=64).contains(&ty.bits) && bits > 1 || (ty.bits, bits) == (1, 1) => {
                        if bits > ty.bits && special != Special::Clock && ty.bits != 32 {
                            return Err(self
                                .bad(form, format!("{name} has {bits} bits, and the instruction takes {}", ty.bits)));
                        }
                        let slot = self.temporary(form.context, form.line)?;
                        let mut read = blank(Op::Special(special), ty.bits);
                        read.d = slot;
                        self.emit(form, read)?;
                        Ok((slot, ty.bits))
                    }
                    _ if name.starts_with('%') => Err(self.error(
                        Kind::Symbol,
                        form.line,
                        name,
                        "no register has this name, and no special register that the interpreter knows",
                    )),
                    None => self.address_value(form, name, 0, ty),
                    Some(_) => Err(self.bad(form, format!("{name} does not fit {} bits", ty.bits))),
                },
            },
            Operand::Sum(name, addend) => self.address_value(form, name, addend, ty),
            Operand::Integer(value) => {
                let bits = ty.bits.min(64);
                let value = match (ty.kind, bits) {
                    // LLVM writes true as -1.
                    ('p', _) => u64::from(value != 0),
                    ('f', _) => return Err(self.bad(form, "a float is written as 0f or 0d with its bits")),
                    _ => value,
                };
                Ok((self.constant(form.context, low(value, bits), form.line)?, bits))
            }
            Operand::Not(name) if ty.kind == 'p' => {
                let mut not = blank(Op::Not, 1);
                not.a = self.value(form, &Operand::Name(name), ty)?;
                not.d = self.temporary(form.context, form.line)?;
                self.emit(form, not)?;
                Ok((not.d, 1))
            }
            Operand::Float(bits) if ty.bits == 32 => Ok((self.constant(form.context, u64::from(bits), form.line)?, 32)),
            Operand::Double(bits) if ty.bits == 64 => Ok((self.constant(form.context, bits, form.line)?, 64)),
            _ => Err(self.bad(form, "the instruction does not take such an operand")),
        }
    }

    /// Returns the slot and width of a variable's address used as a value.
    fn address_value(&self, form: &mut Form<'_, 'a>, name: &str, addend: i64, ty: Type) -> Result<(u16, u8), Error> {
        if !ty.integer() || !matches!(ty.bits, 32 | 64) {
            return Err(self.bad(form, format!("the address of {name} needs an integer of 64 bits")));
        }
        let op = match form.context.find(name) {
            Some(Local::Stack(offset)) => (Op::LocalAddress, i64::from(offset)),
            Some(Local::Param(slot)) => (Op::ParamAddress, i64::from(slot.offset)),
            Some(Local::Register { .. }) => {
                return Err(self.bad(form, format!("{name} is a register; only an address takes an offset")));
            }
            found => {
                let target = match found {
                    Some(Local::Variable(variable)) => Symbol::Variable(variable),
                    _ => self.symbol(form, name)?,
                };
                let small = match target {
                    Symbol::Variable(variable) => self.module.variables[variable].place == Place::Shared,
                    Symbol::Function(function) if self.module.functions[function].kernel || addend != 0 => {
                        return Err(self.bad(form, "of functions, only those that aren't kernels have an address"));
                    }
                    Symbol::Function(_) => false,
                };
                if ty.bits == 32 && !small {
                    return Err(self.bad(form, format!("the address of {name} has 64 bits")));
                }
                return Ok((self.address(form.context, target, addend, ty.bits, form.line)?, ty.bits));
            }
        };
        let mut read = blank(op.0, ty.bits);
        read.d = self.temporary(form.context, form.line)?;
        read.imm = i32::try_from(op.1 + addend).map_err(|_| self.bad(form, "the offset is too large"))?;
        self.emit(form, read)?;
        Ok((read.d, ty.bits))
    }

    fn symbol(&self, form: &Form<'_, '_>, name: &str) -> Result<Symbol, Error> {
        self.module.symbols.get(name).copied().ok_or_else(|| self.unknown(form.line, name))
    }

    /// Returns the slot and width of a destination register.
    pub fn target(
        &self,
        form: &mut Form<'_, 'a>,
        operand: &Operand<'a>,
        bits: u8,
        wider: bool,
    ) -> Result<(u16, u8), Error> {
        match *operand {
            Operand::Name("_") => Ok((self.temporary(form.context, form.line)?, bits)),
            Operand::Name(name) => match form.context.find(name) {
                Some(Local::Register { slot, width })
                    if width == bits || wider && width > bits && bits > 1 && width <= 64 =>
                {
                    Ok((slot, width))
                }
                Some(Local::Register { width, .. }) => {
                    Err(self.bad(form, format!("{name} has {width} bits, and the result has {bits}")))
                }
                _ => Err(self.error(
                    Kind::Symbol,
                    form.line,
                    name,
                    "the result needs a register, and no register has this name",
                )),
            },
            _ => Err(self.bad(form, "the result needs a register")),
        }
    }

    /// Returns the two slots of a register of 128 bits.
    pub fn wide(&self, form: &Form<'_, '_>, operand: &Operand<'a>) -> Result<[u16; 2], Error> {
        match *operand {
            Operand::Name(name) => match form.context.find(name) {
                Some(Local::Register { slot, width: 128 }) => Ok([slot, slot + 1]),
                _ => Err(self.bad(form, format!("{name} is no register of 128 bits"))),
            },
            _ => Err(self.bad(form, "the instruction takes a register of 128 bits")),
        }
    }

    pub fn result(&self, form: &mut Form<'_, 'a>, operand: &Operand<'a>, bits: u8) -> Result<u16, Error> {
        self.target(form, operand, bits, false).map(|(slot, _)| slot)
    }

    /// Returns the slot of a source predicate, and whether it is negated.
    pub fn predicate(&self, form: &mut Form<'_, 'a>, operand: &Operand<'a>) -> Result<(u16, bool), Error> {
        let ty = Type { kind: 'p', bits: 1 };
        match *operand {
            Operand::Not(name) => Ok((self.value(form, &Operand::Name(name), ty)?, true)),
            _ => Ok((self.value(form, operand, ty)?, false)),
        }
    }

    pub fn place_of(&self, form: &mut Form<'_, 'a>, operand: &Operand<'a>, space: Space) -> Result<Address, Error> {
        let Operand::Address(base, offset) = operand else {
            return Err(self.bad(form, "an address in brackets is expected"));
        };
        let small = |form: &Form<'_, '_>, offset: i64| {
            i32::try_from(offset).map_err(|_| self.bad(form, "the offset is larger than 31 bits"))
        };
        let ty = Type { kind: 'b', bits: 64 };
        let offset32 = small(form, *offset)?;
        let name = match **base {
            Operand::Name(name) => name,
            ref other => {
                return Ok(Address { slot: self.value(form, other, ty)?, offset: offset32, space });
            }
        };
        let frame = |form: &Form<'_, '_>, start: u32| small(form, i64::from(start) + offset);
        match form.context.find(name) {
            Some(Local::Register { slot, width }) => {
                let narrow = matches!(space, Space::Shared | Space::Local | Space::Param) && width == 32;
                if width != 64 && !narrow {
                    return Err(self.bad(form, format!("{name} has {width} bits, and an address has 64")));
                }
                Ok(Address { slot, offset: offset32, space })
            }
            Some(Local::Param(slot)) if space == Space::Param => {
                let start = self.constant(form.context, 0, form.line)?;
                Ok(Address { slot: start, offset: frame(form, slot.offset)?, space: Space::ParamFrame })
            }
            Some(Local::Stack(at)) if space == Space::Local => {
                let start = self.constant(form.context, 0, form.line)?;
                Ok(Address { slot: start, offset: frame(form, at)?, space: Space::LocalFrame })
            }
            Some(Local::Param(_) | Local::Stack(_)) => Err(self.bad(form, format!("{name} is in another state space"))),
            found => {
                let variable = match found {
                    Some(Local::Variable(variable)) => variable,
                    _ if name.starts_with('%') => {
                        return Err(self.error(Kind::Symbol, form.line, name, "no register has this name"));
                    }
                    _ => match self.symbol(form, name)? {
                        Symbol::Variable(variable) => variable,
                        Symbol::Function(_) => return Err(self.bad(form, format!("{name} is a function, not memory"))),
                    },
                };
                let fits = match self.module.variables[variable].place {
                    Place::Global => matches!(space, Space::Global | Space::Generic),
                    Place::Constant => matches!(space, Space::Constant | Space::Generic),
                    Place::Shared => space == Space::Shared,
                };
                if !fits {
                    return Err(self.bad(form, format!("{name} is in another state space")));
                }
                let slot = self.address(form.context, Symbol::Variable(variable), 0, 64, form.line)?;
                Ok(Address { slot, offset: offset32, space })
            }
        }
    }

    pub fn emit(&self, form: &mut Form<'_, 'a>, instruction: Instr) -> Result<(), Error> {
        if form.context.body.code.len() >= 1 << 24 {
            return Err(self.error(Kind::Limit, form.line, form.text, "a function has at most 16777216 instructions"));
        }
        form.context.body.code.push(instruction);
        form.context.body.lines.push(form.line);
        form.context.body.sources.push(form.context.source);
        form.context.body.inlined.push(form.context.inlined);
        Ok(())
    }
}

/// Returns a special register and its width.
fn special(name: &str) -> Option<(Special, u8)> {
    let axis = |name: &str| match name {
        ".x" => Some(0),
        ".y" => Some(1),
        ".z" => Some(2),
        _ => None,
    };
    for (prefix, make) in [
        ("%tid", Special::Tid as fn(u8) -> Special),
        ("%ntid", Special::Ntid),
        ("%ctaid", Special::Ctaid),
        ("%nctaid", Special::Nctaid),
        ("%cluster_ctaid", Special::ClusterCtaid),
        ("%cluster_nctaid", Special::ClusterNctaid),
        ("%clusterid", Special::Clusterid),
        ("%nclusterid", Special::Nclusterid),
    ] {
        if let Some(axis) = name.strip_prefix(prefix).and_then(axis) {
            return Some((make(axis), 32));
        }
    }
    if let Some(number) = name.strip_prefix("%envreg") {
        return Some((Special::Environment(number.parse().ok().filter(|number| *number < 32)?), 32));
    }
    Some(match name {
        "%cluster_ctarank" => (Special::ClusterRank, 32),
        "%cluster_nctarank" => (Special::ClusterSize, 32),
        "%is_explicit_cluster" => (Special::IsExplicitCluster, 1),
        "%laneid" => (Special::Lane, 32),
        "%warpid" => (Special::Warp, 32),
        "%nwarpid" => (Special::Warps, 32),
        "%smid" => (Special::Sm, 32),
        "%nsmid" => (Special::Sms, 32),
        "%gridid" => (Special::Grid, 64),
        "%lanemask_eq" => (Special::MaskEq, 32),
        "%lanemask_le" => (Special::MaskLe, 32),
        "%lanemask_lt" => (Special::MaskLt, 32),
        "%lanemask_ge" => (Special::MaskGe, 32),
        "%lanemask_gt" => (Special::MaskGt, 32),
        "%clock" | "%clock64" => (Special::Clock, if name == "%clock" { 32 } else { 64 }),
        "%globaltimer" | "%globaltimer_lo" => (Special::Timer, if name == "%globaltimer" { 64 } else { 32 }),
        "%globaltimer_hi" => (Special::TimerHigh, 32),
        "%dynamic_smem_size" => (Special::DynamicShared, 32),
        "%total_smem_size" => (Special::TotalShared, 32),
        _ => return None,
    })
}
