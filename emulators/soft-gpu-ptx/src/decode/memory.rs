//! Loads, stores and atomics.

use super::form::{ATOMICS, Form, Instr, SCOPES, SPACES, blank};
use crate::code::{Atomic, Op, Order, Scope, Space};
use crate::error::Error;
use crate::operand::{Operand, Type};
use crate::parse::parser::Parser;

const CACHES: &[(&str, ())] =
    &[("ca", ()), ("cg", ()), ("cs", ()), ("lu", ()), ("cv", ()), ("wb", ()), ("wt", ()), ("nc", ())];
/// Cache hints, which don't affect values.
const HINTS: &[(&str, ())] = &[
    ("L1::no_allocate", ()),
    ("L1::evict_normal", ()),
    ("L1::evict_unchanged", ()),
    ("L1::evict_first", ()),
    ("L1::evict_last", ()),
    ("L2::64B", ()),
    ("L2::128B", ()),
    ("L2::256B", ()),
];

impl<'a> Parser<'a> {
    /// Decodes a load or store.
    pub(super) fn access(
        &self,
        form: &mut Form<'_, 'a>,
        store: bool,
        operands: &[Operand<'a>],
    ) -> Result<Instr, Error> {
        let mut order = Order::Weak;
        let mut scope = Scope::Block;
        let strong = if store { ("release", Order::Release) } else { ("acquire", Order::Acquire) };
        if form.take("mmio") {
            if !form.take("relaxed") || !form.take("sys") {
                return Err(self.unknown_form(form));
            }
            (order, scope) = (Order::Mmio, Scope::System);
        } else if form.take("volatile") {
            (order, scope) = (Order::Volatile, Scope::System);
        } else if !form.take("weak")
            && let Some(given) = form.pick(&[("relaxed", Order::Relaxed), strong])
        {
            order = given;
            scope = form.pick(SCOPES).ok_or_else(|| self.unknown_form(form))?;
        }
        // ptxas takes these in any order.
        let (mut space, mut policy) = (None, false);
        loop {
            let found = form.pick(SPACES);
            if space.is_some() && found.is_some() {
                return Err(self.unknown_form(form));
            }
            space = space.or(found);
            let hint = form.take("L2::cache_hint");
            policy |= hint;
            if found.is_none() && !hint && form.pick(CACHES).is_none() && form.pick(HINTS).is_none() {
                break;
            }
        }
        let space = space.unwrap_or(Space::Generic);
        let mut count = form.pick(&[("v2", 2), ("v4", 4)]).unwrap_or(1u8);
        let mut ty = self.ty(form)?;
        // 128 bits are two registers of 64.
        let wide = count == 1 && ty.bits == 128;
        if wide {
            (count, ty) = (2, Type { kind: 'b', bits: 64 });
        }
        if !(8..=64).contains(&ty.bits) || u32::from(count) * u32::from(ty.bits) > 128 {
            return Err(self.unknown_form(form));
        }
        let kernel_constant = store && space == Space::Constant;
        let narrow = order >= Order::Relaxed && matches!(space, Space::Param | Space::Local | Space::Constant);
        if kernel_constant || narrow {
            return Err(self.unknown_form(form));
        }
        self.count(form, operands, if policy { 3 } else { 2 })?;
        if policy {
            self.value(form, &operands[2], Type { kind: 'b', bits: 64 })?;
        }
        let (place, values) = if store { (&operands[0], &operands[1]) } else { (&operands[1], &operands[0]) };
        let place = self.place_of(form, place, space)?;
        let mut slots = [0; 4];
        let mut width = ty.bits;
        let one = [values.clone()];
        let values = match values {
            value if wide => {
                [slots[0], slots[1]] = self.wide(form, value)?;
                &[]
            }
            Operand::Vector(values) if count > 1 || values.len() == 1 => &values[..],
            _ => &one,
        };
        if !wide && values.len() != usize::from(count) {
            return Err(self.bad(form, format!("the vector has {count} registers")));
        }
        for (slot, value) in slots.iter_mut().zip(values) {
            (*slot, width) =
                if store { self.value_of(form, value, ty, true)? } else { self.target(form, value, ty.bits, true)? };
        }
        let space = place.space;
        let mut made = if store {
            blank(Op::Store { space, order, scope, count }, ty.bits)
        } else {
            blank(Op::Load { space, order, scope, signed: ty.signed(), count }, ty.bits)
        };
        [made.d, made.b, made.c, made.x] = slots;
        (made.a, made.imm, made.extra) = (place.slot, place.offset, width);
        Ok(made)
    }

    pub(super) fn atomic(&self, form: &mut Form<'_, 'a>, red: bool, operands: &[Operand<'a>]) -> Result<Instr, Error> {
        let orders = &[
            ("relaxed", Order::Relaxed),
            ("acquire", Order::Acquire),
            ("release", Order::Release),
            ("acq_rel", Order::AcquireRelease),
        ];
        // ptxas takes the modifiers in any order.
        let (mut order, mut scope, mut space, mut op) = (None, None, None, None);
        loop {
            order = order.or_else(|| form.pick(orders));
            scope = scope.or_else(|| form.pick(SCOPES));
            space = space.or_else(|| form.pick(SPACES));
            if op.is_some() {
                break;
            }
            op = Some(form.pick(ATOMICS).ok_or_else(|| self.unknown_form(form))?);
        }
        let (scope, space) = (scope.unwrap_or(Scope::Gpu), space.unwrap_or(Space::Generic));
        let op = op.ok_or_else(|| self.unknown_form(form))?;
        let ty = self.kinds(form, "bus", 32)?;
        let fits = match op {
            Atomic::Add => matches!((ty.kind, ty.bits), ('u', _) | ('s', 32)),
            Atomic::Exchange | Atomic::CompareExchange | Atomic::And | Atomic::Or | Atomic::Xor => ty.kind == 'b',
            Atomic::Min | Atomic::Max => ty.kind != 'b',
            Atomic::Increment | Atomic::Decrement => (ty.kind, ty.bits) == ('u', 32),
        };
        let own = matches!(space, Space::Generic | Space::Global | Space::Shared);
        let returns = !matches!(op, Atomic::Exchange | Atomic::CompareExchange);
        if !fits || !own || red && (!returns || matches!(order, Some(Order::Acquire | Order::AcquireRelease))) {
            return Err(self.unknown_form(form));
        }
        let rest = if red {
            operands
        } else {
            operands.get(1..).ok_or_else(|| self.bad(form, "the instruction has operands"))?
        };
        self.count(form, rest, if op == Atomic::CompareExchange { 3 } else { 2 })?;
        let place = self.place_of(form, &rest[0], space)?;
        let order = order.unwrap_or(Order::Relaxed);
        let mut made = blank(Op::Atomic { op, space: place.space, order, scope, signed: ty.signed() }, ty.bits);
        (made.a, made.imm) = (place.slot, place.offset);
        made.b = self.value(form, &rest[1], ty)?;
        if let Some(new) = rest.get(2) {
            made.c = self.value(form, new, ty)?;
        }
        let sink = Operand::Name("_");
        made.d = self.result(form, if red { &sink } else { &operands[0] }, ty.bits)?;
        Ok(made)
    }
}
