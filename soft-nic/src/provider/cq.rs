//! `fid_cq`: a completion queue whose entries applications read from memory.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;

use efa_dp_direct::wire::CompStatus;
use ferrogin_fabric::bindings as fi;

use super::domain::Domain;
use super::guard::{Code, entry, entry_or};
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::unsupported;
use crate::card::queue::{CQ_ENTRY_LEN, CompletionRing};
use crate::memory::Mapping;

#[repr(C)]
pub(super) struct Cq {
    fid: fi::fid_cq,
    domain: *const Domain,
    /// Number on the card.
    pub id: u32,
    buffer: *mut u8,
    entries: u32,
    /// Endpoints bound to it.
    pub uses: Uses,
}

// SAFETY: repr(C), begins with fid_cq; this provider makes fids of this class here only.
unsafe impl Object for Cq {
    const CLASS: u32 = fi::FI_CLASS_CQ;
}

impl Cq {
    pub(super) fn domain(&self) -> *const Domain {
        self.domain
    }

    /// Ring, bytes of an entry, entries.
    pub(super) fn memory(&self) -> fi::fi_efa_cq_attr {
        fi::fi_efa_cq_attr { buffer: self.buffer, entry_size: CQ_ENTRY_LEN, num_entries: self.entries }
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

static CQ_OPS: fi::fi_ops_cq = fi::fi_ops_cq {
    size: size_of::<fi::fi_ops_cq>(),
    read: Some(read),
    readfrom: Some(readfrom),
    readerr: Some(readerr),
    sread: Some(sread),
    sreadfrom: Some(sreadfrom),
    signal: Some(unsupported::cq_signal),
    strerror: Some(strerror),
    export_xpu: Some(unsupported::cq_export_xpu),
};

const MIN_ENTRIES: usize = 16;
const MAX_ENTRIES: usize = 1 << 20;
const DEFAULT_ENTRIES: usize = 8192;

/// What an application asks for, in what every version of the attributes has.
fn entries_of(attr: *const fi::fi_cq_attr) -> Result<u32, Code> {
    // SAFETY: null or the application's attributes; `size` to `wait_obj` are as old as the struct.
    let Some(attr) = (unsafe { attr.cast::<CqAttrHead>().as_ref() }) else {
        return Ok(DEFAULT_ENTRIES as u32);
    };
    if attr.wait_obj != fi::fi_wait_obj::FI_WAIT_NONE && attr.wait_obj != fi::fi_wait_obj::FI_WAIT_UNSPEC {
        return Err(Code::NOSYS);
    }
    let size = if attr.size == 0 { DEFAULT_ENTRIES } else { attr.size };
    if size > MAX_ENTRIES {
        return Err(Code::INVAL);
    }
    Ok(size.max(MIN_ENTRIES).next_power_of_two() as u32)
}

/// The beginning of `fi_cq_attr`.
#[repr(C)]
struct CqAttrHead {
    size: usize,
    flags: u64,
    format: fi::fi_cq_format::Type,
    wait_obj: fi::fi_wait_obj::Type,
}

/// `fi_cq_open`.
pub(super) unsafe extern "C" fn open(
    domain: *mut fi::fid_domain,
    attr: *mut fi::fi_cq_attr,
    out: *mut *mut fi::fid_cq,
    context: *mut c_void,
) -> c_int {
    entry("fi_cq_open", || {
        // SAFETY: the application's fid.
        let domain: &Domain = unsafe { object(domain) }?;
        let ring = CompletionRing::new(entries_of(attr)?)?;
        // SAFETY: `out` is the application's.
        unsafe { publish(domain, ring, context, out) }
    })
}

/// `cq_open_ext` of the GDA operations: the ring lies in a dma-buf of the application.
pub(super) unsafe extern "C" fn open_ext(
    domain: *mut fi::fid_domain,
    attr: *mut fi::fi_cq_attr,
    init: *mut fi::fi_efa_cq_init_attr,
    out: *mut *mut fi::fid_cq,
    context: *mut c_void,
) -> c_int {
    entry("cq_open_ext", || {
        // SAFETY: the application's fid.
        let domain: &Domain = unsafe { object(domain) }?;
        // SAFETY: null or the application's attributes.
        let init = unsafe { init.as_ref() }.ok_or(Code::INVAL)?;
        if init.flags != u64::from(fi::FI_EFA_CQ_INIT_FLAGS_EXT_MEM_DMABUF) || attr.is_null() {
            return Err(Code::INVAL);
        }
        let entries = entries_of(attr)?;
        let memory = &init.ext_mem_dmabuf;
        let needed = u64::from(entries) * u64::from(CQ_ENTRY_LEN);
        if memory.length < needed {
            return Err(Code::INVAL);
        }
        // SAFETY: the application keeps the descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(i32::try_from(memory.fd).map_err(|_| Code::INVAL)?) };
        let map = Mapping::shared(fd, memory.offset, needed as usize)?;
        let ring = CompletionRing::in_memory(map, entries)?;
        // SAFETY: `out` is the application's.
        unsafe { publish(domain, ring, context, out) }
    })
}

/// # Safety
/// `out` is where the application wants the queue.
unsafe fn publish(
    domain: &Domain,
    ring: CompletionRing,
    context: *mut c_void,
    out: *mut *mut fi::fid_cq,
) -> Result<i32, Code> {
    let (buffer, entries) = (ring.buffer(), ring.entries);
    let id = domain.card.lock().cqs.insert(ring);
    let fid = fi::fid_cq { fid: head(fi::FI_CLASS_CQ, context, &OPS), ops: table(&CQ_OPS) };
    let cq = Cq { fid, domain: ptr::from_ref(domain), id, buffer, entries, uses: Uses::default() };
    // SAFETY: by contract.
    if let Err(code) = unsafe { give(cq, out) } {
        let _ = domain.card.lock().close_cq(id);
        return Err(code);
    }
    domain.uses.begin();
    Ok(0)
}

/// Nothing that was posted through libfabric ever completes, because nothing can be: requests are written into the
/// queues directly, and so are their completions read.
const NOTHING: isize = -(fi::FI_EAGAIN as isize);

extern "C" fn read(_: *mut fi::fid_cq, _: *mut c_void, _: usize) -> isize {
    NOTHING
}

extern "C" fn readfrom(_: *mut fi::fid_cq, _: *mut c_void, _: usize, _: *mut fi::fi_addr_t) -> isize {
    NOTHING
}

extern "C" fn readerr(_: *mut fi::fid_cq, _: *mut fi::fi_cq_err_entry, _: u64) -> isize {
    NOTHING
}

extern "C" fn sread(_: *mut fi::fid_cq, _: *mut c_void, _: usize, _: *const c_void, _: c_int) -> isize {
    Code::NOSYS.negative() as isize
}

extern "C" fn sreadfrom(
    _: *mut fi::fid_cq,
    _: *mut c_void,
    _: usize,
    _: *mut fi::fi_addr_t,
    _: *const c_void,
    _: c_int,
) -> isize {
    Code::NOSYS.negative() as isize
}

unsafe extern "C" fn strerror(
    _cq: *mut fi::fid_cq,
    prov_errno: c_int,
    _err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    entry_or("fi_cq_strerror", c"".as_ptr(), || {
        let text = u8::try_from(prov_errno).ok().and_then(CompStatus::from_raw).map_or("unknown status", |s| s.text());
        if buf.is_null() || len == 0 {
            return c"".as_ptr();
        }
        let n = text.len().min(len - 1);
        // SAFETY: `len` bytes at `buf`, by the interface.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), n) };
        // SAFETY: as above; n < len.
        unsafe { buf.wrapping_add(n).write(0) };
        buf
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(cq)", || {
        // SAFETY: the application's fid.
        let cq: &Cq = unsafe { object(fid) }?;
        cq.uses.none()?;
        // SAFETY: a domain outlives its queues.
        let domain = unsafe { &*cq.domain };
        let ring = domain.card.lock().close_cq(cq.id)?;
        drop(ring);
        domain.uses.end();
        // SAFETY: nothing uses it and the application closes it.
        drop(unsafe { take_back::<Cq, _>(fid) });
        Ok(0)
    })
}
