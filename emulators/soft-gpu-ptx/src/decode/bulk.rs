//! Mbarriers, bulk copies and fences.

use super::form::{Address, Form, Instr, SCOPES, SPACES, blank};
use crate::code::{Mbarrier, Op, Order, Scope, Space};
use crate::error::{Error, Kind};
use crate::operand::{Operand, Type};
use crate::parse::parser::Parser;

const WORD: Type = Type { kind: 'u', bits: 32 };
const LONG: Type = Type { kind: 'b', bits: 64 };

impl<'a> Parser<'a> {
    pub(super) fn fence(
        &self,
        form: &mut Form<'_, 'a>,
        membar: bool,
        operands: &[Operand<'a>],
    ) -> Result<Instr, Error> {
        self.count(form, operands, 0)?;
        if membar {
            let scope = form.pick(&[("cta", Scope::Block), ("gl", Scope::Gpu), ("sys", Scope::System)]);
            let scope = scope.ok_or_else(|| self.unknown_form(form))?;
            self.done(form)?;
            return Ok(blank(Op::Fence { order: Order::Sequential, scope }, 64));
        }
        if form.take("proxy") {
            if !form.take("async") {
                return Err(self.unknown_form(form));
            }
            let places =
                &[("global", (false, true)), ("shared::cta", (true, false)), ("shared::cluster", (true, false))];
            let (shared, global) = form.pick(places).unwrap_or((true, true));
            self.done(form)?;
            return Ok(blank(Op::ProxyFence { shared, global }, 64));
        }
        if form.take("mbarrier_init") {
            if !form.take("release") || !form.take("cluster") {
                return Err(self.unknown_form(form));
            }
            self.done(form)?;
            return Ok(blank(Op::MbarrierFence, 64));
        }
        let orders: &[(&str, Order)] = &[
            ("sc", Order::Sequential),
            ("acq_rel", Order::AcquireRelease),
            ("acquire", Order::Acquire),
            ("release", Order::Release),
        ];
        // ptxas takes them in either order. A fence without an order is acq_rel.
        let mut order = form.pick(orders);
        let scope = form.pick(SCOPES).ok_or_else(|| self.unknown_form(form))?;
        order = order.or_else(|| form.pick(orders));
        self.done(form)?;
        Ok(blank(Op::Fence { order: order.unwrap_or(Order::AcquireRelease), scope }, 64))
    }

    pub(super) fn mbarrier(&self, form: &mut Form<'_, 'a>, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let wait = |tries| Mbarrier::Wait { parity: false, tries };
        let op = form.pick(&[
            ("init", Mbarrier::Init),
            ("inval", Mbarrier::Invalidate),
            ("arrive", Mbarrier::Arrive { expects: false }),
            ("expect_tx", Mbarrier::Expect),
            ("try_wait", wait(true)),
            ("test_wait", wait(false)),
        ]);
        let mut op = op.ok_or_else(|| self.unknown_form(form))?;
        match &mut op {
            Mbarrier::Arrive { expects } => *expects = form.take("expect_tx"),
            Mbarrier::Wait { parity, .. } => *parity = form.take("parity"),
            _ => {}
        }
        let natural = match op {
            Mbarrier::Arrive { .. } => ("release", Order::Release),
            Mbarrier::Wait { .. } => ("acquire", Order::Acquire),
            _ => ("relaxed", Order::Relaxed),
        };
        let mut order = natural.1;
        let mut scope = Scope::Block;
        if let Some(given) = form.pick(&[natural, ("relaxed", Order::Relaxed)]) {
            order = given;
            scope =
                form.pick(&[("cta", Scope::Block), ("cluster", Scope::Gpu)]).ok_or_else(|| self.unknown_form(form))?;
        }
        if form.take("shared::cluster") {
            return Err(self.no_distributed(form));
        }
        let space = form.pick(SPACES).unwrap_or(Space::Generic);
        let ty = self.ty(form)?;
        if ty != LONG || !matches!(space, Space::Generic | Space::Shared) {
            return Err(self.unknown_form(form));
        }
        let mut made = blank(Op::Mbarrier { op, space, order, scope }, 64);
        let given = match (op, operands) {
            (Mbarrier::Init | Mbarrier::Expect, [place, number]) => Some((place, number)),
            (Mbarrier::Invalidate, [place]) => Some((place, &Operand::Integer(0))),
            (Mbarrier::Arrive { expects: false }, [_, place]) => Some((place, &Operand::Integer(1))),
            (Mbarrier::Arrive { .. }, [_, place, number]) => Some((place, number)),
            (Mbarrier::Wait { .. }, [_, place, number]) => Some((place, number)),
            (Mbarrier::Wait { tries: true, .. }, [_, place, number, hint]) => {
                self.value(form, hint, WORD)?;
                Some((place, number))
            }
            _ => None,
        };
        let (place, number) = given.ok_or_else(|| self.bad(form, "the number of operands is wrong"))?;
        let ty = if matches!(op, Mbarrier::Wait { parity: false, .. }) { LONG } else { WORD };
        made.b = self.value(form, number, ty)?;
        let place = self.place_of(form, place, space)?;
        (made.a, made.imm) = (place.slot, place.offset);
        match op {
            Mbarrier::Arrive { .. } => made.d = self.result(form, &operands[0], 64)?,
            Mbarrier::Wait { .. } => made.d = self.result(form, &operands[0], 1)?,
            _ => {}
        }
        Ok(made)
    }

    pub(super) fn no_distributed(&self, form: &Form<'_, '_>) -> Error {
        self.error(
            Kind::Form,
            form.line,
            form.text,
            "the interpreter has no distributed shared memory and no barriers of clusters: a block reaches only its own shared memory",
        )
    }

    /// Decodes `cp.async.bulk`.
    pub(super) fn bulk(&self, form: &mut Form<'_, 'a>, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        if !form.take("async") || !form.take("bulk") {
            return Err(self.unknown_form(form));
        }
        if form.take("commit_group") {
            self.done(form)?;
            self.count(form, operands, 0)?;
            return Ok(blank(Op::BulkCommit, 64));
        }
        if form.take("wait_group") {
            let read = form.take("read");
            self.done(form)?;
            let [Operand::Integer(most)] = *operands else {
                return Err(self.bad(form, "the number of groups is a constant"));
            };
            let mut made = blank(Op::BulkWait { read }, 64);
            made.imm = i32::try_from(most).map_err(|_| self.bad(form, "the number of groups is too large"))?;
            return Ok(made);
        }
        let to_shared = form.pick(&[("shared::cluster", true), ("shared::cta", true), ("global", false)]);
        let to_shared = to_shared.ok_or_else(|| self.unknown_form(form))?;
        if form.take("shared::cta") == to_shared {
            return Err(if to_shared { self.no_distributed(form) } else { self.unknown_form(form) });
        }
        let known = if to_shared {
            form.take("global") && form.take("mbarrier::complete_tx::bytes")
        } else {
            form.take("bulk_group")
        };
        let hint = form.take("L2::cache_hint");
        if !known {
            return Err(self.unknown_form(form));
        }
        self.done(form)?;
        self.count(form, operands, 3 + usize::from(to_shared) + usize::from(hint))?;
        let (near, far) = if to_shared { (Space::Shared, Space::Global) } else { (Space::Global, Space::Shared) };
        let mut made = blank(Op::Bulk { to_shared }, 64);
        made.a = self.place_of(form, &operands[0], near).and_then(|place| self.flat(form, place))?;
        made.b = self.place_of(form, &operands[1], far).and_then(|place| self.flat(form, place))?;
        made.c = self.value(form, &operands[2], WORD)?;
        if to_shared {
            let place = self.place_of(form, &operands[3], Space::Shared)?;
            made.x = self.flat(form, place)?;
        }
        if hint {
            self.value(form, &operands[operands.len() - 1], LONG)?;
        }
        Ok(made)
    }

    /// Returns a slot that holds the address, with its offset.
    fn flat(&self, form: &mut Form<'_, 'a>, place: Address) -> Result<u16, Error> {
        if place.offset == 0 {
            return Ok(place.slot);
        }
        let mut add = blank(Op::Add, 64);
        add.a = place.slot;
        add.b = self.constant(form.context, place.offset as u64, form.line)?;
        add.d = self.temporary(form.context, form.line)?;
        self.emit(form, add)?;
        Ok(add.d)
    }
}
