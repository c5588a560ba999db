//! Protection domains, registered memory and address handles.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use soft_nic::address::Gid;
use soft_nic::card::region::{Access, Keys, Memory};
use soft_nic::card::{Card, Core};
use soft_nic::location::Location;
use soft_nic::memory::{self, Mapping};

use crate::bindings as ib;
use crate::context::{Context, PORT};
use crate::guard::{Errno, object, refuse, status};
use crate::objects::{self, Object, Open};
use crate::parent::Parent;
use crate::uses::Uses;

#[repr(C)]
pub(crate) struct Pd {
    raw: ib::ibv_pd,
    pub(crate) card: Arc<Card>,
    /// Number on the card.
    pub(crate) number: u32,
    /// A parent domain is the domain that it holds under another pointer.
    pub(crate) parent: Option<Parent>,
    pub(crate) uses: Uses,
}

// SAFETY: no other type has this kind.
unsafe impl Object for Pd {
    const KIND: &'static str = "protection domain";
    type Raw = ib::ibv_pd;
}

impl Pd {
    /// A parent domain of this one.
    pub(crate) fn over(pd: &Self, parent: Parent) -> Self {
        let raw = ib::ibv_pd { context: pd.raw.context, handle: pd.raw.handle };
        Self { raw, card: pd.card.clone(), number: pd.number, parent: Some(parent), uses: Uses::default() }
    }

    pub(crate) fn context(&self) -> *mut ib::ibv_context {
        self.raw.context
    }

    /// Ends the use of this domain by an object.
    pub(crate) fn end_use(&self) {
        self.uses.end();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(raw: Open<Context>) -> *mut ib::ibv_pd {
    object("ibv_alloc_pd", || {
        let open = raw.get()?;
        let number = open.card.new_domain();
        open.uses.begin();
        let pd = Pd {
            raw: ib::ibv_pd { context: raw.pointer(), handle: number },
            card: open.card.clone(),
            number,
            parent: None,
            uses: Uses::default(),
        };
        Ok(objects::give(Box::new(pd)))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(raw: *mut ib::ibv_pd) -> c_int {
    objects::destroy("ibv_dealloc_pd", raw, |pd: &Pd| {
        pd.uses.none()?;
        match &pd.parent {
            Some(parent) => parent.end()?,
            // SAFETY: the context of a domain is open.
            None => unsafe { Open::<Context>::at(pd.raw.context) }.get()?.uses.end(),
        }
        Ok(())
    })
}

#[repr(C)]
struct Mr {
    raw: ib::ibv_mr,
    keys: Keys,
}

// SAFETY: no other type has this kind.
unsafe impl Object for Mr {
    const KIND: &'static str = "memory region";
    type Raw = ib::ibv_mr;
}

const LOCAL_WRITE: c_uint = ib::IBV_ACCESS_LOCAL_WRITE;
const REMOTE_WRITE: c_uint = ib::IBV_ACCESS_REMOTE_WRITE;
const REMOTE_READ: c_uint = ib::IBV_ACCESS_REMOTE_READ;
/// `IBV_ACCESS_OPTIONAL_RANGE`: rights that a card may ignore.
const OPTIONAL: c_uint = 0x3ff0_0000;

/// # Errors
/// `EOPNOTSUPP` for rights that the card lacks, `EINVAL` for remote writes without local ones.
fn access_of(asked: c_uint) -> Result<Access, Errno> {
    if asked & !(LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | OPTIONAL) != 0 {
        return Err(Errno::UNSUPPORTED);
    }
    let has = |bit| asked & bit != 0;
    if has(REMOTE_WRITE) && !has(LOCAL_WRITE) {
        return Err(Errno::INVAL);
    }
    Ok(Access { local_write: has(LOCAL_WRITE), remote_read: has(REMOTE_READ), remote_write: has(REMOTE_WRITE) })
}

fn register(raw: Open<Pd>, addr: *mut c_void, memory: Memory, access: Access) -> Result<*mut ib::ibv_mr, Errno> {
    let pd = raw.get()?;
    let length = memory.len as usize;
    let keys = {
        let mut core = pd.card.lock();
        let Core { regions, random, .. } = &mut *core;
        regions.insert(pd.number, access, memory, random).ok_or(Errno::NOMEM)?
    };
    pd.uses.begin();
    let mr = ib::ibv_mr {
        context: pd.raw.context,
        pd: raw.pointer(),
        addr,
        length,
        handle: keys.lkey,
        lkey: keys.lkey,
        rkey: keys.rkey,
    };
    Ok(objects::give(Box::new(Mr { raw: mr, keys })))
}

fn register_address(
    pd: Open<Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ib::ibv_mr, Errno> {
    let access = access_of(access)?;
    if length == 0 {
        return Err(Errno::INVAL);
    }
    memory::populate(addr as usize, length, access.local_write)?;
    let memory = Memory { base: iova, len: length as u64, at: Location::Host(addr.cast()), _map: None };
    register(pd, addr, memory, access)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(pd: Open<Pd>, addr: *mut c_void, length: usize, access: c_int) -> *mut ib::ibv_mr {
    object("ibv_reg_mr", || register_address(pd, addr, length, addr as u64, access as c_uint))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: Open<Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ib::ibv_mr {
    object("ibv_reg_mr_iova", || register_address(pd, addr, length, iova, access as c_uint))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: Open<Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ib::ibv_mr {
    object("ibv_reg_mr_iova2", || register_address(pd, addr, length, iova, access))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: Open<Pd>,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ib::ibv_mr {
    object("ibv_reg_dmabuf_mr", || {
        let access = access_of(access as c_uint)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        if fd < 0 {
            return Err(Errno(libc::EBADF));
        }
        // SAFETY: the program keeps the descriptor open during the call; the mapping does not need it afterwards.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let map = Mapping::shared(fd, offset, length)?;
        let memory = Memory { base: iova, len: length as u64, at: Location::Host(map.as_ptr()), _map: Some(map) };
        register(pd, iova as usize as *mut c_void, memory, access)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(raw: *mut ib::ibv_mr) -> c_int {
    objects::destroy("ibv_dereg_mr", raw, |mr: &Mr| {
        // SAFETY: a domain counts its regions and is open.
        let pd = unsafe { Open::<Pd>::at(mr.raw.pd) }.get()?;
        // From here on packets do not reach the memory. Outstanding requests that need it complete in error.
        let memory = pd.card.lock().regions.remove(mr.keys);
        drop(memory);
        pd.end_use();
        Ok(())
    })
}

/// An address handle: the program's, and that of the card.
#[repr(C)]
pub(crate) struct Ah {
    raw: ib::ibv_ah,
    pub(crate) number: u16,
}

// SAFETY: no other type has this kind.
unsafe impl Object for Ah {
    const KIND: &'static str = "address handle";
    type Raw = ib::ibv_ah;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah(raw: Open<Pd>, attr: Option<&ib::ibv_ah_attr>) -> *mut ib::ibv_ah {
    object("ibv_create_ah", || {
        let pd = raw.get()?;
        let attr = attr.ok_or(Errno::INVAL)?;
        if attr.port_num != PORT {
            return Err(Errno::INVAL);
        }
        // SAFETY: all bytes of the union are a GID's.
        let gid = Gid::from_bytes(unsafe { attr.grh.dgid.raw })
            .map_err(|error| refuse("ibv_create_ah", Errno::INVAL, format_args!("the destination GID {error}")))?;
        let number = pd.card.lock().open_handle(pd.number, gid)?;
        pd.uses.begin();
        let ah = ib::ibv_ah { context: pd.raw.context, pd: raw.pointer(), handle: number.into() };
        Ok(objects::give(Box::new(Ah { raw: ah, number })))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_ah(raw: *mut ib::ibv_ah) -> c_int {
    objects::destroy("ibv_destroy_ah", raw, |ah: &Ah| {
        // SAFETY: a domain counts its handles and is open.
        let pd = unsafe { Open::<Pd>::at(ah.raw.pd) }.get()?;
        pd.card.lock().close_handle(ah.number);
        pd.end_use();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_ah(ah: Open<Ah>, attr: *mut ib::efadv_ah_attr, size: u32) -> c_int {
    status("efadv_query_ah", || {
        let ah = ah.get()?;
        if (size as usize) < std::mem::offset_of!(ib::efadv_ah_attr, reserved) {
            return Err(Errno::INVAL);
        }
        let whole = ib::efadv_ah_attr { ahn: ah.number, ..ib::efadv_ah_attr::default() };
        // SAFETY: the program gives `size` writable bytes.
        unsafe { crate::context::give(&whole, attr, size as usize) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_mr(mr: *mut ib::ibv_mr, attr: *mut ib::efadv_mr_attr, size: u32) -> c_int {
    status("efadv_query_mr", || {
        if mr.is_null() || (size as usize) < size_of::<ib::efadv_mr_attr>() {
            return Err(Errno::INVAL);
        }
        // The software card has one way to memory, so no interconnect has a number.
        // SAFETY: the program gives `size` writable bytes.
        unsafe { crate::context::give(&ib::efadv_mr_attr::default(), attr, size as usize) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_mapped_to_card() {
        assert_eq!(access_of(0), Ok(Access::default()));
        let all = Access { local_write: true, remote_read: true, remote_write: true };
        assert_eq!(access_of(LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE | 1 << 20), Ok(all));
        assert_eq!(access_of(REMOTE_WRITE), Err(Errno::INVAL));
        assert_eq!(access_of(ib::IBV_ACCESS_REMOTE_ATOMIC), Err(Errno::UNSUPPORTED));
    }
}
