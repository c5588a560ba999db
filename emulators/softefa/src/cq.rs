//! `fid_cq`: a completion queue. On `efa-direct` it is a ring of the card, which programs that drive queues themselves read from
//! memory; `fi_cq_read` reads the same entries.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::{Arc, OnceLock};

use efa_dp_direct::wire::CompStatus;
use ferrogin_libfabric::bindings as fi;

use super::completion::{CqQueue, entry_size};
use super::domain::Domain;
use super::fabric::Kind;
use super::guard::{Code, entry, entry_or};
use super::library::version;
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::queue_pair::RingReader;
use super::unsupported;
use super::wait::{self, WaitObject};
use soft_nic::card::queue::{CQ_ENTRY_LEN, CompletionRing};
use soft_nic::card::signal::Signal;
use soft_nic::memory::Mapping;

#[repr(C)]
pub(super) struct Cq {
    fid: fi::fid_cq,
    domain: *const Domain,
    /// The card's ring, on `efa-direct`.
    ring: Option<Ring>,
    pub queue: Arc<CqQueue>,
    wait: WaitObject,
    /// Entries of failed operations have a source (libfabric 1.20).
    has_source: bool,
    /// Endpoints bound to the queue.
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
    pub(super) fn memory(&self) -> Option<fi::fi_efa_cq_attr> {
        let ring = self.ring.as_ref()?;
        Some(fi::fi_efa_cq_attr { buffer: ring.buffer, entry_size: CQ_ENTRY_LEN, num_entries: ring.entries })
    }

    /// Number of the ring on the card.
    pub(super) fn ring_id(&self) -> Option<u32> {
        self.ring.as_ref().map(|ring| ring.id)
    }

    /// Whether a thread may sleep: the queue is empty, and the next completion raises the signal.
    pub(super) fn may_sleep(&self) -> bool {
        if let Some(signal) = &self.queue.signal {
            signal.arm();
        }
        self.queue.progress();
        !self.queue.has_entries()
    }
}

/// A ring on the card.
struct Ring {
    id: u32,
    buffer: *mut u8,
    entries: u32,
}

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(control),
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
    signal: Some(signal),
    strerror: Some(strerror),
    export_xpu: Some(unsupported::cq_export_xpu),
};

const MIN_ENTRIES: usize = 16;
const MAX_ENTRIES: usize = 1 << 20;
const DEFAULT_ENTRIES: usize = 8192;

/// The attributes of a queue, checked.
struct Attributes {
    entries: u32,
    entry_size: usize,
    wait: WaitObject,
}

/// Reads the attributes.
///
/// # Safety
/// `attr` is null or the application's attributes.
unsafe fn check(attr: *mut fi::fi_cq_attr) -> Result<Attributes, Code> {
    // SAFETY: null, or attributes that the application keeps alive during the call; every version has the fields that are read.
    let Some(attr) = (unsafe { attr.cast::<CqAttrHead>().as_mut() }) else {
        let entry_size = size_of::<fi::fi_cq_entry>();
        return Ok(Attributes { entries: DEFAULT_ENTRIES as u32, entry_size, wait: WaitObject::None });
    };
    if attr.flags & !fi::FI_AFFINITY != 0 {
        return Err(Code::BADFLAGS);
    }
    if attr.format == fi::fi_cq_format::FI_CQ_FORMAT_UNSPEC {
        attr.format = fi::fi_cq_format::FI_CQ_FORMAT_CONTEXT;
    }
    let entry_size = entry_size(attr.format).ok_or(Code::NOSYS)?;
    let wait = WaitObject::of(attr.wait_obj)?;
    let size = if attr.size == 0 { DEFAULT_ENTRIES } else { attr.size };
    if size > MAX_ENTRIES {
        return Err(Code::INVAL);
    }
    Ok(Attributes { entries: size.max(MIN_ENTRIES).next_power_of_two() as u32, entry_size, wait })
}

/// The fields of `fi_cq_attr` that every version has.
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(domain) }?;
        // SAFETY: null, or attributes that the application keeps alive during the call; every version has the fields that are read.
        let attributes = unsafe { check(attr) }?;
        let ring = match domain.fabric_kind() {
            Kind::Direct => Some(CompletionRing::new(attributes.entries)?),
            Kind::Rdm => None,
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { publish(domain, &attributes, ring, context, out) }
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(domain) }?;
        // SAFETY: null, or attributes that the application keeps alive during the call; every version has the fields that are read.
        let init = unsafe { init.as_ref() }.ok_or(Code::INVAL)?;
        if init.flags != u64::from(fi::FI_EFA_CQ_INIT_FLAGS_EXT_MEM_DMABUF) || attr.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: null, or attributes that the application keeps alive during the call.
        let attributes = unsafe { check(attr) }?;
        if domain.fabric_kind() != Kind::Direct {
            return Err(Code::UNSUPPORTED);
        }
        let memory = &init.ext_mem_dmabuf;
        let needed = u64::from(attributes.entries) * u64::from(CQ_ENTRY_LEN);
        if memory.length < needed {
            return Err(Code::INVAL);
        }
        // SAFETY: the application keeps the descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(i32::try_from(memory.fd).map_err(|_| Code::INVAL)?) };
        let map = Mapping::shared(fd, memory.offset, needed as usize)?;
        let ring = CompletionRing::in_memory(map, attributes.entries)?;
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { publish(domain, &attributes, Some(ring), context, out) }
    })
}

/// # Safety
/// `out` is null, or a pointer of the application that is writable during the call.
unsafe fn publish(
    domain: &Domain,
    attributes: &Attributes,
    ring: Option<CompletionRing>,
    context: *mut c_void,
    out: *mut *mut fi::fid_cq,
) -> Result<i32, Code> {
    if attributes.wait == WaitObject::Fd && domain.card.lock().config.faults.no_wait_fd {
        return Err(Code::NOSYS);
    }
    let signal = if attributes.wait == WaitObject::None { None } else { Some(Arc::new(Signal::new()?)) };
    let (ring, reader) = match ring {
        None => (None, None),
        Some(mut ring) => {
            ring.signals.extend(signal.clone());
            let (buffer, entries) = (ring.buffer(), ring.entries);
            // SAFETY: the ring stays on the card until this object is closed, which drops the reader.
            let reader = unsafe { RingReader::new(buffer, entries) };
            (Some(Ring { id: domain.card.lock().cqs.insert(ring), buffer, entries }), Some(reader))
        }
    };
    let id = ring.as_ref().map(|ring| ring.id);
    let cq = Cq {
        fid: fi::fid_cq { fid: head(fi::FI_CLASS_CQ, context, &OPS), ops: table(&CQ_OPS) },
        domain: ptr::from_ref(domain),
        ring,
        queue: Arc::new(CqQueue::new(attributes.entry_size, attributes.entries as usize, reader, signal)),
        wait: attributes.wait,
        has_source: domain.api_version() >= version(1, 20),
        uses: Uses::default(),
    };
    // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
    if let Err(code) = unsafe { give(cq, out) } {
        if let Some(id) = id {
            let _ = domain.card.lock().close_cq(id);
        }
        return Err(code);
    }
    domain.uses.begin();
    Ok(0)
}

/// # Safety
/// The conditions of [`CqQueue::read`], and the application keeps `cq` open during the call.
unsafe fn read_now(
    cq: *mut fi::fid_cq,
    buf: *mut c_void,
    count: usize,
    source: *mut fi::fi_addr_t,
) -> Result<i32, Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    let cq: &Cq = unsafe { object(cq) }?;
    if buf.is_null() && count > 0 {
        return Err(Code::INVAL);
    }
    if cq.queue.len() < count.max(1) {
        cq.queue.progress();
    }
    // SAFETY: this function's caller gives room for `count` entries and, unless null, as many sources.
    match unsafe { cq.queue.read(buf, count, source) } {
        Ok(read) => Ok(i32::try_from(read).unwrap_or(i32::MAX)),
        Err(err) => {
            if err == fi::FI_EAGAIN {
                wait::relax();
            }
            Err(Code(err))
        }
    }
}

unsafe extern "C" fn read(cq: *mut fi::fid_cq, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: this function's caller keeps the fid open and gives room for the entries; the arguments are passed on unchanged.
    entry("fi_cq_read", || unsafe { read_now(cq, buf, count, ptr::null_mut()) }) as isize
}

unsafe extern "C" fn readfrom(
    cq: *mut fi::fid_cq,
    buf: *mut c_void,
    count: usize,
    source: *mut fi::fi_addr_t,
) -> isize {
    // SAFETY: this function's caller keeps the fid open and gives room for the entries; the arguments are passed on unchanged.
    entry("fi_cq_readfrom", || unsafe { read_now(cq, buf, count, source) }) as isize
}

unsafe extern "C" fn readerr(cq: *mut fi::fid_cq, to: *mut fi::fi_cq_err_entry, _flags: u64) -> isize {
    let call = || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cq: &Cq = unsafe { object(cq) }?;
        if to.is_null() {
            return Err(Code::INVAL);
        }
        cq.queue.progress();
        let (entry, failure) = cq.queue.take_failed().ok_or(Code::AGAIN)?;
        // The entry holds the whole error, so an error buffer of the application stays as it is.
        let room: *const usize = to.wrapping_byte_add(offset_of!(fi::fi_cq_err_entry, err_data_size)).cast();
        let err_data: *const *mut c_void = to.wrapping_byte_add(offset_of!(fi::fi_cq_err_entry, err_data)).cast();
        // SAFETY: the application's entry begins with the fields of every version, of which this is one.
        let has_room = unsafe { room.read() } > 0;
        // SAFETY: the application's entry begins with the fields of every version, of which this is one.
        let err_data = if has_room { unsafe { err_data.read() } } else { ptr::null_mut() };
        let whole = fi::fi_cq_err_entry {
            op_context: entry.context,
            flags: entry.flags,
            len: entry.len,
            buf: entry.buf,
            data: entry.data,
            tag: entry.tag,
            olen: failure.olen,
            err: failure.err,
            prov_errno: failure.status.into(),
            err_data,
            err_data_size: 0,
            src_addr: entry.source,
        };
        // Applications of older versions have a shorter struct.
        let len = if cq.has_source { size_of_val(&whole) } else { offset_of!(fi::fi_cq_err_entry, src_addr) };
        // SAFETY: the application's entry has the size of its version, which is `len` at least.
        unsafe { ptr::copy_nonoverlapping((&raw const whole).cast::<u8>(), to.cast(), len) };
        Ok(1)
    };
    entry("fi_cq_readerr", call) as isize
}

/// # Safety
/// The conditions of [`read_now`].
unsafe fn read_later(
    cq: *mut fi::fid_cq,
    buf: *mut c_void,
    count: usize,
    source: *mut fi::fi_addr_t,
    timeout: c_int,
) -> Result<i32, Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    let open: &Cq = unsafe { object(cq) }?;
    let signal = open.queue.signal.as_ref().ok_or(Code::NOSYS)?;
    // SAFETY: this function's caller keeps the fid open and gives room for the entries; the arguments are passed on unchanged.
    wait::read_with_timeout(signal, timeout, || open.may_sleep(), || unsafe { read_now(cq, buf, count, source) })
}

unsafe extern "C" fn sread(
    cq: *mut fi::fid_cq,
    buf: *mut c_void,
    count: usize,
    _cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the application keeps the fid open during the call and gives room for `count` entries.
    entry("fi_cq_sread", || unsafe { read_later(cq, buf, count, ptr::null_mut(), timeout) }) as isize
}

unsafe extern "C" fn sreadfrom(
    cq: *mut fi::fid_cq,
    buf: *mut c_void,
    count: usize,
    source: *mut fi::fi_addr_t,
    _cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the application keeps the fid open during the call and gives room for `count` entries.
    entry("fi_cq_sreadfrom", || unsafe { read_later(cq, buf, count, source, timeout) }) as isize
}

unsafe extern "C" fn signal(cq: *mut fi::fid_cq) -> c_int {
    entry("fi_cq_signal", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cq: &Cq = unsafe { object(cq) }?;
        cq.queue.signal.as_ref().ok_or(Code::INVAL)?.interrupt();
        Ok(0)
    })
}

unsafe extern "C" fn control(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(cq)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cq: &Cq = unsafe { object(fid) }?;
        // SAFETY: `arg` is null or a variable of the type that the command requires (`fi_control(3)`).
        unsafe { wait::control(cq.wait, cq.queue.signal.as_deref(), command, arg) }
    })
}

/// The text of a status. It is static, because applications may pass no buffer.
fn status_text(raw: c_int) -> &'static CStr {
    static TEXTS: OnceLock<Vec<CString>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        let text = |raw| CompStatus::from_raw(raw).map_or("unknown status", |status| status.text());
        (0..=u8::MAX).map(|raw| CString::new(text(raw)).unwrap_or_default()).collect()
    });
    usize::try_from(raw).ok().and_then(|at| texts.get(at)).map_or(c"unknown status", CString::as_c_str)
}

unsafe extern "C" fn strerror(
    _cq: *mut fi::fid_cq,
    prov_errno: c_int,
    _err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    entry_or("fi_cq_strerror", c"".as_ptr(), || {
        let text = status_text(prov_errno);
        if buf.is_null() || len == 0 {
            return text.as_ptr();
        }
        let n = text.count_bytes().min(len - 1);
        // SAFETY: not null, and the application states that the buffer has `len` bytes, of which `n` are fewer.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), buf, n) };
        // SAFETY: not null, and the application states that the buffer has `len` bytes, of which `n` are fewer.
        unsafe { buf.wrapping_add(n).write(0) };
        buf
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(cq)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cq: &Cq = unsafe { object(fid) }?;
        cq.uses.none()?;
        // SAFETY: a domain counts its objects in `uses` and cannot be closed before them.
        let domain = unsafe { &*cq.domain };
        if let Some(id) = cq.ring_id() {
            let ring = domain.card.lock().close_cq(id)?;
            drop(ring);
        }
        domain.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Cq, _>(fid) });
        Ok(0)
    })
}
