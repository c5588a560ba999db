//! `fid_cq`: a completion queue. On `efa-direct` it is one of the card's rings, which programs that drive queues
//! themselves read from memory; `fi_cq_read` reads the same entries.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::{Arc, OnceLock};

use efa_dp_direct::wire::CompStatus;
use ferrogin_libfabric::bindings as fi;

use super::completion::{CqQueue, entry_size};
use super::domain::Domain;
use super::entry::{Arg, Call, Command, Out, Room, entry_points};
use super::fabric::Kind;
use super::guard::Code;
use super::library::{refuse_attribute, version};
use super::object::{Held, Uses, close, give, head, object, table};
use super::queue_pair::RingReader;
use super::unsupported;
use super::wait::{self, WaitObject};
use soft_nic::card::queue::{CQ_ENTRY_LEN, CompletionRing};
use soft_nic::card::signal::Signal;
use soft_nic::memory::{Mapping, sealed_memfd};

#[repr(C)]
pub(super) struct Cq {
    fid: fi::fid_cq,
    pub domain: Held<Domain>,
    /// The card's ring, on `efa-direct`.
    ring: Option<Ring>,
    pub queue: Arc<CqQueue>,
    wait: WaitObject,
    has_threshold: bool,
    /// Entries of failed operations have a source (libfabric 1.20).
    has_source: bool,
    /// Endpoints bound to the queue.
    pub uses: Uses,
}

object!(Cq, FI_CLASS_CQ, "cq", {
    fn close(&self) -> Result<(), Code> {
        if let Some(id) = self.ring_id() {
            let ring = self.domain.card.lock().close_cq(id)?;
            drop(ring);
        }
        Ok(())
    }
});

impl Cq {
    /// Returns the ring, its entry size and its number of entries.
    pub(super) fn memory(&self) -> Option<fi::fi_efa_cq_attr> {
        let ring = self.ring.as_ref()?;
        Some(fi::fi_efa_cq_attr { buffer: ring.buffer, entry_size: CQ_ENTRY_LEN, num_entries: ring.entries })
    }

    /// Returns the ring's number on the card.
    pub(super) fn ring_id(&self) -> Option<u32> {
        self.ring.as_ref().map(|ring| ring.id)
    }

    /// Whether a thread that waits for `wanted` entries may sleep: there are fewer, and the next completion raises the
    /// signal.
    pub(super) fn may_sleep(&self, wanted: usize) -> bool {
        if let Some(signal) = &self.queue.signal {
            signal.arm();
        }
        self.queue.progress();
        !self.queue.has_entries(wanted)
    }
}

/// A ring on the card.
struct Ring {
    id: u32,
    buffer: *mut u8,
    entries: u32,
}

static OPS: fi::fi_ops = fi::fi_ops { close: Some(close::<Cq>), control: Some(control), ..unsupported::FID };

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

/// A queue's attributes, checked.
struct Attributes {
    entries: u32,
    entry_size: usize,
    wait: WaitObject,
    /// Waits are for a number of entries (`FI_CQ_COND_THRESHOLD`).
    has_threshold: bool,
}

fn check(attr: Option<&mut CqAttrHead>) -> Result<Attributes, Code> {
    let Some(attr) = attr else {
        let entry_size = size_of::<fi::fi_cq_entry>();
        let entries = DEFAULT_ENTRIES as u32;
        return Ok(Attributes { entries, entry_size, wait: WaitObject::None, has_threshold: false });
    };
    let refuse = |code, why: std::fmt::Arguments<'_>| Err(refuse_attribute("fi_cq_open", code, why));
    if attr.flags & !fi::FI_AFFINITY != 0 {
        return refuse(Code::BADFLAGS, format_args!("flags {:#x}: only FI_AFFINITY", attr.flags));
    }
    if attr.format == fi::fi_cq_format::FI_CQ_FORMAT_UNSPEC {
        attr.format = fi::fi_cq_format::FI_CQ_FORMAT_CONTEXT;
    }
    let Some(entry_size) = entry_size(attr.format) else {
        return refuse(Code::NOSYS, format_args!("there is no format {}", attr.format));
    };
    let wait = WaitObject::of("fi_cq_open", attr.wait_obj)?;
    let has_threshold = match attr.wait_cond {
        fi::fi_cq_wait_cond::FI_CQ_COND_NONE => false,
        fi::fi_cq_wait_cond::FI_CQ_COND_THRESHOLD => true,
        other => return refuse(Code::INVAL, format_args!("there is no wait_cond {other}")),
    };
    let size = if attr.size == 0 { DEFAULT_ENTRIES } else { attr.size };
    if size > MAX_ENTRIES {
        return refuse(Code::INVAL, format_args!("size {size}: at most {MAX_ENTRIES} entries"));
    }
    let entries = size.max(MIN_ENTRIES).next_power_of_two() as u32;
    Ok(Attributes { entries, entry_size, wait, has_threshold })
}

/// The fields of `fi_cq_attr` that every version has.
#[repr(C)]
struct CqAttrHead {
    size: usize,
    flags: u64,
    format: fi::fi_cq_format::Type,
    wait_obj: fi::fi_wait_obj::Type,
    /// The interrupt's place with `FI_AFFINITY`: the card has no interrupts.
    _signaling_vector: c_int,
    wait_cond: fi::fi_cq_wait_cond::Type,
}

fn publish(
    domain: &Domain,
    attributes: &Attributes,
    ring: Option<CompletionRing>,
    context: *mut c_void,
    out: &Out<'_, *mut fi::fid_cq>,
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
    let cq = Cq {
        fid: fi::fid_cq { fid: head(fi::FI_CLASS_CQ, context, &OPS), ops: table(&CQ_OPS) },
        domain: Held::new(domain),
        ring,
        queue: Arc::new(CqQueue::new(attributes.entry_size, attributes.entries as usize, reader, signal)),
        wait: attributes.wait,
        has_threshold: attributes.has_threshold,
        has_source: domain.api_version() >= version(1, 20),
        uses: Uses::default(),
    };
    give(cq, out);
    Ok(0)
}

/// Creates the ring of a queue on `efa-direct`. With several sub-CQs, it's the first of as many rings, which a driver maps
/// from its device's file as one piece.
fn direct_ring(domain: &Domain, entries: u32) -> io::Result<CompletionRing> {
    let rings = domain.card.lock().config.faults.sub_cqs;
    if rings == 1 {
        return CompletionRing::new(entries);
    }
    let len = rings as usize * entries as usize * CQ_ENTRY_LEN as usize;
    let file = sealed_memfd("/dev/infiniband/uverbs0", len)?;
    CompletionRing::in_memory(Mapping::shared(file.as_fd(), 0, len)?, entries)
}

/// A queue, and room for entries of its format and for their sources.
struct Reader<'a> {
    cq: &'a Cq,
    buf: *mut c_void,
    count: usize,
    source: *mut fi::fi_addr_t,
}

type ReaderArgs = (*mut fi::fid_cq, *mut c_void, usize, *mut fi::fi_addr_t);

impl<'a> Arg<'a, ReaderArgs> for Reader<'a> {
    unsafe fn of((cq, buf, count, source): ReaderArgs, call: &'a Call) -> Result<Self, Code> {
        // SAFETY: the conditions are the same.
        let cq: &Cq = unsafe { Arg::of(cq, call) }?;
        if buf.is_null() && count > 0 {
            return Err(Code::INVAL);
        }
        Ok(Self { cq, buf, count, source })
    }
}

/// The condition of a waiting read: on queues with `FI_CQ_COND_THRESHOLD` a number, and otherwise nothing.
struct Threshold<'a>(Option<&'a usize>);

impl<'a> Arg<'a, (*mut fi::fid_cq, *const c_void)> for Threshold<'a> {
    unsafe fn of((cq, cond): (*mut fi::fid_cq, *const c_void), call: &'a Call) -> Result<Self, Code> {
        // SAFETY: the conditions are the same.
        let cq: &Cq = unsafe { Arg::of(cq, call) }?;
        // SAFETY: on such a queue, null or a number (`fi_cq(3)`).
        Ok(Self(if cq.has_threshold { unsafe { Arg::of(cond, call) }? } else { None }))
    }
}

impl Reader<'_> {
    fn read(&self) -> Result<i32, Code> {
        let queue = &self.cq.queue;
        if queue.len() < self.count.max(1) {
            queue.progress();
        }
        // SAFETY: by `fi_cq(3)`, there is room for `count` entries of the format and, unless null, sources. Only
        // `Arg::of` makes this type.
        match unsafe { queue.read(self.buf, self.count, self.source) } {
            Ok(read) => Ok(i32::try_from(read).unwrap_or(i32::MAX)),
            Err(err) => {
                if err == fi::FI_EAGAIN {
                    wait::relax();
                }
                Err(Code(err))
            }
        }
    }

    /// Waits for entries, as many as the threshold says if there is one. When the time is over, it reads what there is.
    fn read_until(&self, threshold: Option<&usize>, timeout: c_int) -> Result<i32, Code> {
        let queue = &self.cq.queue;
        let signal = queue.signal.as_ref().ok_or(Code::NOSYS)?;
        let wanted = threshold.map_or(1, |threshold| queue.possible(*threshold));
        let read =
            |is_last| if is_last || wanted <= 1 || queue.has_entries(wanted) { self.read() } else { Err(Code::AGAIN) };
        wait::read_with_timeout(signal, timeout, || self.cq.may_sleep(wanted), read)
    }
}

/// The fields of `fi_cq_err_entry` that every version has.
#[derive(Clone, Copy)]
#[repr(C)]
struct ErrorHead {
    op_context: *mut c_void,
    flags: u64,
    len: usize,
    buf: *mut c_void,
    data: u64,
    tag: u64,
    olen: usize,
    err: c_int,
    prov_errno: c_int,
    error: ErrorBuffer,
}
const _: () = assert!(size_of::<ErrorHead>() == offset_of!(fi::fi_cq_err_entry, src_addr));
const _: () = assert!(offset_of!(ErrorHead, error) == offset_of!(fi::fi_cq_err_entry, err_data));

/// The application's own buffer for errors: the last fields of the head.
#[derive(Clone, Copy)]
#[repr(C)]
struct ErrorBuffer {
    err_data: *mut c_void,
    err_data_size: usize,
}

/// A queue and room for a failed operation. Older versions of the struct have no source.
struct FailedRoom<'a> {
    cq: &'a Cq,
    head: Out<'a, ErrorHead>,
    error: Out<'a, ErrorBuffer>,
    source: Option<Out<'a, fi::fi_addr_t>>,
}

impl<'a> Arg<'a, (*mut fi::fid_cq, *mut fi::fi_cq_err_entry)> for FailedRoom<'a> {
    unsafe fn of((cq, to): (*mut fi::fid_cq, *mut fi::fi_cq_err_entry), call: &'a Call) -> Result<Self, Code> {
        // SAFETY: the conditions are the same.
        let cq: &Cq = unsafe { Arg::of(cq, call) }?;
        // SAFETY: the entry of any version begins with these fields.
        let head = unsafe { Arg::of(to, call) }?;
        // SAFETY: these are the last of them, which the application sets.
        let error = unsafe { Arg::of(to.wrapping_byte_add(offset_of!(ErrorHead, error)), call) }?;
        let source = to.wrapping_byte_add(offset_of!(fi::fi_cq_err_entry, src_addr)).cast::<fi::fi_addr_t>();
        // SAFETY: an application of this version has the field.
        let source = if cq.has_source { unsafe { Arg::of(source, call) }? } else { None };
        Ok(Self { cq, head, error, source })
    }
}

/// Returns a status's text. It is static, because applications may pass no buffer.
fn status_text(raw: c_int) -> &'static CStr {
    static TEXTS: OnceLock<Vec<CString>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        let text = |raw| CompStatus::from_raw(raw).map_or("unknown status", |status| status.text());
        (0..=u8::MAX).map(|raw| CString::new(text(raw)).unwrap_or_default()).collect()
    });
    usize::try_from(raw).ok().and_then(|at| texts.get(at)).map_or(c"unknown status", CString::as_c_str)
}

fn open_in_dma_buf(
    domain: &Domain,
    attr: Option<&mut CqAttrHead>,
    init: &fi::fi_efa_cq_init_attr,
    context: *mut c_void,
    out: &Out<'_, *mut fi::fid_cq>,
) -> Result<i32, Code> {
    if init.flags != u64::from(fi::FI_EFA_CQ_INIT_FLAGS_EXT_MEM_DMABUF) || attr.is_none() {
        return Err(Code::INVAL);
    }
    let attributes = check(attr)?;
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
    publish(domain, &attributes, Some(ring), context, out)
}

entry_points! {
    /// `fi_cq_open`.
    pub(super) fn open(
        domain: *mut fi::fid_domain,
        attr: *mut fi::fi_cq_attr,
        out: *mut *mut fi::fid_cq,
        context: *mut c_void,
    ) -> c_int
    as ("fi_cq_open") (
        domain: &Domain = domain,
        attr: Option<&mut CqAttrHead> = attr,
        out: Out<'_, *mut fi::fid_cq> = out,
    ) {
        let attributes = check(attr)?;
        let ring = match domain.fabric_kind() {
            Kind::Direct => Some(direct_ring(domain, attributes.entries)?),
            Kind::Rdm => None,
        };
        publish(domain, &attributes, ring, context, &out)
    }

    /// `cq_open_ext` of the GDA operations: the ring is in the application's dma-buf.
    pub(super) fn open_ext(
        domain: *mut fi::fid_domain,
        attr: *mut fi::fi_cq_attr,
        init: *mut fi::fi_efa_cq_init_attr,
        out: *mut *mut fi::fid_cq,
        context: *mut c_void,
    ) -> c_int
    as ("cq_open_ext") (
        domain: &Domain = domain,
        attr: Option<&mut CqAttrHead> = attr,
        init: Option<&fi::fi_efa_cq_init_attr> = init.cast_const(),
        out: Out<'_, *mut fi::fid_cq> = out,
    ) {
        open_in_dma_buf(domain, attr, init.ok_or(Code::INVAL)?, context, &out)
    }

    fn read(cq: *mut fi::fid_cq, buf: *mut c_void, count: usize) -> isize
    as ("fi_cq_read") (reader: Reader<'_> = (cq, buf, count, ptr::null_mut())) {
        reader.read()
    }

    fn readfrom(cq: *mut fi::fid_cq, buf: *mut c_void, count: usize, source: *mut fi::fi_addr_t) -> isize
    as ("fi_cq_readfrom") (reader: Reader<'_> = (cq, buf, count, source)) {
        reader.read()
    }

    fn readerr(cq: *mut fi::fid_cq, to: *mut fi::fi_cq_err_entry, _flags: u64) -> isize
    as ("fi_cq_readerr") (room: FailedRoom<'_> = (cq, to)) {
        let queue = &room.cq.queue;
        queue.progress();
        let (entry, failure) = queue.take_failed().ok_or(Code::AGAIN)?;
        // The entry holds the whole error, so the application's error buffer stays as it is.
        let ErrorBuffer { err_data, err_data_size } = room.error.read();
        let err_data = if err_data_size > 0 { err_data } else { ptr::null_mut() };
        room.head.write(ErrorHead {
            op_context: entry.context,
            flags: entry.flags,
            len: entry.len,
            buf: entry.buf,
            data: entry.data,
            tag: entry.tag,
            olen: failure.olen,
            err: failure.err,
            prov_errno: failure.status.into(),
            error: ErrorBuffer { err_data, err_data_size: 0 },
        });
        if let Some(source) = room.source {
            source.write(entry.source);
        }
        Ok(1)
    }

    fn sread(cq: *mut fi::fid_cq, buf: *mut c_void, count: usize, cond: *const c_void, timeout: c_int) -> isize
    as ("fi_cq_sread") (reader: Reader<'_> = (cq, buf, count, ptr::null_mut()), threshold: Threshold<'_> = (cq, cond)) {
        reader.read_until(threshold.0, timeout)
    }

    fn sreadfrom(
        cq: *mut fi::fid_cq,
        buf: *mut c_void,
        count: usize,
        source: *mut fi::fi_addr_t,
        cond: *const c_void,
        timeout: c_int,
    ) -> isize
    as ("fi_cq_sreadfrom") (reader: Reader<'_> = (cq, buf, count, source), threshold: Threshold<'_> = (cq, cond)) {
        reader.read_until(threshold.0, timeout)
    }

    fn signal(cq: *mut fi::fid_cq) -> c_int as ("fi_cq_signal") (cq: &Cq = cq) {
        cq.queue.signal.as_ref().ok_or(Code::INVAL)?.interrupt();
        Ok(0)
    }

    fn control(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int
    as ("fi_control(cq)") (cq: &Cq = fid, command: Command<'_> = (command, arg)) {
        wait::control(cq.wait, cq.queue.signal.as_deref(), &command)
    }

    fn strerror(
        _cq: *mut fi::fid_cq,
        prov_errno: c_int,
        _err_data: *const c_void,
        buf: *mut c_char,
        len: usize,
    ) -> *const c_char
    as ("fi_cq_strerror", c"".as_ptr()) (room: Room<'_, u8> = (buf, len)) {
        let text = status_text(prov_errno);
        if room.len() == 0 {
            return Ok(text.as_ptr());
        }
        let n = text.count_bytes().min(len - 1);
        room.copy(&text.to_bytes()[..n]);
        room.set(n, 0);
        Ok(buf.cast_const())
    }
}
