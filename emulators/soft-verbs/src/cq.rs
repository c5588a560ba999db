//! Completion queues: the card's rings, and the calls that read them.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use efa_dp_direct::cq::{Cqe, RawCqe, Sender};
use efa_dp_direct::wire::{CompStatus, SendOp};
use efa_dp_direct::wqe::RequestIds;
use soft_nic::card::pace::shares_a_core;
use soft_nic::card::queue::{CQ_ENTRY_LEN, CompletionRing};
use soft_nic::card::signal::Signal;
use soft_nic::memory::{self, Mapping};
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::channel::{Channel, Unacknowledged};
use crate::context::{Context, MAX_CQE, VECTORS};
use crate::guard::{Errno, entry, object, refuse, status};
use crate::objects::{self, Efa, EfaPart, Held, Open, Param, call1, call2, verbs_object};
use crate::params::{Size, Struct};
use crate::pd::Pd;
use crate::turn::Turn;

/// A completion queue. The program reads the fields of `raw`.
#[repr(C)]
pub(crate) struct Cq {
    raw: UnsafeCell<ib::ibv_cq_ex>,
    dv: ib::efadv_cq,
    pub(crate) context: Held<Context>,
    channel: Option<Held<Channel>>,
    _parent_domain: Option<Held<Pd>>,
    /// The card's number for the ring.
    pub(crate) ring: u32,
    /// The ring in the program's memory.
    buffer: *mut u8,
    entries: u32,
    /// The doorbell that arms events; null if there is no channel.
    doorbell: *mut u32,
    /// The signal for its events.
    event: Option<Arc<Signal>>,
    turn: Turn,
    reader: Mutex<Reader>,
    /// The queue pairs that complete here.
    uses: Uses,
    unacknowledged: Arc<Unacknowledged>,
}

verbs_object!(Cq { raw: ib::ibv_cq }, "completion queue");

// SAFETY: the offset is that of the field of this type.
unsafe impl EfaPart for Cq {
    type Part = ib::efadv_cq;
    const PART_AT: usize = offset_of!(Cq, dv);
}

// SAFETY: `ibv_cq_ex` begins like `ibv_cq`, and `Open` is transparent.
unsafe impl Param<*mut ib::ibv_cq_ex> for Open<'_, Cq> {}

/// The program's position in the ring.
struct Reader {
    buffer: *const u8,
    entries: u32,
    next: u32,
    /// The entry that the `ibv_wc_read_*` calls read.
    current: Option<Completion>,
}

// SAFETY: the ring stays mapped until the queue is closed, and this value only reads it, atomically.
unsafe impl Send for Reader {}

/// A completion.
#[derive(Debug, Clone, Copy)]
struct Completion {
    wr_id: u64,
    status: u8,
    opcode: ib::ibv_wc_opcode,
    qpn: u16,
    len: u32,
    imm: Option<u32>,
    source: u16,
    sender: Option<Sender>,
    unsolicited: bool,
}

/// The address handle number reported for an unknown sender.
const UNKNOWN_AH: u16 = 0xffff;

impl Completion {
    fn slid(&self) -> u16 {
        match self.sender {
            Some(Sender::Ah(number)) => number,
            _ => UNKNOWN_AH,
        }
    }
}

/// Translates the card's status as rdma-core's efa does.
fn wc_status(status: u8) -> ib::ibv_wc_status {
    use CompStatus as S;
    match CompStatus::from_raw(status) {
        Some(S::Ok) => ib::IBV_WC_SUCCESS,
        Some(S::Flushed) => ib::IBV_WC_WR_FLUSH_ERR,
        Some(S::LocalQpInternalError | S::LocalUnsupportedOp | S::LocalInvalidAh) => ib::IBV_WC_LOC_QP_OP_ERR,
        Some(S::LocalInvalidLkey) => ib::IBV_WC_LOC_PROT_ERR,
        Some(S::LocalBadLength) => ib::IBV_WC_LOC_LEN_ERR,
        Some(S::RemoteAbort) => ib::IBV_WC_REM_ABORT_ERR,
        Some(S::RemoteRnr) => ib::IBV_WC_RNR_RETRY_EXC_ERR,
        Some(S::RemoteBadDestQpn) => ib::IBV_WC_REM_INV_RD_REQ_ERR,
        Some(S::RemoteBadStatus) => ib::IBV_WC_BAD_RESP_ERR,
        Some(S::RemoteFeatureMismatch | S::RemoteBadLength) => ib::IBV_WC_REM_INV_REQ_ERR,
        Some(S::LocalUnresponsiveRemote | S::LocalUnreachableRemote) => ib::IBV_WC_RESP_TIMEOUT_ERR,
        Some(S::RemoteBadAddress) => ib::IBV_WC_REM_ACCESS_ERR,
        Some(S::RemoteUnknownPeer) => ib::IBV_WC_REM_OP_ERR,
        None => ib::IBV_WC_GENERAL_ERR,
    }
}

impl Reader {
    /// Returns the next entry, if the card has written it.
    fn next(&mut self) -> Option<RawCqe> {
        let slot = self.buffer.wrapping_add((self.next & (self.entries - 1)) as usize * CQ_ENTRY_LEN as usize);
        let word = |i: usize| {
            // SAFETY: the ring is mapped until the queue is closed, and the slot lies in it. The acquire orders the
            // first word, which holds the phase, before the others.
            unsafe { memory::load_acquire(slot.wrapping_add(8 * i).cast()) }
        };
        let expected = (self.next >> self.entries.trailing_zeros()) & 1 == 0;
        if RawCqe::from_words([word(0), 0, 0, 0]).phase() != expected {
            return None;
        }
        self.next = self.next.wrapping_add(1);
        Some(RawCqe::from_words(std::array::from_fn(word)))
    }

    /// Takes the next completion.
    ///
    /// # Errors
    /// As in rdma-core's efa: `ENOENT` when there is none, `EINVAL` if its queue pair is closed.
    fn take(&mut self, open: &Context) -> Result<Completion, Errno> {
        self.current = None;
        let raw = match self.next() {
            Some(raw) => raw,
            None => {
                open.card()?.poll();
                self.next().ok_or(Errno(libc::ENOENT))?
            }
        };
        let done = match Cqe::parse(&raw, RequestIds::Bits64).map_err(|_| Errno::INVAL)? {
            Cqe::Send(cqe) => {
                let wr_id = open.queues(cqe.qp_num).and_then(|queues| queues.send().finish(cqe.wr_id));
                Completion {
                    wr_id: wr_id.ok_or(Errno::INVAL)?,
                    status: cqe.status.raw(),
                    opcode: if cqe.op == Ok(SendOp::RdmaWrite) { ib::IBV_WC_RDMA_WRITE } else { ib::IBV_WC_SEND },
                    qpn: cqe.qp_num,
                    len: 0,
                    imm: None,
                    source: 0,
                    sender: None,
                    unsolicited: false,
                }
            }
            Cqe::Recv(cqe) => {
                let queues = open.queues(cqe.qp_num).ok_or(Errno::INVAL)?;
                let wr_id = if cqe.unsolicited { Some(0) } else { queues.recv().finish(cqe.req_id.into()) };
                let write = cqe.op == Ok(SendOp::RdmaWrite);
                Completion {
                    wr_id: wr_id.ok_or(Errno::INVAL)?,
                    status: cqe.status.raw(),
                    opcode: if write { ib::IBV_WC_RECV_RDMA_WITH_IMM } else { ib::IBV_WC_RECV },
                    qpn: cqe.qp_num,
                    len: cqe.length,
                    imm: cqe.imm,
                    source: cqe.src_qp_num,
                    sender: Some(cqe.sender),
                    unsolicited: cqe.unsolicited,
                }
            }
        };
        self.current = Some(done);
        Ok(done)
    }
}

/// How long `ibv_destroy_cq` waits for the program to acknowledge its events.
const ACKNOWLEDGE_LIMIT: Duration = Duration::from_secs(5);

impl Cq {
    fn reader(&self) -> MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next completion; see [`Reader::take`].
    fn take(&self) -> Result<Completion, Errno> {
        self.reader().take(&self.context)
    }
}

fn create(
    raw: Open<Context>,
    attr: &mut ib::ibv_cq_init_attr_ex,
    dv: &ib::efadv_cq_init_attr,
) -> Result<*mut ib::ibv_cq_ex, Errno> {
    const CALL: &str = "ibv_create_cq_ex";
    let open = raw.get()?;
    if attr.comp_mask & !(ib::IBV_CQ_INIT_ATTR_MASK_FLAGS | ib::IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return Err(refuse(CALL, Errno::UNSUPPORTED, format_args!("unsupported comp_mask {:#x}", attr.comp_mask)));
    }
    if attr.comp_mask & ib::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0
        && attr.flags & !ib::IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
    {
        return Err(refuse(CALL, Errno::UNSUPPORTED, format_args!("unsupported flags {:#x}", attr.flags)));
    }
    if attr.wc_flags & !u64::from(ib::IBV_CREATE_CQ_SUP_WC_FLAGS & STANDARD_FLAGS) != 0 {
        return Err(refuse(CALL, Errno::UNSUPPORTED, format_args!("unsupported wc_flags {:#x}", attr.wc_flags)));
    }
    let has_parent = attr.comp_mask & ib::IBV_CQ_INIT_ATTR_MASK_PD != 0;
    let parent: Option<&Pd> = has_parent.then(|| raw.named(attr.parent_domain)?.get()).transpose()?;
    if parent.is_some_and(|parent| !parent.is_parent() || !parent.context.is(open)) {
        return Err(refuse(CALL, Errno::INVAL, format_args!("parent_domain is not a parent domain of the context")));
    }
    if attr.cqe == 0 || attr.cqe > MAX_CQE || attr.comp_vector >= VECTORS as u32 {
        return Err(Errno::INVAL);
    }
    attr.cqe = attr.cqe.next_power_of_two();
    let external = dv.flags & u64::from(ib::EFADV_CQ_INIT_FLAGS_EXT_MEM_DMABUF) != 0;
    let mut ring = if external {
        let memory = &dv.ext_mem_dmabuf;
        let needed = u64::from(attr.cqe) * u64::from(CQ_ENTRY_LEN);
        if memory.length < needed || memory.fd < 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the program keeps the descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(memory.fd) };
        CompletionRing::in_memory(Mapping::shared(fd, memory.offset, needed as usize)?, attr.cqe)?
    } else {
        CompletionRing::new(attr.cqe)?
    };
    let buffer: *mut u8 =
        if external && !dv.ext_mem_dmabuf.buffer.is_null() { dv.ext_mem_dmabuf.buffer.cast() } else { ring.buffer() };
    let channel: Option<&Channel> = if attr.channel.is_null() { None } else { Some(raw.named(attr.channel)?.get()?) };
    let place = Box::<Cq>::new_uninit();
    let number = place.as_ptr() as u64;
    let event = channel.map(|channel| channel.signal(number)).transpose()?;
    ring.signals.extend(event.iter().cloned());
    let doorbell = if event.is_some() { ring.add_doorbell()? } else { ptr::null_mut() };
    let reader = Reader { buffer: ring.buffer(), entries: attr.cqe, next: 0, current: None };
    let ring = open.card()?.lock().cqs.insert(ring);
    let mut shown = ib::ibv_cq_ex {
        context: raw.pointer(),
        channel: attr.channel,
        cq_context: attr.cq_context,
        handle: ring,
        cqe: attr.cqe as c_int,
        ..ib::ibv_cq_ex::default()
    };
    fill_functions(&mut shown, attr.wc_flags);
    let cq = Cq {
        raw: UnsafeCell::new(shown),
        dv: dv_functions(dv.wc_flags),
        context: Held::new(open),
        channel: channel.map(Held::new),
        _parent_domain: parent.map(Held::new),
        ring,
        buffer,
        entries: attr.cqe,
        doorbell,
        event,
        turn: Turn::default(),
        reader: Mutex::new(reader),
        uses: Uses::default(),
        unacknowledged: Arc::default(),
    };
    let unacknowledged = cq.unacknowledged.clone();
    let cq = objects::give(Box::write(place, cq));
    if let Some(channel) = channel {
        channel.attach(cq, attr.cq_context, unacknowledged);
    }
    Ok(cq.cast())
}

/// `IBV_WC_STANDARD_FLAGS`
const STANDARD_FLAGS: u32 = 0x7f;

/// Sets the functions that the program asked for. The others are null, as on hardware.
fn fill_functions(raw: &mut ib::ibv_cq_ex, flags: u64) {
    let has = |flag: u32| flags & u64::from(flag) != 0;
    raw.start_poll = Some(call2(start_poll));
    raw.next_poll = Some(call1(next_poll));
    raw.end_poll = Some(call1(end_poll));
    raw.read_opcode = Some(call1(read_opcode));
    raw.read_vendor_err = Some(call1(read_vendor_err));
    raw.read_wc_flags = Some(call1(read_wc_flags));
    raw.read_byte_len = has(ib::IBV_WC_EX_WITH_BYTE_LEN).then_some(call1(read_byte_len));
    raw.read_imm_data = has(ib::IBV_WC_EX_WITH_IMM).then_some(call1(read_imm_data));
    raw.read_qp_num = has(ib::IBV_WC_EX_WITH_QP_NUM).then_some(call1(read_qp_num));
    raw.read_src_qp = has(ib::IBV_WC_EX_WITH_SRC_QP).then_some(call1(read_src_qp));
    raw.read_slid = has(ib::IBV_WC_EX_WITH_SLID).then_some(call1(read_slid));
    raw.read_sl = has(ib::IBV_WC_EX_WITH_SL).then_some(read_zero as _);
    raw.read_dlid_path_bits = has(ib::IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_zero as _);
}

fn dv_functions(flags: u64) -> ib::efadv_cq {
    let has = |flag: u32| flags & u64::from(flag) != 0;
    ib::efadv_cq {
        comp_mask: 0,
        wc_read_sgid: has(ib::EFADV_WC_EX_WITH_SGID).then_some(call2(read_sgid)),
        wc_is_unsolicited: has(ib::EFADV_WC_EX_WITH_IS_UNSOLICITED).then_some(call1(is_unsolicited)),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    raw: Open<Context>,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: Open<Channel>,
    comp_vector: c_int,
) -> *mut ib::ibv_cq {
    object("ibv_create_cq", || {
        let mut attr = ib::ibv_cq_init_attr_ex {
            cqe: u32::try_from(cqe).map_err(|_| Errno::INVAL)?,
            cq_context,
            channel: channel.pointer(),
            comp_vector: u32::try_from(comp_vector).map_err(|_| Errno::INVAL)?,
            ..ib::ibv_cq_init_attr_ex::default()
        };
        create(raw, &mut attr, &ib::efadv_cq_init_attr::default()).map(<*mut _>::cast)
    })
}

pub(crate) unsafe extern "C" fn create_ex(
    raw: Open<Context>,
    attr: Option<&mut ib::ibv_cq_init_attr_ex>,
) -> *mut ib::ibv_cq_ex {
    object("ibv_create_cq_ex", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        create(raw, attr, &ib::efadv_cq_init_attr::default())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_create_cq(
    raw: Open<Context>,
    attr: Option<&mut ib::ibv_cq_init_attr_ex>,
    dv: Struct<ib::efadv_cq_init_attr>,
    size: Size<u32>,
) -> *mut ib::ibv_cq_ex {
    object("efadv_create_cq", || {
        let dv = dv.read(size, offset_of!(ib::efadv_cq_init_attr, flags))?;
        if dv.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        let known = u64::from(ib::EFADV_WC_EX_WITH_SGID | ib::EFADV_WC_EX_WITH_IS_UNSOLICITED);
        if dv.wc_flags & !known != 0 || dv.flags & !u64::from(ib::EFADV_CQ_INIT_FLAGS_EXT_MEM_DMABUF) != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let attr = attr.ok_or(Errno::INVAL)?;
        create(raw, attr, &dv)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(raw: *mut ib::ibv_cq) -> c_int {
    objects::destroy("ibv_destroy_cq", raw, |cq: &Cq| {
        let since = Instant::now();
        while cq.unacknowledged.any() {
            if since.elapsed() > ACKNOWLEDGE_LIMIT {
                let why = "the queue has unacknowledged events: call ibv_ack_cq_events for each event";
                return Err(refuse("ibv_destroy_cq", Errno::BUSY, format_args!("{why}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let ring = cq.context.card()?.lock().close_cq(cq.ring)?;
        if let Some(channel) = &cq.channel {
            channel.detach(raw as u64);
        }
        drop(ring);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn req_notify(raw: Open<Cq>, solicited_only: c_int) -> c_int {
    status("ibv_req_notify_cq", || {
        let cq = raw.get()?;
        if solicited_only != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        cq.event.as_ref().ok_or(Errno::INVAL)?.arm();
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn poll(raw: Open<Cq>, count: c_int, to: *mut ib::ibv_wc) -> c_int {
    entry("ibv_poll_cq", -libc::EIO, || {
        let Ok(cq) = raw.get() else { return -libc::EINVAL };
        let mut reader = cq.reader();
        for i in 0..count {
            let done = match reader.take(&cq.context) {
                Ok(done) => done,
                Err(Errno(libc::ENOENT)) if i == 0 => {
                    drop(reader);
                    relax();
                    return 0;
                }
                Err(Errno(code)) if i == 0 => return -code,
                Err(_) => return i,
            };
            // SAFETY: the program gives room for `count` completions, and this is one. Fields that a completion lacks
            // stay as they are.
            let wc = unsafe { &mut *to.wrapping_add(i as usize) };
            (wc.wr_id, wc.status, wc.vendor_err) = (done.wr_id, wc_status(done.status), done.status.into());
            (wc.opcode, wc.qp_num, wc.wc_flags) = (done.opcode, done.qpn.into(), flags_of(&done));
            if done.sender.is_some() {
                (wc.byte_len, wc.src_qp) = (done.len, done.source.into());
                (wc.sl, wc.slid) = (0, done.slid());
            }
            if let Some(imm) = done.imm {
                wc.__bindgen_anon_1.imm_data = imm.to_be();
            }
        }
        count.max(0)
    })
}

/// Yields after a poll that found nothing, on machines where the engine shares its core with other threads.
fn relax() {
    if shares_a_core() {
        std::thread::yield_now();
    }
}

fn poll_one(raw: Open<Cq>) -> c_int {
    let Ok(cq) = raw.get() else { return libc::EINVAL };
    match cq.take() {
        Ok(done) => {
            let (wr_id, status) = (offset_of!(ib::ibv_cq_ex, wr_id), offset_of!(ib::ibv_cq_ex, status));
            let fields = cq.raw.get();
            // SAFETY: the program reads the field only in its turn, and this thread has the turn.
            unsafe { fields.wrapping_byte_add(wr_id).cast::<u64>().write(done.wr_id) };
            // SAFETY: the program reads the field only in its turn, and this thread has the turn.
            unsafe { fields.wrapping_byte_add(status).cast::<ib::ibv_wc_status>().write(wc_status(done.status)) };
            0
        }
        Err(Errno(code)) => code,
    }
}

unsafe extern "C" fn start_poll(raw: Open<Cq>, attr: Option<&ib::ibv_poll_cq_attr>) -> c_int {
    entry("ibv_start_poll", libc::EIO, || {
        if attr.is_none_or(|attr| attr.comp_mask != 0) {
            return libc::EINVAL;
        }
        let Ok(cq) = raw.get() else { return libc::EINVAL };
        cq.turn.begin("ibv_start_poll", "ibv_end_poll");
        let done = poll_one(raw);
        if done != 0 {
            cq.turn.end();
            relax();
        }
        done
    })
}

unsafe extern "C" fn next_poll(raw: Open<Cq>) -> c_int {
    entry("ibv_next_poll", libc::EIO, || poll_one(raw))
}

unsafe extern "C" fn end_poll(raw: Open<Cq>) {
    if let Ok(cq) = raw.get() {
        cq.turn.end();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(raw: Open<Cq>, count: c_uint) {
    if let Ok(cq) = raw.get() {
        cq.unacknowledged.acknowledge(count);
    }
}

/// Returns a field of the completion that the program is reading, or its default.
fn current<T: Default>(raw: Open<Cq>, field: impl FnOnce(&Completion) -> T) -> T {
    let read = || {
        let cq = raw.get().ok()?;
        let current = cq.reader().current;
        current.as_ref().map(field)
    };
    entry("ibv_wc_read", None, read).unwrap_or_default()
}

fn flags_of(done: &Completion) -> c_uint {
    if done.imm.is_some() { ib::IBV_WC_WITH_IMM } else { 0 }
}

unsafe extern "C" fn read_opcode(raw: Open<Cq>) -> ib::ibv_wc_opcode {
    current(raw, |done| done.opcode)
}

unsafe extern "C" fn read_vendor_err(raw: Open<Cq>) -> u32 {
    current(raw, |done| done.status.into())
}

unsafe extern "C" fn read_wc_flags(raw: Open<Cq>) -> c_uint {
    current(raw, flags_of)
}

unsafe extern "C" fn read_byte_len(raw: Open<Cq>) -> u32 {
    current(raw, |done| done.len)
}

unsafe extern "C" fn read_imm_data(raw: Open<Cq>) -> u32 {
    current(raw, |done| done.imm.unwrap_or(0).to_be())
}

unsafe extern "C" fn read_qp_num(raw: Open<Cq>) -> u32 {
    current(raw, |done| done.qpn.into())
}

unsafe extern "C" fn read_src_qp(raw: Open<Cq>) -> u32 {
    current(raw, |done| done.source.into())
}

unsafe extern "C" fn read_slid(raw: Open<Cq>) -> u32 {
    current(raw, |done| done.slid().into())
}

extern "C" fn read_zero(_raw: *mut ib::ibv_cq_ex) -> u8 {
    0
}

unsafe extern "C" fn read_sgid(dv: Efa<Cq>, gid: Option<&mut ib::ibv_gid>) -> c_int {
    let sender = current(dv.object(), |done| done.sender);
    let Some(Sender::Gid(Some(raw))) = sender else { return -libc::ENOENT };
    match gid {
        Some(gid) => {
            gid.raw = raw;
            0
        }
        None => -libc::EINVAL,
    }
}

unsafe extern "C" fn is_unsolicited(dv: Efa<Cq>) -> bool {
    current(dv.object(), |done| done.unsolicited)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_cq_from_ibv_cq_ex(raw: *mut ib::ibv_cq_ex) -> *mut ib::efadv_cq {
    raw.wrapping_byte_add(offset_of!(Cq, dv)).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_cq(raw: Open<Cq>, attr: Struct<ib::efadv_cq_attr>, size: Size<u32>) -> c_int {
    status("efadv_query_cq", || {
        let cq = raw.get()?;
        if size.bytes() < offset_of!(ib::efadv_cq_attr, doorbell) {
            return Err(Errno::INVAL);
        }
        let whole = ib::efadv_cq_attr {
            buffer: cq.buffer,
            entry_size: CQ_ENTRY_LEN,
            num_entries: cq.entries,
            doorbell: cq.doorbell,
            ..ib::efadv_cq_attr::default()
        };
        attr.fill(&whole, size)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_of_the_card_has_one_of_verbs() {
        assert_eq!(wc_status(0), ib::IBV_WC_SUCCESS);
        assert_eq!(wc_status(1), ib::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(wc_status(0xee), ib::IBV_WC_GENERAL_ERR);
        for raw in 1..=u8::MAX {
            assert_ne!(wc_status(raw), ib::IBV_WC_SUCCESS, "{raw}");
            assert_eq!(CompStatus::from_raw(raw).is_none(), wc_status(raw) == ib::IBV_WC_GENERAL_ERR, "{raw}");
        }
    }
}
