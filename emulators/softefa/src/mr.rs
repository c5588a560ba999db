//! `fid_mr`: registered memory.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use ferrogin_libfabric::bindings as fi;

use super::domain::Domain;
use super::entry::{Arg, Array, Call, Out, entry_points};
use super::guard::Code;
use super::library::{refuse_attribute, version};
use super::object::{Fid, Held, Uses, close, give, head, object};
use super::unsupported;
use soft_nic::card::region::{Access, Keys, Memory};
use soft_nic::cuda::{CudaError, Driver};
use soft_nic::location::Location;
use soft_nic::log;
use soft_nic::memory;

#[repr(C)]
pub(super) struct Mr {
    fid: fi::fid_mr,
    domain: Held<Domain>,
    keys: Keys,
    uses: Uses,
}

object!(Mr, FI_CLASS_MR, "mr", {
    fn close(&self) -> Result<(), Code> {
        let memory = self.domain.card.lock().close_region(self.keys);
        drop(memory);
        Ok(())
    }
});

impl Mr {
    pub(super) fn lkey(&self) -> u32 {
        self.keys.lkey
    }
}

static OPS: fi::fi_ops = fi::fi_ops { close: Some(close::<Mr>), ..unsupported::FID };

/// Rights that an application can ask for.
const RIGHTS: u64 = fi::FI_SEND | fi::FI_RECV | fi::FI_READ | fi::FI_WRITE | fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE;

fn access_of(asked: u64) -> Result<Access, Code> {
    if asked & !RIGHTS != 0 {
        return Err(Code::INVAL);
    }
    // No rights means the rights for messages, as in libfabric's efa provider.
    let asked = if asked == 0 { fi::FI_SEND | fi::FI_RECV } else { asked };
    let has = |bits: u64| asked & bits != 0;
    Ok(Access {
        // Remote writing implies local writing.
        local_write: has(fi::FI_RECV | fi::FI_READ | fi::FI_REMOTE_WRITE),
        remote_read: has(fi::FI_REMOTE_READ),
        remote_write: has(fi::FI_REMOTE_WRITE),
    })
}

entry_points! {
    pub(super) fn reg(
        fid: *mut fi::fid,
        buf: *const c_void,
        len: usize,
        access: u64,
        offset: u64,
        _key: u64,
        flags: u64,
        out: *mut *mut fi::fid_mr,
        context: *mut c_void,
    ) -> c_int
    as ("fi_mr_reg") (domain: &Domain = fid, out: Out<'_, *mut fi::fid_mr> = out) {
        check_offset("fi_mr_reg", offset)?;
        register_host(domain, buf as usize, len, access, flags, context, &out)
    }

    pub(super) fn regv(
        fid: *mut fi::fid,
        iov: *const fi::iovec,
        count: usize,
        access: u64,
        offset: u64,
        _key: u64,
        flags: u64,
        out: *mut *mut fi::fid_mr,
        context: *mut c_void,
    ) -> c_int
    as ("fi_mr_reg") (
        domain: &Domain = fid,
        iov: Array<'_, fi::iovec> = (iov, count),
        out: Out<'_, *mut fi::fid_mr> = out,
    ) {
        check_offset("fi_mr_regv", offset)?;
        let iov = iov.only().ok_or(Code::INVAL)?;
        register_host(domain, iov.iov_base as usize, iov.iov_len, access, flags, context, &out)
    }

    pub(super) fn regattr(
        fid: *mut fi::fid,
        attr: *const fi::fi_mr_attr,
        flags: u64,
        out: *mut *mut fi::fid_mr,
    ) -> c_int
    as ("fi_mr_regattr") (asked: Asked<'_> = (fid, attr, flags), out: Out<'_, *mut fi::fid_mr> = out) {
        let access = access_of(asked.access)?;
        let memory = match asked.range {
            Range::Dmabuf(dmabuf) => by_dmabuf(dmabuf)?,
            Range::Host(iov) => by_address(iov.iov_base as usize, iov.iov_len, access)?,
            Range::Cuda(iov) => by_gpu_address(iov.iov_base as u64, iov.iov_len)?,
        };
        register(asked.domain, memory, access, asked.context, &out)
    }
}

/// What `fi_mr_regattr` is asked to register.
struct Asked<'a> {
    domain: &'a Domain,
    access: u64,
    context: *mut c_void,
    range: Range<'a>,
}

enum Range<'a> {
    Dmabuf(&'a fi::fi_mr_dmabuf),
    Host(fi::iovec),
    Cuda(fi::iovec),
}

impl<'a> Arg<'a, (*mut fi::fid, *const fi::fi_mr_attr, u64)> for Asked<'a> {
    unsafe fn of((fid, attr, flags): (*mut fi::fid, *const fi::fi_mr_attr, u64), call: &'a Call) -> Result<Self, Code> {
        // SAFETY: the conditions are the same.
        let domain: &Domain = unsafe { Fid::of(fid, call) }?.object()?;
        // SAFETY: null, or attributes whose first fields every version has.
        let head: &MrAttrHead = unsafe { Option::of(attr, call) }?.ok_or(Code::INVAL)?;
        if flags & !(fi::FI_MR_DMABUF | fi::FI_HMEM_DEVICE_ONLY | fi::FI_HMEM_HOST_ALLOC) != 0 {
            return Err(Code::BADFLAGS);
        }
        check_offset("fi_mr_regattr", head.offset)?;
        if domain.api_version() >= version(1, 5) {
            let at = attr.wrapping_byte_add(offset_of!(fi::fi_mr_attr, auth_key_size));
            // SAFETY: attributes of this API version have the field.
            let size = unsafe { at.cast::<usize>().read() };
            if size != 0 {
                let why = format_args!("auth_key_size {size}: there are no authorization keys");
                return Err(refuse_attribute("fi_mr_regattr", Code::INVAL, why));
            }
        }
        let range = if flags & fi::FI_MR_DMABUF != 0 {
            // SAFETY: the flag states that this union member is a fi_mr_dmabuf.
            Range::Dmabuf(unsafe { Option::of(head.which, call) }?.ok_or(Code::INVAL)?)
        } else {
            // SAFETY: without the flag, it is an array of `iov_count` elements.
            let iov: Array<'_, fi::iovec> = unsafe { Arg::of((head.which, head.iov_count), call) }?;
            let iov = iov.only().ok_or(Code::INVAL)?;
            let mut iface = fi::fi_hmem_iface::FI_HMEM_SYSTEM;
            if domain.caps & fi::FI_HMEM != 0 && domain.api_version() >= version(1, 9) {
                let at = attr.wrapping_byte_add(offset_of!(fi::fi_mr_attr, iface));
                // SAFETY: attributes of this API version have the field.
                iface = unsafe { at.cast::<fi::fi_hmem_iface::Type>().read() };
            }
            match iface {
                fi::fi_hmem_iface::FI_HMEM_SYSTEM => Range::Host(iov),
                fi::fi_hmem_iface::FI_HMEM_CUDA => Range::Cuda(iov),
                _ => return Err(Code::UNSUPPORTED),
            }
        };
        Ok(Self { domain, access: head.access, context: head.context, range })
    }
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

/// Refuses an offset, which `fi_mr(3)` reserves.
fn check_offset(call: &str, offset: u64) -> Result<(), Code> {
    match offset {
        0 => Ok(()),
        _ => Err(refuse_attribute(call, Code::INVAL, format_args!("offset {offset}: must be 0"))),
    }
}

fn by_address(addr: usize, len: usize, access: Access) -> Result<Memory, Code> {
    if len == 0 {
        return Err(Code::INVAL);
    }
    memory::populate(addr, len, access.local_write)?;
    Ok(Memory { base: addr as u64, len: len as u64, at: Location::Host(addr as *mut u8), _map: None })
}

/// Returns GPU memory, which the CUDA driver copies.
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

fn by_dmabuf(dmabuf: &fi::fi_mr_dmabuf) -> Result<Memory, Code> {
    if dmabuf.len == 0 || dmabuf.fd < 0 {
        return Err(Code::INVAL);
    }
    // SAFETY: the application keeps the descriptor open during the call; the mapping does not need it afterwards.
    let fd = unsafe { BorrowedFd::borrow_raw(dmabuf.fd) };
    let base = (dmabuf.base_addr as u64).wrapping_add(dmabuf.offset);
    let address = (!dmabuf.base_addr.is_null()).then_some(base);
    let (at, map) = Location::of_dma_buf(fd, dmabuf.offset, dmabuf.len, address)?;
    Ok(Memory { base, len: dmabuf.len as u64, at, _map: map })
}

/// Registers host memory.
fn register_host(
    domain: &Domain,
    addr: usize,
    len: usize,
    access: u64,
    flags: u64,
    context: *mut c_void,
    out: &Out<'_, *mut fi::fid_mr>,
) -> Result<i32, Code> {
    if flags != 0 {
        return Err(Code::BADFLAGS);
    }
    let access = access_of(access)?;
    register(domain, by_address(addr, len, access)?, access, context, out)
}

fn register(
    domain: &Domain,
    memory: Memory,
    access: Access,
    context: *mut c_void,
    out: &Out<'_, *mut fi::fid_mr>,
) -> Result<i32, Code> {
    let keys = { domain.card.lock().open_region(domain.pd, access, memory).ok_or(Code(fi::FI_ENOSPC))? };
    let fid = fi::fid_mr {
        fid: head(fi::FI_CLASS_MR, context, &OPS),
        mem_desc: keys.lkey as usize as *mut c_void,
        key: u64::from(keys.rkey),
    };
    give(Mr { fid, domain: Held::new(domain), keys, uses: Uses::default() }, out);
    Ok(0)
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
