//! `fid_mr`: registered memory.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::ptr;

use ferrogin_libfabric::bindings as fi;

use super::domain::Domain;
use super::guard::{Code, entry};
use super::library::version;
use super::object::{Object, give, head, object, take_back};
use super::unsupported;
use soft_nic::card::region::{Access, Keys, Memory};
use soft_nic::cuda::{CudaError, Driver};
use soft_nic::location::Location;
use soft_nic::log;
use soft_nic::memory::{self, Mapping};

#[repr(C)]
pub(super) struct Mr {
    fid: fi::fid_mr,
    domain: *const Domain,
    keys: Keys,
}

// SAFETY: repr(C), begins with fid_mr; this provider makes fids of this class here only.
unsafe impl Object for Mr {
    const CLASS: u32 = fi::FI_CLASS_MR;
}

impl Mr {
    pub(super) fn lkey(&self) -> u32 {
        self.keys.lkey
    }
}

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(unsupported::control),
    ops_open: Some(unsupported::ops_open),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

/// Rights that an application can ask for.
const RIGHTS: u64 = fi::FI_SEND | fi::FI_RECV | fi::FI_READ | fi::FI_WRITE | fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE;

fn access_of(asked: u64) -> Result<Access, Code> {
    if asked & !RIGHTS != 0 {
        return Err(Code::INVAL);
    }
    // No rights mean the rights of messages, as in libfabric's efa provider.
    let asked = if asked == 0 { fi::FI_SEND | fi::FI_RECV } else { asked };
    let has = |bits: u64| asked & bits != 0;
    Ok(Access {
        // Remote writing implies local writing.
        local_write: has(fi::FI_RECV | fi::FI_READ | fi::FI_REMOTE_WRITE),
        remote_read: has(fi::FI_REMOTE_READ),
        remote_write: has(fi::FI_REMOTE_WRITE),
    })
}

pub(super) unsafe extern "C" fn reg(
    fid: *mut fi::fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    _offset: u64,
    _key: u64,
    flags: u64,
    out: *mut *mut fi::fid_mr,
    context: *mut c_void,
) -> c_int {
    entry("fi_mr_reg", || {
        if flags != 0 {
            return Err(Code(fi::FI_EBADFLAGS));
        }
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(fid) }?;
        let access = access_of(access)?;
        let memory = by_address(buf as usize, len, access)?;
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { register(domain, memory, access, context, out) }
    })
}

pub(super) unsafe extern "C" fn regv(
    fid: *mut fi::fid,
    iov: *const fi::iovec,
    count: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    out: *mut *mut fi::fid_mr,
    context: *mut c_void,
) -> c_int {
    if iov.is_null() || count != 1 {
        return Code::INVAL.negative();
    }
    // SAFETY: not null, and the application states one iovec, which it keeps alive during the call.
    let iov = unsafe { *iov };
    // SAFETY: the application's arguments are passed on unchanged, and it keeps them valid during the call.
    unsafe { reg(fid, iov.iov_base, iov.iov_len, access, offset, key, flags, out, context) }
}

pub(super) unsafe extern "C" fn regattr(
    fid: *mut fi::fid,
    attr: *const fi::fi_mr_attr,
    flags: u64,
    out: *mut *mut fi::fid_mr,
) -> c_int {
    entry("fi_mr_regattr", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(fid) }?;
        if attr.is_null() {
            return Err(Code::INVAL);
        }
        if flags & !(fi::FI_MR_DMABUF | fi::FI_HMEM_DEVICE_ONLY | fi::FI_HMEM_HOST_ALLOC) != 0 {
            return Err(Code(fi::FI_EBADFLAGS));
        }
        // SAFETY: null, or attributes of the application, whose first fields every version has.
        let head = unsafe { attr.cast::<MrAttrHead>().read_unaligned() };
        let MrAttrHead { which, iov_count: count, access: asked, context, .. } = head;
        let access = access_of(asked)?;
        let memory = if flags & fi::FI_MR_DMABUF != 0 {
            if which.is_null() {
                return Err(Code::INVAL);
            }
            // SAFETY: the flag states that this union member is a fi_mr_dmabuf.
            by_dmabuf(unsafe { &*which.cast::<fi::fi_mr_dmabuf>() })?
        } else {
            if which.is_null() || count != 1 {
                return Err(Code::INVAL);
            }
            let mut on_gpu = false;
            if domain.caps & fi::FI_HMEM != 0 && domain.api_version() >= version(1, 9) {
                let iface = attr.wrapping_byte_add(offset_of!(fi::fi_mr_attr, iface));
                // SAFETY: attributes of this API version have the field.
                let iface = unsafe { iface.cast::<fi::fi_hmem_iface::Type>().read_unaligned() };
                on_gpu = match iface {
                    fi::fi_hmem_iface::FI_HMEM_SYSTEM => false,
                    fi::fi_hmem_iface::FI_HMEM_CUDA => true,
                    _ => return Err(Code::UNSUPPORTED),
                };
            }
            // SAFETY: not null, and the application states one iovec, which it keeps alive during the call.
            let iov = unsafe { *which.cast::<fi::iovec>() };
            if on_gpu {
                by_gpu_address(iov.iov_base as u64, iov.iov_len)?
            } else {
                by_address(iov.iov_base as usize, iov.iov_len, access)?
            }
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { register(domain, memory, access, context, out) }
    })
}

/// The fields of `fi_mr_attr` that every version has.
#[repr(C)]
struct MrAttrHead {
    which: *const c_void,
    iov_count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    context: *mut c_void,
}

fn by_address(addr: usize, len: usize, access: Access) -> Result<Memory, Code> {
    if len == 0 {
        return Err(Code::INVAL);
    }
    memory::populate(addr, len, access.local_write)?;
    Ok(Memory { base: addr as u64, len: len as u64, at: Location::Host(addr as *mut u8), _map: None })
}

/// GPU memory, which the CUDA driver copies.
fn by_gpu_address(addr: u64, len: usize) -> Result<Memory, Code> {
    if len == 0 {
        return Err(Code::INVAL);
    }
    match Driver::get().and_then(|driver| driver.owner(addr, len)) {
        Ok(device) => Ok(Memory { base: addr, len: len as u64, at: Location::Cuda(device, addr), _map: None }),
        Err(error) => {
            log::line(format_args!("softefa: fi_mr_regattr with FI_HMEM_CUDA: {error}"));
            Err(if matches!(error, CudaError::Range { .. }) { Code::INVAL } else { Code::UNSUPPORTED })
        }
    }
}

/// Whether a descriptor's memory cannot be mapped at all, whatever the range.
fn is_unmappable(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EACCES | libc::EPERM | libc::EOPNOTSUPP))
}

fn by_dmabuf(dmabuf: &fi::fi_mr_dmabuf) -> Result<Memory, Code> {
    if dmabuf.len == 0 || dmabuf.fd < 0 {
        return Err(Code::INVAL);
    }
    // SAFETY: the application keeps the descriptor open during the call; the mapping does not need it afterwards.
    let fd = unsafe { BorrowedFd::borrow_raw(dmabuf.fd) };
    let base = (dmabuf.base_addr as u64).wrapping_add(dmabuf.offset);
    let map = match Mapping::shared(fd, dmabuf.offset, dmabuf.len) {
        Ok(map) => map,
        // A GPU's driver may let no CPU map what it exports. Then the CUDA driver copies, by the address in this process.
        Err(error) if is_unmappable(&error) && !dmabuf.base_addr.is_null() => {
            let owner = Driver::get().and_then(|driver| driver.owner(base, dmabuf.len));
            let device = owner.map_err(|why| {
                log::line(format_args!(
                    "softefa: fi_mr_regattr of a dma-buf that the CPU cannot map ({error}), and whose bytes the CUDA driver cannot copy: {why}"
                ));
                Code::from(error)
            })?;
            return Ok(Memory { base, len: dmabuf.len as u64, at: Location::Cuda(device, base), _map: None });
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Memory { base, len: dmabuf.len as u64, at: Location::Host(map.as_ptr()), _map: Some(map) })
}

/// # Safety
/// `out` is null, or a pointer of the application that is writable during the call.
unsafe fn register(
    domain: &Domain,
    memory: Memory,
    access: Access,
    context: *mut c_void,
    out: *mut *mut fi::fid_mr,
) -> Result<i32, Code> {
    let keys = {
        let mut core = domain.card.lock();
        let soft_nic::card::Core { regions, random, .. } = &mut *core;
        regions.insert(domain.pd, access, memory, random).ok_or(Code(fi::FI_ENOSPC))?
    };
    let fid = fi::fid_mr {
        fid: head(fi::FI_CLASS_MR, context, &OPS),
        mem_desc: keys.lkey as usize as *mut c_void,
        key: u64::from(keys.rkey),
    };
    let mr = Mr { fid, domain: ptr::from_ref(domain), keys };
    // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
    if let Err(code) = unsafe { give(mr, out) } {
        drop(domain.card.lock().regions.remove(keys));
        return Err(code);
    }
    domain.uses.begin();
    Ok(0)
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(mr)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let mr: &Mr = unsafe { object(fid) }?;
        // SAFETY: a domain counts its objects in `uses` and cannot be closed before them.
        let domain = unsafe { &*mr.domain };
        // From here on packets do not reach the memory. Outstanding requests that need it complete in error.
        let memory = domain.card.lock().regions.remove(mr.keys);
        drop(memory);
        domain.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Mr, _>(fid) });
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_mapped_to_card() {
        let of = |bits: u64| access_of(bits).unwrap();
        assert_eq!(of(fi::FI_WRITE | fi::FI_SEND), Access::default());
        assert!(of(fi::FI_READ).local_write && of(0).local_write && of(fi::FI_RECV).local_write);
        let write = of(fi::FI_REMOTE_WRITE);
        assert!(write.local_write && write.remote_write && !write.remote_read);
        assert!(of(fi::FI_REMOTE_READ).remote_read);
        assert_eq!(access_of(1), Err(Code::INVAL));
    }
}
