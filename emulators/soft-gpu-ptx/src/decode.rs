//! Decodes instructions: opcode, modifiers and operands into the compact form.

mod arithmetic;
mod bulk;
mod form;
mod memory;
mod warp;

use crate::code::{ALWAYS, Call, Op, Symbol};
use crate::error::{Error, Kind};
use crate::operand::{Operand, Type};
use crate::parse::context::{Context, Local, Prototype};
use crate::parse::parser::Parser;
use form::{Form, Instr, SPACES, blank};

impl<'a> Parser<'a> {
    /// Adds the implicit instruction at the end of a body.
    pub fn finish(&self, context: &mut Context<'a>, kernel: bool, line: u32) -> Result<(), Error> {
        let mut form = Form { text: "}", line, rest: "".split('.').peekable(), context };
        self.emit(&mut form, blank(if kernel { Op::Exit } else { Op::Return }, 64))
    }

    /// Decodes one instruction.
    pub fn decode(
        &mut self,
        context: &mut Context<'a>,
        opcode: &'a str,
        line: u32,
        guard: Option<(u16, bool)>,
        operands: &[Operand<'a>],
    ) -> Result<(), Error> {
        let mut rest = opcode.split('.').peekable();
        let base = rest.next().unwrap_or_default();
        let form = &mut Form { text: opcode, line, rest, context };
        let mut made = self.decoded(form, base, operands)?;
        (made.guard, made.negate) = guard.unwrap_or((ALWAYS, false));
        self.emit(form, made)
    }

    fn decoded(&mut self, form: &mut Form<'_, 'a>, base: &str, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        match base {
            "ld" | "ldu" | "st" => self.access(form, base == "st", operands),
            "atom" | "red" => self.atomic(form, base == "red", operands),
            "mov" => self.mov(form, operands),
            "cvt" => self.convert(form, operands),
            "setp" | "set" => self.compare(form, base == "set", operands),
            "bar" | "barrier" => self.barrier(form, operands),
            "call" => self.call(form, operands),
            "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" => self.warp(form, base, operands),
            "fence" | "membar" => self.fence(form, base == "membar", operands),
            "mbarrier" => self.mbarrier(form, operands),
            "cp" => self.bulk(form, operands),
            // There is no multicast memory, so no address for it.
            "multimem" => Ok(blank(Op::Trap, 128)),
            "setmaxnreg" | "griddepcontrol" => {
                let registers = base == "setmaxnreg";
                // Grids on a stream run one after the other, and a thread has all registers that it asks for.
                let known = if registers {
                    form.pick(&[("inc", ()), ("dec", ())]).is_some()
                        && form.take("sync")
                        && form.take("aligned")
                        && form.take("u32")
                } else {
                    form.pick(&[("wait", ()), ("launch_dependents", ())]).is_some()
                };
                if !known {
                    return Err(self.unknown_form(form));
                }
                self.done(form)?;
                self.count(form, operands, usize::from(registers))?;
                Ok(blank(Op::Nothing, 64))
            }
            "bra" => {
                form.take("uni");
                self.done(form)?;
                let [Operand::Name(label)] = *operands else {
                    return Err(self.bad(form, "a branch has one label"));
                };
                form.context.branch(label);
                Ok(blank(Op::Branch, 64))
            }
            "brx" => {
                let known = form.take("idx");
                form.take("uni");
                if !known {
                    return Err(self.unknown_form(form));
                }
                self.done(form)?;
                let [ref index, Operand::Name(table)] = *operands else {
                    return Err(self.bad(form, "the branch has an index and a table"));
                };
                let mut made = blank(Op::BranchTable, 32);
                made.a = self.value(form, index, Type { kind: 'u', bits: 32 })?;
                form.context.branch_table(table);
                Ok(made)
            }
            "ret" | "exit" | "trap" | "brkpt" => {
                if base == "ret" {
                    form.take("uni");
                }
                self.done(form)?;
                self.count(form, operands, 0)?;
                Ok(blank(
                    match base {
                        "ret" => Op::Return,
                        "exit" => Op::Exit,
                        _ => Op::Trap,
                    },
                    if base == "brkpt" { 1 } else { 64 },
                ))
            }
            "nanosleep" => {
                let ty = self.kinds(form, "u", 32)?;
                self.count(form, operands, 1)?;
                let mut made = blank(Op::Nanosleep, ty.bits);
                made.a = self.value(form, &operands[0], ty)?;
                Ok(made)
            }
            "cvta" => {
                let to = form.take("to");
                let space = form.pick(SPACES).ok_or_else(|| self.unknown_form(form))?;
                let ty = self.kinds(form, "u", 64)?;
                let op = if to { Op::FromGeneric(space) } else { Op::ToGeneric(space) };
                self.plain(form, op, operands, &[ty, ty])
            }
            "isspacep" => {
                let space = form.pick(SPACES).ok_or_else(|| self.unknown_form(form))?;
                self.done(form)?;
                let types = [Type { kind: 'p', bits: 1 }, Type { kind: 'b', bits: 64 }];
                self.plain(form, Op::IsSpace(space), operands, &types)
            }
            "selp" => {
                let ty = self.ty(form)?;
                if !(16..=64).contains(&ty.bits) || ty.float() && ty.bits == 16 {
                    return Err(self.unknown_form(form));
                }
                self.count(form, operands, 4)?;
                let mut made = blank(Op::Selp, ty.bits);
                made.a = self.value(form, &operands[1], ty)?;
                made.b = self.value(form, &operands[2], ty)?;
                let (slot, negate) = self.predicate(form, &operands[3])?;
                made.c = slot;
                if negate {
                    (made.a, made.b) = (made.b, made.a);
                }
                made.d = self.result(form, &operands[0], ty.bits)?;
                Ok(made)
            }
            _ => self.arithmetic(form, base, operands),
        }
    }

    fn call(&mut self, form: &mut Form<'_, 'a>, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        form.take("uni");
        self.done(form)?;
        let none = Vec::new();
        let (results, rest) = match operands {
            [Operand::List(results), rest @ ..] => (results, rest),
            _ => (&none, operands),
        };
        let (function, arguments, prototype) = match rest {
            [function] => (function, &none, None),
            [function, Operand::List(arguments)] => (function, arguments, None),
            [function, Operand::Name(prototype)] => (function, &none, Some(*prototype)),
            [function, Operand::List(arguments), Operand::Name(prototype)] => (function, arguments, Some(*prototype)),
            _ => {
                return Err(self.bad(
                    form,
                    "a call has results, a function and arguments; an indirect one ends with a .callprototype",
                ));
            }
        };
        let Operand::Name(name) = function else {
            return Err(self.bad(form, "a call has a function's name, or a register with its address"));
        };
        let mut made = blank(Op::Call, 64);
        let mut target = None;
        let callee = if let Some(name) = prototype {
            made.a = self.value(form, function, Type { kind: 'b', bits: 64 })?;
            let found = form.context.prototype(name);
            found.cloned().ok_or_else(|| self.bad(form, format!("{name} is no .callprototype above this line")))?
        } else {
            if let Some(Local::Register { .. }) = form.context.find(name) {
                return Err(
                    self.bad(form, format!("{name} is a register, and an indirect call takes a .callprototype"))
                );
            }
            let Some(&Symbol::Function(index)) = self.module.symbols.get(*name) else {
                return Err(self.error(Kind::Symbol, form.line, name, "no function of this name is declared before this line; declare it, `.extern` if it is in another module"));
            };
            let callee = &self.module.functions[index];
            if callee.kernel {
                return Err(self.bad(form, format!("{name} is a kernel, which only a launch starts")));
            }
            target = Some(index);
            Prototype { parameters: callee.parameters.clone(), results: callee.results.clone() }
        };
        let mut sides = [Vec::new(), Vec::new()];
        for (side, given, wanted) in [(0, arguments, &callee.parameters), (1, results, &callee.results)] {
            if given.len() != wanted.len() {
                let what = ["arguments", "results"][side];
                return Err(self.bad(form, format!("{name} has {} {what}, not {}", wanted.len(), given.len())));
            }
            for (operand, wanted) in given.iter().zip(wanted) {
                let slot = match operand {
                    Operand::Name(variable) => match form.context.find(variable) {
                        Some(Local::Param(slot)) => Some(slot),
                        _ => None,
                    },
                    _ => None,
                };
                let Some(slot) = slot else {
                    return Err(self.bad(form, "arguments and results are variables in .param"));
                };
                if slot.size != wanted.size {
                    return Err(
                        self.bad(form, format!("{name} has a parameter of {} bytes, not {}", wanted.size, slot.size))
                    );
                }
                sides[side].push((slot.offset, slot.size));
            }
        }
        let [arguments, results] = sides;
        made.imm = form.context.body.calls.len() as i32;
        form.context.body.calls.push(Call { target, line: form.line, arguments, results });
        Ok(made)
    }
}
