//! Barriers and warp instructions.

use super::form::{ATOMICS, Form, Instr, blank};
use crate::code::{ALWAYS, Atomic, Op, Shuffle, Vote};
use crate::error::Error;
use crate::operand::{Operand, Type};
use crate::parse::parser::Parser;

impl<'a> Parser<'a> {
    pub(super) fn barrier(&self, form: &mut Form<'_, 'a>, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let word = Type { kind: 'u', bits: 32 };
        if form.text.starts_with("bar.") && form.take("warp") {
            if !form.take("sync") {
                return Err(self.unknown_form(form));
            }
            self.done(form)?;
            self.count(form, operands, 1)?;
            let mut made = blank(Op::WarpBarrier, 32);
            made.b = self.value(form, &operands[0], word)?;
            return Ok(made);
        }
        form.take("cta");
        let kind = form.pick(&[("sync", 0), ("arrive", 1), ("red", 2)]).ok_or_else(|| self.unknown_form(form))?;
        let reduce = if kind == 2 {
            let reduce = form.pick(&[("popc", Vote::Count), ("and", Vote::All), ("or", Vote::Any)]);
            Some(reduce.ok_or_else(|| self.unknown_form(form))?)
        } else {
            None
        };
        form.take("aligned");
        let mut made = blank(Op::Barrier { arrive: kind == 1, reduce }, 32);
        let mut rest = operands;
        if let Some(reduce) = reduce {
            let bits = if reduce == Vote::Count { 32 } else { 1 };
            let known =
                form.rest.next().and_then(Type::parse).is_some_and(|ty| ty.bits == bits && "up".contains(ty.kind));
            let [result, middle @ .., predicate] = operands else {
                return Err(self.bad(form, "the instruction has a result, a barrier and a predicate"));
            };
            if !known {
                return Err(self.unknown_form(form));
            }
            made.d = self.result(form, result, bits)?;
            let (slot, negate) = self.predicate(form, predicate)?;
            (made.c, made.imm) = (slot, i32::from(negate));
            rest = middle;
        }
        self.done(form)?;
        made.b = ALWAYS;
        match rest {
            [barrier] if kind != 1 => made.a = self.value(form, barrier, word)?,
            [barrier, threads] => {
                made.a = self.value(form, barrier, word)?;
                made.b = self.value(form, threads, word)?;
            }
            _ => {
                return Err(
                    self.bad(form, "the instruction has a barrier, and a number of threads if it does not wait")
                );
            }
        }
        Ok(made)
    }

    pub(super) fn warp(&self, form: &mut Form<'_, 'a>, base: &str, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let word = Type { kind: 'b', bits: 32 };
        if base == "activemask" {
            let ty = self.ty(form)?;
            if ty != word {
                return Err(self.unknown_form(form));
            }
            return self.plain(form, Op::ActiveMask, operands, &[word]);
        }
        let first = |operands: &[Operand<'a>]| match operands.first() {
            Some(&Operand::Pair(value, predicate)) => (Operand::Name(value), Some(Operand::Name(predicate))),
            Some(other) => (other.clone(), None),
            None => (Operand::Name("_"), None),
        };
        // sm_70 and later only have the forms with a mask.
        if base != "match" && !form.take("sync") {
            return Err(self.unknown_form(form));
        }
        match base {
            "shfl" => {
                let kind = form.pick(&[
                    ("idx", Shuffle::Index),
                    ("up", Shuffle::Up),
                    ("down", Shuffle::Down),
                    ("bfly", Shuffle::Butterfly),
                ]);
                let kind = kind.ok_or_else(|| self.unknown_form(form))?;
                self.shuffle(form, kind, first(operands), operands)
            }
            "elect" => {
                self.done(form)?;
                self.count(form, operands, 2)?;
                let (lane, predicate) = first(operands);
                let predicate =
                    predicate.ok_or_else(|| self.bad(form, "the results are a register and a predicate"))?;
                let mut made = blank(Op::Elect, 32);
                made.b = self.value(form, &operands[1], word)?;
                made.d = self.result(form, &lane, 32)?;
                made.x = self.result(form, &predicate, 1)?;
                Ok(made)
            }
            "vote" => {
                let vote = form.pick(&[
                    ("all", Vote::All),
                    ("any", Vote::Any),
                    ("uni", Vote::Uniform),
                    ("ballot", Vote::Ballot),
                ]);
                let vote = vote.ok_or_else(|| self.unknown_form(form))?;
                let ty = self.ty(form)?;
                let bits = if vote == Vote::Ballot { 32 } else { 1 };
                if ty.bits != bits || ty != word && bits == 32 {
                    return Err(self.unknown_form(form));
                }
                self.count(form, operands, 3)?;
                let mut made = blank(Op::Vote(vote), bits);
                let (slot, negate) = self.predicate(form, &operands[1])?;
                (made.a, made.imm) = (slot, i32::from(negate));
                made.b = self.value(form, &operands[2], word)?;
                made.d = self.result(form, &operands[0], bits)?;
                Ok(made)
            }
            "match" => {
                let all = form.pick(&[("any", false), ("all", true)]).ok_or_else(|| self.unknown_form(form))?;
                if !form.take("sync") {
                    return Err(self.unknown_form(form));
                }
                let ty = self.kinds(form, "b", 32)?;
                self.count(form, operands, 3)?;
                let (value, predicate) = first(operands);
                if predicate.is_some() && !all {
                    return Err(self.bad(form, "only match.all has a predicate"));
                }
                let mut made = blank(Op::Match { all }, ty.bits);
                made.a = self.value(form, &operands[1], ty)?;
                made.b = self.value(form, &operands[2], word)?;
                made.d = self.result(form, &value, 32)?;
                made.x = self.result(form, &predicate.unwrap_or(Operand::Name("_")), 1)?;
                Ok(made)
            }
            _ => {
                let op = form.pick(ATOMICS).filter(|op| {
                    matches!(op, Atomic::Add | Atomic::Min | Atomic::Max | Atomic::And | Atomic::Or | Atomic::Xor)
                });
                let op = op.ok_or_else(|| self.unknown_form(form))?;
                let kinds = if matches!(op, Atomic::Add | Atomic::Min | Atomic::Max) { "us" } else { "b" };
                let ty = self.kinds(form, kinds, 32)?;
                if ty.bits != 32 {
                    return Err(self.unknown_form(form));
                }
                self.plain(form, Op::Reduce { op, signed: ty.signed() }, operands, &[ty, ty, word])
            }
        }
    }

    fn shuffle(
        &self,
        form: &mut Form<'_, 'a>,
        kind: Shuffle,
        (value, predicate): (Operand<'a>, Option<Operand<'a>>),
        operands: &[Operand<'a>],
    ) -> Result<Instr, Error> {
        let word = Type { kind: 'b', bits: 32 };
        if self.ty(form)? != word {
            return Err(self.unknown_form(form));
        }
        self.count(form, operands, 5)?;
        let mut made = blank(Op::Shuffle(kind), 32);
        made.a = self.value(form, &operands[1], word)?;
        made.b = self.value(form, &operands[2], word)?;
        made.c = self.value(form, &operands[3], word)?;
        made.x = self.value(form, &operands[4], word)?;
        made.d = self.result(form, &value, 32)?;
        made.imm = match predicate {
            Some(predicate) => i32::from(self.result(form, &predicate, 1)?),
            None => -1,
        };
        Ok(made)
    }
}
