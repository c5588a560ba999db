//! Protection domains. Thread domains and parent domains let a driver skip locks; this library keeps its locks, but
//! checks the domains' uses as rdma-core's efa does.

use std::ffi::c_int;

use soft_nic::card::Card;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::context::Context;
use crate::guard::{Errno, object};
use crate::objects::{self, Held, Open, verbs_object};

#[repr(C)]
pub(crate) struct Pd {
    raw: ib::ibv_pd,
    pub(crate) context: Held<Context>,
    /// The card's number for it.
    pub(crate) number: u32,
    /// Set if this is a parent domain, which is another pointer to the domain it holds.
    parent: Option<Parent>,
    uses: Uses,
}

/// What a parent domain holds.
struct Parent {
    _of: Held<Pd>,
    _td: Option<Held<Td>>,
}

verbs_object!(Pd { raw: ib::ibv_pd }, "protection domain", {
    const SHARED_WITH_CHILDREN: bool = true;
});

impl Pd {
    /// Returns the context pointer that its objects' structs hold.
    pub(crate) fn context_pointer(&self) -> *mut ib::ibv_context {
        self.raw.context
    }

    pub(crate) fn card(&self) -> Result<&Card, Errno> {
        self.context.card()
    }

    pub(crate) fn is_parent(&self) -> bool {
        self.parent.is_some()
    }
}

/// Hands the program a domain that has this number on the card.
fn give(raw: Open<Context>, number: u32, parent: Option<Parent>) -> Result<*mut ib::ibv_pd, Errno> {
    let context = Held::new(raw.get()?);
    let raw = ib::ibv_pd { context: raw.pointer(), handle: number };
    Ok(objects::give(Box::new(Pd { raw, context, number, parent, uses: Uses::default() })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(raw: Open<Context>) -> *mut ib::ibv_pd {
    object("ibv_alloc_pd", || give(raw, raw.get()?.card()?.new_domain(), None))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(raw: *mut ib::ibv_pd) -> c_int {
    objects::destroy("ibv_dealloc_pd", raw, |_: &Pd| Ok(()))
}

/// A thread domain.
#[repr(C)]
struct Td {
    raw: ib::ibv_td,
    context: Held<Context>,
    /// The parent domains that use it.
    uses: Uses,
}

verbs_object!(Td { raw: ib::ibv_td }, "thread domain");

pub(crate) unsafe extern "C" fn alloc_td(raw: Open<Context>, attr: Option<&ib::ibv_td_init_attr>) -> *mut ib::ibv_td {
    object("ibv_alloc_td", || {
        if attr.ok_or(Errno::INVAL)?.comp_mask != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let context = Held::new(raw.get()?);
        let td = Td { raw: ib::ibv_td { context: raw.pointer() }, context, uses: Uses::default() };
        Ok(objects::give(Box::new(td)))
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(raw: *mut ib::ibv_td) -> c_int {
    objects::destroy("ibv_dealloc_td", raw, |_: &Td| Ok(()))
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    raw: Open<Context>,
    attr: Option<&ib::ibv_parent_domain_init_attr>,
) -> *mut ib::ibv_pd {
    object("ibv_alloc_parent_domain", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        let open = raw.get()?;
        let pd: &Pd = raw.named(attr.pd)?.get()?;
        if attr.comp_mask & !ib::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let td: Option<&Td> = if attr.td.is_null() { None } else { Some(raw.named(attr.td)?.get()?) };
        if pd.is_parent() || !pd.context.is(open) || td.is_some_and(|td| !td.context.is(open)) {
            return Err(Errno::INVAL);
        }
        give(raw, pd.number, Some(Parent { _of: Held::new(pd), _td: td.map(Held::new) }))
    })
}
