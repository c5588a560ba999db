//! Registered memory.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

use soft_nic::card::region::{Access, Keys, Memory};
use soft_nic::location::Location;
use soft_nic::memory;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::guard::{Errno, object, status};
use crate::objects::{self, Held, Open, verbs_object};
use crate::params::{Size, Struct};
use crate::pd::Pd;

/// What follows `ibv_mr` in rdma-core's private `struct verbs_mr`. libfabric's unit tests read it.
#[repr(C)]
struct DriverPart {
    mr_type: c_uint,
    access: c_uint,
}

/// `IBV_MR_TYPE_*` from rdma-core's driver.h.
const TYPE_MR: c_uint = 0;
const TYPE_DMABUF: c_uint = 3;

#[repr(C)]
struct Mr {
    raw: ib::ibv_mr,
    driver: DriverPart,
    pd: Held<Pd>,
    keys: Keys,
    uses: Uses,
}

verbs_object!(Mr { raw: ib::ibv_mr }, "memory region");

const LOCAL_WRITE: c_uint = ib::IBV_ACCESS_LOCAL_WRITE;
const REMOTE_WRITE: c_uint = ib::IBV_ACCESS_REMOTE_WRITE;
const REMOTE_READ: c_uint = ib::IBV_ACCESS_REMOTE_READ;
/// `IBV_ACCESS_OPTIONAL_RANGE`: access flags that a card may ignore.
const OPTIONAL: c_uint = 0x3ff0_0000;

/// # Errors
/// `EOPNOTSUPP` for access that the card lacks, `EINVAL` for remote writes without local ones.
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

fn register(raw: Open<Pd>, addr: *mut c_void, memory: Memory, driver: DriverPart) -> Result<*mut ib::ibv_mr, Errno> {
    let access = access_of(driver.access)?;
    let pd = raw.get()?;
    let length = memory.len as usize;
    let keys = { pd.card()?.lock().open_region(pd.number, access, memory).ok_or(Errno::NOMEM)? };
    let mr = ib::ibv_mr {
        context: pd.context_pointer(),
        pd: raw.pointer(),
        addr,
        length,
        handle: keys.lkey,
        lkey: keys.lkey,
        rkey: keys.rkey,
    };
    Ok(objects::give(Box::new(Mr { raw: mr, driver, pd: Held::new(pd), keys, uses: Uses::default() })))
}

fn register_address(
    pd: Open<Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ib::ibv_mr, Errno> {
    let is_written = access_of(access)?.local_write;
    if length == 0 {
        return Err(Errno::INVAL);
    }
    memory::populate(addr as usize, length, is_written)?;
    let memory = Memory { base: iova, len: length as u64, at: Location::Host(addr.cast()), _map: None };
    register(pd, addr, memory, DriverPart { mr_type: TYPE_MR, access })
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
        let driver = DriverPart { mr_type: TYPE_DMABUF, access: access as c_uint };
        access_of(driver.access)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        if fd < 0 {
            return Err(Errno(libc::EBADF));
        }
        // SAFETY: the program keeps the descriptor open during the call; the mapping doesn't need it afterwards.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let (at, map) = Location::of_dma_buf(fd, offset, length, None)?;
        let memory = Memory { base: iova, len: length as u64, at, _map: map };
        register(pd, iova as usize as *mut c_void, memory, driver)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(raw: *mut ib::ibv_mr) -> c_int {
    objects::destroy("ibv_dereg_mr", raw, |mr: &Mr| {
        let memory = mr.pd.card()?.lock().close_region(mr.keys);
        drop(memory);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_mr(mr: *mut ib::ibv_mr, attr: Struct<ib::efadv_mr_attr>, size: Size<u32>) -> c_int {
    status("efadv_query_mr", || {
        if mr.is_null() || size.bytes() < size_of::<ib::efadv_mr_attr>() {
            return Err(Errno::INVAL);
        }
        // The software card has only one path to memory, so no interconnect has an id.
        attr.fill(&ib::efadv_mr_attr::default(), size)
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
