//! Thread domains and parent domains. They let a driver leave out locks; this library keeps its own, and checks the uses as rdma-core's efa does.

use std::ffi::c_int;

use crate::bindings as ib;
use crate::context::Context;
use crate::guard::{Errno, object};
use crate::objects::{self, Object, Open};
use crate::pd::Pd;
use crate::uses::Uses;

/// A thread domain.
#[repr(C)]
pub(crate) struct Td {
    raw: ib::ibv_td,
    /// Parent domains of it.
    uses: Uses,
}

// SAFETY: no other type has this kind.
unsafe impl Object for Td {
    const KIND: &'static str = "thread domain";
    type Raw = ib::ibv_td;
}

/// What a parent domain holds.
pub(crate) struct Parent {
    of: *mut ib::ibv_pd,
    td: *mut Td,
}

/// # Safety
/// `td` is null or an open thread domain.
unsafe fn td_at<'a>(td: *const Td) -> Option<&'a Td> {
    // SAFETY: this function's caller passes null or an open domain.
    unsafe { td.as_ref() }
}

pub(crate) unsafe extern "C" fn alloc_td(raw: Open<Context>, attr: Option<&ib::ibv_td_init_attr>) -> *mut ib::ibv_td {
    object("ibv_alloc_td", || {
        if attr.ok_or(Errno::INVAL)?.comp_mask != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        raw.get()?.uses.begin();
        let td = Td { raw: ib::ibv_td { context: raw.pointer() }, uses: Uses::default() };
        Ok(objects::give(Box::new(td)))
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(raw: *mut ib::ibv_td) -> c_int {
    objects::destroy("ibv_dealloc_td", raw, |td: &Td| {
        td.uses.none()?;
        // SAFETY: the context of a domain is open.
        unsafe { Open::<Context>::at(td.raw.context) }.get()?.uses.end();
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    raw: Open<Context>,
    attr: Option<&ib::ibv_parent_domain_init_attr>,
) -> *mut ib::ibv_pd {
    object("ibv_alloc_parent_domain", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        // SAFETY: the program passes null or an open domain.
        let pd = unsafe { Open::<Pd>::at(attr.pd) }.get()?;
        if attr.comp_mask & !ib::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let td: *mut Td = attr.td.cast();
        // SAFETY: the program passes null or an open domain.
        let thread = unsafe { td_at(td) };
        let foreign = thread.is_some_and(|thread| thread.raw.context != raw.pointer());
        if pd.parent.is_some() || pd.context() != raw.pointer() || foreign {
            return Err(Errno::INVAL);
        }
        if let Some(thread) = thread {
            thread.uses.begin();
        }
        pd.uses.begin();
        Ok(objects::give(Box::new(Pd::over(pd, Parent { of: attr.pd, td }))))
    })
}

impl Parent {
    /// Ends the uses of a parent domain that is freed.
    pub(crate) fn end(&self) -> Result<(), Errno> {
        // SAFETY: a parent domain keeps its thread domain open.
        if let Some(thread) = unsafe { td_at(self.td) } {
            thread.uses.end();
        }
        // SAFETY: a parent domain keeps its protection domain open.
        unsafe { Open::<Pd>::at(self.of) }.get()?.end_use();
        Ok(())
    }
}
