//! Address handles.

use std::ffi::c_int;
use std::mem::offset_of;

use soft_nic::address::Gid;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::context::PORT;
use crate::guard::{Errno, object, refuse, status};
use crate::objects::{self, Held, Open, verbs_object};
use crate::params::{Size, Struct};
use crate::pd::Pd;

/// An address handle: the program's and the card's.
#[repr(C)]
pub(crate) struct Ah {
    raw: ib::ibv_ah,
    pd: Held<Pd>,
    pub(crate) number: u16,
    uses: Uses,
}

verbs_object!(Ah { raw: ib::ibv_ah }, "address handle");

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah(raw: Open<Pd>, attr: Option<&ib::ibv_ah_attr>) -> *mut ib::ibv_ah {
    object("ibv_create_ah", || {
        let pd = raw.get()?;
        let attr = attr.ok_or(Errno::INVAL)?;
        if attr.port_num != PORT {
            return Err(Errno::INVAL);
        }
        // SAFETY: any bytes in the union make a valid GID.
        let gid = Gid::from_bytes(unsafe { attr.grh.dgid.raw })
            .map_err(|error| refuse("ibv_create_ah", Errno::INVAL, format_args!("the destination GID {error}")))?;
        let number = pd.card()?.lock().open_handle(pd.number, gid)?;
        let ah = ib::ibv_ah { context: pd.context_pointer(), pd: raw.pointer(), handle: number.into() };
        Ok(objects::give(Box::new(Ah { raw: ah, pd: Held::new(pd), number, uses: Uses::default() })))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_ah(raw: *mut ib::ibv_ah) -> c_int {
    objects::destroy("ibv_destroy_ah", raw, |ah: &Ah| {
        ah.pd.card()?.lock().close_handle(ah.number);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_ah(ah: Open<Ah>, attr: Struct<ib::efadv_ah_attr>, size: Size<u32>) -> c_int {
    status("efadv_query_ah", || {
        let ah = ah.get()?;
        if size.bytes() < offset_of!(ib::efadv_ah_attr, reserved) {
            return Err(Errno::INVAL);
        }
        let whole = ib::efadv_ah_attr { ahn: ah.number, ..ib::efadv_ah_attr::default() };
        attr.fill(&whole, size)
    })
}
