//! Queue pairs: SRD and UD.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use soft_nic::card::counter::{EVENTS, Event};
use soft_nic::card::queue::RQ_ENTRY_LEN;

use crate::bindings as ib;
use crate::context::{Context, MAX_RQ, MAX_SGE, PORT, give};
use crate::counter::CompCntr;
use crate::cq::Cq;
use crate::dv;
use crate::guard::{Errno, object, refuse, status};
use crate::objects::{self, Object, Open, Param};
use crate::pd::Pd;
use crate::post::{self, Session};
use crate::queues::{Queues, Sizes};
use crate::uses::Turn;

/// A queue pair. The program reads and writes fields of `raw`, of which `own` keeps what does not change.
#[repr(C)]
pub(crate) struct QueuePair {
    raw: UnsafeCell<ib::ibv_qp_ex>,
    dv: ib::efadv_qp,
    own: ib::ibv_qp,
    state: AtomicU32,
    number: u16,
    pub(crate) queues: Arc<Queues>,
    pub(crate) turn: Turn,
    session: Mutex<Session>,
    pub(crate) signal_all: bool,
    /// It has the calls `ibv_wr_*`.
    extended: bool,
    cap: ib::ibv_qp_cap,
    settings: Mutex<Settings>,
}

// SAFETY: no other type has this kind.
unsafe impl Object for QueuePair {
    const KIND: &'static str = "queue pair";
    type Raw = ib::ibv_qp;
}

/// The state and what `ibv_modify_qp` sets.
#[derive(Debug, Default)]
struct Settings {
    qkey: u32,
    psn: u32,
    rnr_retry: u8,
    /// Counters by event.
    counters: [Option<*mut CompCntr>; EVENTS],
}

// SAFETY: `ibv_qp` is the first field of `ibv_qp_ex`, and `Open` is transparent.
unsafe impl Param<*mut ib::ibv_qp_ex> for Open<'_, QueuePair> {}

const CALL: &str = "ibv_create_qp";
const SEND_OPS: u64 = (ib::IBV_QP_EX_WITH_SEND | ib::IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;
const RDMA_OPS: u64 =
    (ib::IBV_QP_EX_WITH_RDMA_READ | ib::IBV_QP_EX_WITH_RDMA_WRITE | ib::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) as u64;

/// Checks what the program asks for, as rdma-core's efa does and with its errors.
fn check(open: &Context, attr: &ib::ibv_qp_init_attr_ex, dv: &ib::efadv_qp_init_attr) -> Result<(), Errno> {
    let unsupported = |what: &str| Err(refuse(CALL, Errno::UNSUPPORTED, format_args!("{what}")));
    let invalid = |what: &str| Err(refuse(CALL, Errno::INVAL, format_args!("{what}")));
    let srd = attr.qp_type == ib::IBV_QPT_DRIVER;
    if srd && dv.driver_qp_type != ib::EFADV_QP_DRIVER_TYPE_SRD {
        return unsupported("the driver's queue pair type is not SRD");
    }
    let flags = u32::from(dv.flags);
    if flags & !(ib::EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV | ib::EFADV_QP_FLAGS_INLINE_WRITE) != 0 {
        return unsupported("unknown EFA flags");
    }
    if attr.comp_mask & !(ib::IBV_QP_INIT_ATTR_PD | ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0 {
        return unsupported("comp_mask has attributes that EFA lacks");
    }
    if attr.comp_mask & ib::IBV_QP_INIT_ATTR_PD == 0 {
        return invalid("no protection domain");
    }
    if attr.comp_mask & ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0
        && attr.send_ops_flags & !(if srd { SEND_OPS | RDMA_OPS } else { SEND_OPS }) != 0
    {
        return unsupported("send_ops_flags has operations that this type of queue pair lacks");
    }
    if dv.wr_flags & !u64::from(ib::EFADV_WR_EX_WITH_PROCESSING_HINTS) != 0 {
        return unsupported("unknown EFA wr_flags");
    }
    if attr.recv_cq.is_null() || attr.send_cq.is_null() {
        return invalid("it needs a completion queue for sends and one for receives");
    }
    if !attr.srq.is_null() {
        return invalid("there are no shared receive queues");
    }
    let cap = &attr.cap;
    if cap.max_send_sge > MAX_SGE || cap.max_recv_sge > MAX_SGE {
        return invalid("more buffers of a request than the card has");
    }
    let inline_writes = flags & ib::EFADV_QP_FLAGS_INLINE_WRITE != 0;
    let request_size = dv::request_size(cap.max_inline_data, inline_writes);
    if cap.max_inline_data > dv::max_inline(open) || request_size == 128 && dv::max_inline(open) < 80 {
        return invalid("more inline data than the card has");
    }
    if cap.max_send_wr > dv::max_depth(request_size) {
        return invalid("more send requests than a queue holds");
    }
    if cap.max_recv_wr > MAX_RQ / cap.max_recv_sge.max(1) {
        return invalid("more receives than a queue holds");
    }
    Ok(())
}

/// # Safety
/// `raw` is null or an open context; the objects of `attr` are null or open.
unsafe fn create(
    raw: Open<Context>,
    attr: &mut ib::ibv_qp_init_attr_ex,
    dv: &ib::efadv_qp_init_attr,
) -> Result<*mut ib::ibv_qp, Errno> {
    let open = raw.get()?;
    check(open, attr, dv)?;
    // SAFETY: this function's caller passes null or an open domain.
    let pd: &Pd = unsafe { Open::at(attr.pd) }.get()?;
    // SAFETY: this function's caller passes null or an open queue.
    let send_cq: &Cq = unsafe { Open::at(attr.send_cq) }.get()?;
    // SAFETY: this function's caller passes null or an open queue.
    let recv_cq: &Cq = unsafe { Open::at(attr.recv_cq) }.get()?;
    if [pd.context(), send_cq.context(), recv_cq.context()] != [raw.pointer(); 3] {
        return Err(refuse(CALL, Errno::INVAL, format_args!("its objects belong to several contexts")));
    }
    let cap = &mut attr.cap;
    let inline_writes = u32::from(dv.flags) & ib::EFADV_QP_FLAGS_INLINE_WRITE != 0;
    let sends = cap.max_send_wr.max(1).next_power_of_two();
    let descs = (cap.max_recv_wr * cap.max_recv_sge.max(1)).next_power_of_two();
    let receives = if cap.max_recv_wr == 0 { 0 } else { descs / cap.max_recv_sge.max(1) };
    (cap.max_send_wr, cap.max_recv_wr) = (sends, receives);
    let (number, queues) = {
        let mut core = open.card.lock();
        let request_size = dv::request_size(cap.max_inline_data, inline_writes);
        let number = core.open_qp(pd.number, request_size, sends, descs)?;
        let qp = core.qp(number).ok_or(Errno::NOMEM)?;
        qp.datagrams = attr.qp_type == ib::IBV_QPT_UD;
        qp.unsolicited_writes = u32::from(dv.flags) & ib::EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV != 0;
        let sizes = Sizes {
            max_batch: qp.max_batch,
            start: qp.taken,
            max_inline: cap.max_inline_data,
            max_send_sge: cap.max_send_sge,
            receives,
            max_recv_sge: cap.max_recv_sge,
        };
        (number, Arc::new(Queues::new(qp.sq.clone(), qp.rq.clone(), &sizes)))
    };
    open.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).insert(number, queues.clone());
    let base = || ib::ibv_qp {
        context: raw.pointer(),
        qp_context: attr.qp_context,
        pd: attr.pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        handle: number.into(),
        qp_num: number.into(),
        state: ib::IBV_QPS_RESET,
        qp_type: attr.qp_type,
        ..ib::ibv_qp::default()
    };
    let mut qp = Box::new(QueuePair {
        raw: UnsafeCell::new(ib::ibv_qp_ex { qp_base: base(), ..ib::ibv_qp_ex::default() }),
        dv: ib::efadv_qp::default(),
        own: base(),
        state: AtomicU32::new(ib::IBV_QPS_RESET),
        number,
        queues,
        turn: Turn::default(),
        session: Mutex::default(),
        signal_all: attr.sq_sig_all != 0,
        extended: attr.comp_mask & ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0,
        cap: attr.cap,
        settings: Mutex::default(),
    });
    if qp.extended {
        post::fill_functions(qp.raw.get_mut(), attr.send_ops_flags);
        let hints = dv.wr_flags & u64::from(ib::EFADV_WR_EX_WITH_PROCESSING_HINTS) != 0;
        qp.dv.wr_set_processing_hints = hints.then_some(post::set_hints as _);
    }
    pd.uses.begin();
    send_cq.uses.begin();
    recv_cq.uses.begin();
    open.uses.begin();
    Ok(objects::give(qp))
}

/// The part that both forms of the attributes begin with.
fn extended(pd: *mut ib::ibv_pd, attr: &ib::ibv_qp_init_attr) -> ib::ibv_qp_init_attr_ex {
    ib::ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: ib::IBV_QP_INIT_ATTR_PD,
        pd,
        ..ib::ibv_qp_init_attr_ex::default()
    }
}

/// # Safety
/// `pd` is null or an open domain; `attr` is null or the program's.
unsafe fn create_plain(
    pd: Open<Pd>,
    attr: *mut ib::ibv_qp_init_attr,
    wanted: (ib::ibv_qp_type, Errno),
    dv: &ib::efadv_qp_init_attr,
) -> Result<*mut ib::ibv_qp, Errno> {
    // SAFETY: null, or attributes of the program, which it keeps during the call.
    let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVAL)?;
    if attr.qp_type != wanted.0 {
        return Err(refuse(CALL, wanted.1, format_args!("queue pair type {} is not that of this call", attr.qp_type)));
    }
    // SAFETY: a domain keeps its context open.
    let context = unsafe { Open::at(pd.get()?.context()) };
    let mut whole = extended(pd.pointer(), attr);
    // SAFETY: the program passes open objects.
    let qp = unsafe { create(context, &mut whole, dv) }?;
    attr.cap = whole.cap;
    Ok(qp)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: Open<Pd>, attr: *mut ib::ibv_qp_init_attr) -> *mut ib::ibv_qp {
    let dv = ib::efadv_qp_init_attr::default();
    // SAFETY: the program passes an open domain and attributes.
    object(CALL, || unsafe { create_plain(pd, attr, (ib::IBV_QPT_UD, Errno::UNSUPPORTED), &dv) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_create_driver_qp(
    pd: Open<Pd>,
    attr: *mut ib::ibv_qp_init_attr,
    driver_qp_type: u32,
) -> *mut ib::ibv_qp {
    let dv = ib::efadv_qp_init_attr { driver_qp_type, ..ib::efadv_qp_init_attr::default() };
    // SAFETY: the program passes an open domain and attributes.
    object("efadv_create_driver_qp", || unsafe { create_plain(pd, attr, (ib::IBV_QPT_DRIVER, Errno::INVAL), &dv) })
}

pub(crate) unsafe extern "C" fn create_ex(
    raw: Open<Context>,
    attr: Option<&mut ib::ibv_qp_init_attr_ex>,
) -> *mut ib::ibv_qp {
    object("ibv_create_qp_ex", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        if attr.qp_type != ib::IBV_QPT_UD {
            return Err(refuse(CALL, Errno::UNSUPPORTED, format_args!("only UD; efadv_create_qp_ex makes SRD")));
        }
        // SAFETY: the program passes open objects.
        unsafe { create(raw, attr, &ib::efadv_qp_init_attr::default()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_create_qp_ex(
    raw: Open<Context>,
    attr: Option<&mut ib::ibv_qp_init_attr_ex>,
    dv: *mut ib::efadv_qp_init_attr,
    size: u32,
) -> *mut ib::ibv_qp {
    object("efadv_create_qp_ex", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        // SAFETY: the program gives `size` readable bytes.
        let dv = unsafe { dv::read(dv, size, offset_of!(ib::efadv_qp_init_attr, flags)) }?;
        if attr.qp_type != ib::IBV_QPT_DRIVER || dv.comp_mask != 0 || dv.reserved != 0 {
            return Err(refuse(CALL, Errno::INVAL, format_args!("the type is not DRIVER, or a reserved field is set")));
        }
        // SAFETY: the program passes open objects.
        unsafe { create(raw, attr, &dv) }
    })
}

/// A change of state: the attributes that it requires, and those that it allows.
fn transition(from: ib::ibv_qp_state, to: ib::ibv_qp_state, srd: bool) -> Option<(u32, u32)> {
    const INIT: u32 = ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_PORT | ib::IBV_QP_QKEY;
    let rnr = if srd { ib::IBV_QP_RNR_RETRY } else { 0 };
    Some(match (from, to) {
        (_, ib::IBV_QPS_RESET) => (0, 0),
        (ib::IBV_QPS_RESET, ib::IBV_QPS_INIT) => (INIT, 0),
        (ib::IBV_QPS_RESET, _) => return None,
        (_, ib::IBV_QPS_ERR) => (0, 0),
        (ib::IBV_QPS_INIT, ib::IBV_QPS_INIT) => (0, INIT),
        (ib::IBV_QPS_INIT, ib::IBV_QPS_RTR) => (0, ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_QKEY),
        (ib::IBV_QPS_RTR, ib::IBV_QPS_RTS) => (ib::IBV_QP_SQ_PSN, ib::IBV_QP_CUR_STATE | ib::IBV_QP_QKEY | rnr),
        (ib::IBV_QPS_RTS | ib::IBV_QPS_SQD, ib::IBV_QPS_RTS) => (0, ib::IBV_QP_CUR_STATE | ib::IBV_QP_QKEY),
        (ib::IBV_QPS_RTS, ib::IBV_QPS_SQD) => (0, ib::IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (ib::IBV_QPS_SQD, ib::IBV_QPS_SQD) => (0, ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_QKEY),
        _ => return None,
    })
}

/// Attributes that the driver of EFA knows.
const KNOWN: u32 = ib::IBV_QP_STATE
    | ib::IBV_QP_CUR_STATE
    | ib::IBV_QP_EN_SQD_ASYNC_NOTIFY
    | ib::IBV_QP_PKEY_INDEX
    | ib::IBV_QP_PORT
    | ib::IBV_QP_QKEY
    | ib::IBV_QP_SQ_PSN
    | ib::IBV_QP_RNR_RETRY;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(raw: Open<QueuePair>, attr: Option<&ib::ibv_qp_attr>, mask: c_int) -> c_int {
    const CALL: &str = "ibv_modify_qp";
    status(CALL, || {
        let qp = raw.get()?;
        let attr = attr.ok_or(Errno::INVAL)?;
        let mask = mask as u32;
        let has = |bit| mask & bit != 0;
        if mask & !KNOWN != 0 {
            return Err(refuse(
                CALL,
                Errno::UNSUPPORTED,
                format_args!("attributes {:#x} are unknown to EFA", mask & !KNOWN),
            ));
        }
        let from = qp.state();
        let to = if has(ib::IBV_QP_STATE) { attr.qp_state } else { from };
        let srd = qp.own.qp_type == ib::IBV_QPT_DRIVER;
        let (required, allowed) = transition(from, to, srd)
            .ok_or_else(|| refuse(CALL, Errno::INVAL, format_args!("state {from} does not change to {to}")))?;
        let given = mask & !ib::IBV_QP_STATE;
        if given & required != required || given & !(required | allowed) != 0 {
            let why = format_args!(
                "state {from} changes to {to} with attributes {required:#x}, allows {allowed:#x}, not {given:#x}"
            );
            return Err(refuse(CALL, Errno::INVAL, why));
        }
        if has(ib::IBV_QP_CUR_STATE) && attr.cur_qp_state != from || has(ib::IBV_QP_PORT) && attr.port_num != PORT {
            return Err(Errno::INVAL);
        }
        if has(ib::IBV_QP_PKEY_INDEX) && attr.pkey_index != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        if to == ib::IBV_QPS_RTR {
            qp.open()?.card.open_wire()?;
        }
        qp.apply(attr, mask, to)?;
        qp.state.store(to, Ordering::Release);
        let state = qp.raw.get().wrapping_byte_add(offset_of!(ib::ibv_qp, state)).cast::<ib::ibv_qp_state>();
        // SAFETY: the field is this library's to write. Programs only read it.
        unsafe { state.write_volatile(to) };
        Ok(())
    })
}

impl QueuePair {
    pub(crate) fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> ib::ibv_qp_state {
        self.state.load(Ordering::Acquire)
    }

    /// The id and the flags that the program set for the next request.
    pub(crate) fn next_request(&self) -> (u64, c_uint) {
        let (wr_id, flags) = (offset_of!(ib::ibv_qp_ex, wr_id), offset_of!(ib::ibv_qp_ex, wr_flags));
        let fields = self.raw.get();
        // SAFETY: the program writes the field in its session only, and the caller is the program's call in that session.
        let wr_id = unsafe { fields.wrapping_byte_add(wr_id).cast::<u64>().read() };
        // SAFETY: the program writes the field in its session only, and the caller is the program's call in that session.
        (wr_id, unsafe { fields.wrapping_byte_add(flags).cast::<c_uint>().read() })
    }

    /// The context, which a queue pair keeps open.
    fn open(&self) -> Result<&Context, Errno> {
        // SAFETY: a context counts its queue pairs and is open.
        unsafe { Open::<Context>::at(self.own.context) }.get()
    }

    fn apply(&self, attr: &ib::ibv_qp_attr, mask: u32, to: ib::ibv_qp_state) -> Result<(), Errno> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let mut core = self.open()?.card.lock();
        let qp = core.qp(self.number).ok_or(Errno::INVAL)?;
        if mask & ib::IBV_QP_QKEY != 0 {
            (settings.qkey, qp.qkey) = (attr.qkey, attr.qkey);
        }
        if mask & ib::IBV_QP_SQ_PSN != 0 {
            settings.psn = attr.sq_psn;
        }
        if mask & ib::IBV_QP_RNR_RETRY != 0 {
            if attr.rnr_retry > soft_nic::card::RNR_FOR_EVER {
                return Err(Errno::INVAL);
            }
            (settings.rnr_retry, qp.rnr_retry) = (attr.rnr_retry, attr.rnr_retry);
        }
        if mask & ib::IBV_QP_STATE == 0 {
            return Ok(());
        }
        if to == ib::IBV_QPS_RESET {
            core.reset_qp(self.number);
            self.queues.reset(core.config.faults.cntr_start);
        } else if to == ib::IBV_QPS_ERR {
            core.fail_qp(self.number);
        } else if to == ib::IBV_QPS_RTR && !qp.enabled {
            // A queue pair that only receives stays in this state.
            // SAFETY: a queue pair keeps its completion queues open.
            let cq = |cq| unsafe { Open::<Cq>::at(cq) }.get().map(|cq| cq.ring);
            let base = &self.own;
            let (send, recv) = (cq(base.send_cq)?, cq(base.recv_cq)?);
            // SAFETY: a queue pair keeps its counters open.
            let id = |cntr: &*mut CompCntr| unsafe { &**cntr }.number;
            let counters = settings.counters.each_ref().map(|cntr| cntr.iter().map(id).collect());
            core.enable_qp(self.number, send, Some(recv), counters)?;
        } else if matches!(to, ib::IBV_QPS_RTS | ib::IBV_QPS_SQD) {
            core.pause_sends(self.number, to == ib::IBV_QPS_SQD);
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    raw: Open<QueuePair>,
    attr: *mut ib::ibv_qp_attr,
    mask: c_int,
    init: *mut ib::ibv_qp_init_attr,
) -> c_int {
    status("ibv_query_qp", || {
        const KNOWN: u32 = ib::IBV_QP_STATE
            | ib::IBV_QP_PORT
            | ib::IBV_QP_PKEY_INDEX
            | ib::IBV_QP_QKEY
            | ib::IBV_QP_SQ_PSN
            | ib::IBV_QP_CAP
            | ib::IBV_QP_RNR_RETRY;
        let qp = raw.get()?;
        if mask as u32 & !KNOWN != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let settings = qp.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let base = &qp.own;
        let whole = ib::ibv_qp_attr {
            qp_state: qp.state(),
            cur_qp_state: qp.state(),
            qkey: settings.qkey,
            sq_psn: settings.psn,
            cap: qp.cap,
            port_num: PORT,
            rnr_retry: settings.rnr_retry,
            ..ib::ibv_qp_attr::default()
        };
        // SAFETY: null, or attributes of the program that are writable during the call.
        unsafe { give(&whole, attr, size_of::<ib::ibv_qp_attr>()) }?;
        let whole = ib::ibv_qp_init_attr {
            qp_context: base.qp_context,
            send_cq: base.send_cq,
            recv_cq: base.recv_cq,
            srq: base.srq,
            cap: qp.cap,
            qp_type: base.qp_type,
            sq_sig_all: qp.signal_all.into(),
        };
        // SAFETY: null, or attributes of the program that are writable during the call.
        unsafe { give(&whole, init, size_of::<ib::ibv_qp_init_attr>()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(raw: *mut ib::ibv_qp) -> c_int {
    objects::destroy("ibv_destroy_qp", raw, |qp: &QueuePair| {
        let open = qp.open()?;
        open.card.close_qp(qp.number);
        open.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).remove(&qp.number);
        let base = &qp.own;
        for cq in [base.send_cq, base.recv_cq] {
            // SAFETY: a queue pair keeps its completion queues open.
            unsafe { Open::<Cq>::at(cq) }.get()?.uses.end();
        }
        for cntr in qp.settings.lock().unwrap_or_else(PoisonError::into_inner).counters.iter().flatten() {
            // SAFETY: a queue pair keeps its counters open.
            unsafe { &**cntr }.uses.end();
        }
        // SAFETY: a queue pair keeps its domain open.
        unsafe { Open::<Pd>::at(base.pd) }.get()?.end_use();
        open.uses.end();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_to_qp_ex(raw: *mut ib::ibv_qp) -> *mut ib::ibv_qp_ex {
    // SAFETY: the program passes null or an open queue pair.
    match unsafe { Open::<QueuePair>::at(raw) }.get() {
        Ok(qp) if qp.extended => raw.cast(),
        _ => std::ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn efadv_qp_from_ibv_qp_ex(raw: *mut ib::ibv_qp_ex) -> *mut ib::efadv_qp {
    raw.wrapping_byte_add(offset_of!(QueuePair, dv)).cast()
}

/// The queue pair of its EFA part.
pub(crate) fn owner(dv: *mut ib::efadv_qp) -> *mut ib::ibv_qp {
    dv.wrapping_byte_sub(offset_of!(QueuePair, dv)).cast()
}

/// Data of a message arrives in any order.
#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ib::ibv_qp, _op: ib::ibv_wr_opcode, _flags: u32) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_qp_wqs(
    raw: Open<QueuePair>,
    send: *mut ib::efadv_wq_attr,
    recv: *mut ib::efadv_wq_attr,
    size: u32,
) -> c_int {
    status("efadv_query_qp_wqs", || {
        let qp = raw.get()?;
        if (size as usize) < offset_of!(ib::efadv_wq_attr, caps) {
            return Err(Errno::INVAL);
        }
        let caps = qp.open()?.card.lock().config.faults.qp_caps;
        let (sq, rq) = (qp.queues.send(), qp.queues.recv());
        let whole = ib::efadv_wq_attr {
            buffer: sq.queue.buffer(),
            entry_size: sq.queue.entry_size,
            num_entries: sq.queue.entries,
            doorbell: sq.queue.doorbell(),
            max_batch: sq.max_batch,
            caps,
            ..ib::efadv_wq_attr::default()
        };
        // SAFETY: the program gives `size` writable bytes.
        unsafe { give(&whole, send, size as usize) }?;
        let whole = ib::efadv_wq_attr {
            buffer: rq.queue.buffer(),
            entry_size: RQ_ENTRY_LEN,
            num_entries: rq.queue.entries,
            doorbell: rq.queue.doorbell(),
            max_batch: rq.queue.entries,
            ..ib::efadv_wq_attr::default()
        };
        // SAFETY: the program gives `size` writable bytes.
        unsafe { give(&whole, recv, size as usize) }
    })
}

/// Attaches a counter to events of a queue pair, before the queue pair sends.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_attach_comp_cntr(
    raw: Open<QueuePair>,
    cntr: Open<CompCntr>,
    attr: Option<&ib::ibv_qp_attach_comp_cntr_attr>,
) -> c_int {
    status("ibv_qp_attach_comp_cntr", || {
        let qp = raw.get()?;
        let attr = attr.ok_or(Errno::INVAL)?;
        let counter = cntr.get()?;
        if attr.comp_mask != 0 || attr.op_mask & !ALL_EVENTS != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let late = matches!(qp.state(), ib::IBV_QPS_RTS | ib::IBV_QPS_SQD | ib::IBV_QPS_ERR);
        if attr.op_mask == 0 || late || counter.context() != qp.own.context {
            return Err(Errno::INVAL);
        }
        let mut settings = qp.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = EVENT_OF.iter().filter(|(bit, _)| attr.op_mask & *bit != 0);
        if wanted.clone().any(|(_, event)| settings.counters[*event as usize].is_some()) {
            return Err(Errno::BUSY);
        }
        // A queue pair that has not started takes its counters along when it starts.
        let started = qp.state() == ib::IBV_QPS_RTR;
        for (_, event) in wanted {
            if started {
                qp.open()?.card.lock().attach_counter(qp.number, *event, counter.number)?;
            }
            counter.uses.begin();
            settings.counters[*event as usize] = Some(cntr.pointer().cast());
        }
        Ok(())
    })
}

/// The events of a counter, by their bits.
const EVENT_OF: [(c_uint, Event); EVENTS] = [
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_SEND, Event::Send),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_RECV, Event::Recv),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ, Event::Read),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ, Event::RemoteRead),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE, Event::Write),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE, Event::RemoteWrite),
];
pub(crate) const ALL_EVENTS: c_uint = (1 << EVENTS) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_the_tables_of_the_driver() {
        use ib::{
            IBV_QPS_ERR as ERR, IBV_QPS_INIT as INIT, IBV_QPS_RESET as RESET, IBV_QPS_RTR as RTR, IBV_QPS_RTS as RTS,
            IBV_QPS_SQD as SQD,
        };
        let allowed = [
            (RESET, RESET),
            (RESET, INIT),
            (INIT, RESET),
            (INIT, ERR),
            (INIT, INIT),
            (INIT, RTR),
            (RTR, RESET),
            (RTR, ERR),
            (RTR, RTS),
            (RTS, RESET),
            (RTS, ERR),
            (RTS, RTS),
            (RTS, SQD),
            (SQD, RESET),
            (SQD, ERR),
            (SQD, SQD),
            (SQD, RTS),
            (ERR, RESET),
            (ERR, ERR),
        ];
        for from in [RESET, INIT, RTR, RTS, SQD, ERR] {
            for to in [RESET, INIT, RTR, RTS, SQD, ERR] {
                assert_eq!(transition(from, to, true).is_some(), allowed.contains(&(from, to)), "{from} to {to}");
            }
        }
        assert!(transition(RTR, RTS, true).unwrap().1 & ib::IBV_QP_RNR_RETRY != 0);
        assert!(transition(RTR, RTS, false).unwrap().1 & ib::IBV_QP_RNR_RETRY == 0);
    }
}
