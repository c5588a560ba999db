//! `fid_ep`: a queue pair.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ferrogin_libfabric::bindings as fi;

use super::av::{Av, copy_out};
use super::call::SEND_FLAGS;
use super::cntr::Cntr;
use super::cq::Cq;
use super::direct::Direct;
use super::domain::Domain;
use super::eq::Eq;
use super::fabric::Kind;
use super::guard::{Code, data_entry, entry};
use super::lane::Lane;
use super::object::{Object, give, head, object, table, take_back};
use super::path::{Common, Path, Port};
use super::rdm::{self, Parts, Rdm};
use super::{info, ops_msg, ops_rma, options, unsupported};
use soft_nic::address::Address;
use soft_nic::card::RNR_FOR_EVER;
use soft_nic::card::counter::{EVENTS, Event};

#[repr(C)]
pub(super) struct Ep {
    fid: fi::fid_ep,
    domain: *const Domain,
    state: Mutex<State>,
    /// What it can do, as asked for.
    caps: u64,
    pub inject_size: usize,
    path: OnceLock<Arc<Path>>,
    /// Flags of operations that name none: of sends and of receives.
    tx_flags: AtomicU64,
    rx_flags: AtomicU64,
}

// SAFETY: repr(C), begins with fid_ep; this provider makes fids of this class here only.
unsafe impl Object for Ep {
    const CLASS: u32 = fi::FI_CLASS_EP;
}

/// Which queues an endpoint completes to, by direction.
#[derive(Clone, Copy)]
struct Queue {
    cq: *const Cq,
    selective: bool,
}

pub(super) struct State {
    /// Least room of a multi-receive buffer.
    pub min_multi_recv: usize,
    /// How often a send without a receive is tried again.
    pub rnr_retry: u8,
    /// Bytes of a work request, entries of the send and of the receive queue.
    pub wqe_size: u32,
    sq: u32,
    rq: u32,
    av: *const Av,
    send: Queue,
    recv: Queue,
    /// Takes no events from an endpoint without connections, but lives as long.
    eq: *const Eq,
    counters: [Vec<*const Cntr>; EVENTS],
    pub qpn: Option<u16>,
    address: Option<Address>,
}

impl Ep {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way of its operations.
    ///
    /// # Errors
    /// `EOPBADSTATE` before it is enabled.
    pub(super) fn path(&self) -> Result<&Arc<Path>, Code> {
        self.path.get().ok_or(Code::STATE)
    }

    /// Flags of operations that name none.
    pub(super) fn op_flags(&self, receive: bool) -> u64 {
        let flags = if receive { &self.rx_flags } else { &self.tx_flags };
        flags.load(Ordering::Relaxed)
    }

    pub(super) fn domain(&self) -> &Domain {
        // SAFETY: a domain outlives its endpoints.
        unsafe { &*self.domain }
    }

    /// What an address of the bound address vector leads to.
    pub(super) fn target(&self, at: u64) -> Result<super::av::Entry, Code> {
        // SAFETY: null or bound, and what is bound cannot be closed.
        let av = unsafe { self.state().av.as_ref() }.ok_or(Code::STATE)?;
        av.table.get(at).ok_or(Code::INVAL)
    }

    /// Memory of the send and of the receive queue.
    pub(super) fn queues(&self) -> Result<(fi::fi_efa_wq_attr, fi::fi_efa_wq_attr), Code> {
        let qpn = self.state().qpn.ok_or(Code::STATE)?;
        let mut core = self.domain().card.lock();
        let caps = core.config.faults.qp_caps;
        let qp = core.qp(qpn).ok_or(Code::STATE)?;
        let attr = |queue: &soft_nic::card::queue::WorkQueue, max_batch, caps| fi::fi_efa_wq_attr {
            buffer: queue.buffer(),
            entry_size: queue.entry_size,
            num_entries: queue.entries,
            doorbell: queue.doorbell(),
            max_batch,
            caps,
        };
        Ok((attr(&qp.sq, qp.max_batch, caps), attr(&qp.rq, qp.rq.entries, 0)))
    }
}

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ops_open: Some(unsupported::ops_open),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

static EP_OPS: fi::fi_ops_ep = fi::fi_ops_ep {
    size: size_of::<fi::fi_ops_ep>(),
    cancel: Some(cancel),
    getopt: Some(options::getopt),
    setopt: Some(options::setopt),
    tx_ctx: Some(unsupported::tx_ctx),
    rx_ctx: Some(unsupported::rx_ctx),
    rx_size_left: Some(unsupported::size_left),
    tx_size_left: Some(unsupported::size_left),
    export_xpu: Some(unsupported::ep_export_xpu),
};

static CM_OPS: fi::fi_ops_cm = fi::fi_ops_cm {
    size: size_of::<fi::fi_ops_cm>(),
    setname: Some(unsupported::setname),
    getname: Some(getname),
    getpeer: Some(unsupported::getpeer),
    connect: Some(unsupported::connect),
    listen: Some(unsupported::listen),
    accept: Some(unsupported::accept),
    reject: Some(unsupported::reject),
    shutdown: Some(unsupported::shutdown),
    join: Some(unsupported::join),
};

pub(super) unsafe extern "C" fn open2(
    domain: *mut fi::fid_domain,
    info: *mut fi::fi_info,
    out: *mut *mut fi::fid_ep,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return Code(fi::FI_EBADFLAGS).negative();
    }
    // SAFETY: the same arguments under the same contract.
    unsafe { open(domain, info, out, context) }
}

/// `fi_endpoint`.
pub(super) unsafe extern "C" fn open(
    domain: *mut fi::fid_domain,
    info: *mut fi::fi_info,
    out: *mut *mut fi::fid_ep,
    context: *mut c_void,
) -> c_int {
    entry("fi_endpoint", || {
        // SAFETY: the application's fid.
        let domain: &Domain = unsafe { object(domain) }?;
        // SAFETY: null or the application's info.
        let info = unsafe { info.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: null or a part of it, which never grew.
        let tx = unsafe { info.tx_attr.as_ref() };
        // SAFETY: as above.
        let rx = unsafe { info.rx_attr.as_ref() };
        // SAFETY: null or a part of it, as far as every version has it.
        let ep = unsafe { info.ep_attr.cast::<info::EpAttr>().as_ref() };
        if ep.is_some_and(|ep| ep.kind != fi::fi_ep_type::FI_EP_RDM) {
            return Err(Code::INVAL);
        }
        let faults = domain.card.lock().config.faults.clone();
        let inject = tx.map_or(0, |tx| tx.inject_size);
        let (tx_size, rx_size) = (tx.map_or(0, |tx| tx.size), rx.map_or(0, |rx| rx.size));
        let (wqe_size, sq, rq) = match domain.fabric_kind() {
            Kind::Direct => {
                let wqe_size = info::wqe_size(inject, &faults).ok_or(Code::INVAL)?;
                let sq = info::queue_size(tx_size, info::max_sq(wqe_size, &faults)).ok_or(Code::INVAL)?;
                (wqe_size, sq, info::queue_size(rx_size, info::MAX_RQ).ok_or(Code::INVAL)?)
            }
            Kind::Rdm if inject > info::RDM_INJECT => return Err(Code::INVAL),
            Kind::Rdm => (64, rdm::REQUESTS.min(faults.sq_size), u32::from(rdm::RECEIVES)),
        };
        let fid = fi::fid_ep {
            fid: head(fi::FI_CLASS_EP, context, &OPS),
            ops: table(&EP_OPS),
            cm: table(&CM_OPS),
            msg: table(&ops_msg::MSG),
            rma: table(&ops_rma::RMA),
            tagged: table(&ops_msg::TAGGED),
            atomic: table(&unsupported::ATOMIC),
            collective: ptr::null_mut(),
        };
        let nowhere = Queue { cq: ptr::null(), selective: false };
        let state = State {
            min_multi_recv: DEFAULT_MIN_MULTI_RECV,
            rnr_retry: RNR_FOR_EVER,
            wqe_size,
            sq,
            rq,
            av: ptr::null(),
            send: nowhere,
            recv: nowhere,
            eq: ptr::null(),
            counters: Default::default(),
            qpn: None,
            address: None,
        };
        let ep = Ep {
            fid,
            domain: ptr::from_ref(domain),
            state: Mutex::new(state),
            caps: info.caps,
            inject_size: match domain.fabric_kind() {
                Kind::Direct => inject.max(info::NARROW_INLINE),
                Kind::Rdm => info::RDM_INJECT,
            },
            path: OnceLock::new(),
            tx_flags: AtomicU64::new(tx.map_or(0, |tx| tx.op_flags) & SEND_FLAGS & !fi::FI_REMOTE_CQ_DATA),
            rx_flags: AtomicU64::new(rx.map_or(0, |rx| rx.op_flags) & (fi::FI_COMPLETION | fi::FI_MULTI_RECV)),
        };
        // SAFETY: `out` is the application's.
        unsafe { give(ep, out) }?;
        domain.uses.begin();
        Ok(0)
    })
}

/// Which flag of `fi_ep_bind` attaches a counter to which event.
const EVENT_FLAGS: [(u64, Event); EVENTS] = [
    (fi::FI_SEND, Event::Send),
    (fi::FI_RECV, Event::Recv),
    (fi::FI_WRITE, Event::Write),
    (fi::FI_READ, Event::Read),
    (fi::FI_REMOTE_WRITE, Event::RemoteWrite),
    (fi::FI_REMOTE_READ, Event::RemoteRead),
];

unsafe extern "C" fn bind(fid: *mut fi::fid, other: *mut fi::fid, flags: u64) -> c_int {
    entry("fi_ep_bind", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        let mut state = ep.state();
        if state.qpn.is_some() {
            return Err(Code::STATE);
        }
        // SAFETY: the application's fid; `object` checks its class.
        if let Ok(av) = unsafe { object::<Av, _>(other) } {
            if !state.av.is_null() || av.domain() != ep.domain {
                return Err(Code::INVAL);
            }
            av.uses.begin();
            state.av = av;
            return Ok(0);
        }
        // SAFETY: as above.
        if let Ok(cq) = unsafe { object::<Cq, _>(other) } {
            let known = fi::FI_TRANSMIT | fi::FI_RECV | fi::FI_SELECTIVE_COMPLETION;
            let (send, recv) = (flags & fi::FI_TRANSMIT != 0, flags & fi::FI_RECV != 0);
            let twice = send && !state.send.cq.is_null() || recv && !state.recv.cq.is_null();
            if flags & !known != 0 || !(send || recv) || twice || cq.domain() != ep.domain {
                return Err(Code::INVAL);
            }
            let bound = Queue { cq, selective: flags & fi::FI_SELECTIVE_COMPLETION != 0 };
            if send {
                cq.uses.begin();
                state.send = bound;
            }
            if recv {
                cq.uses.begin();
                state.recv = bound;
            }
            return Ok(0);
        }
        // SAFETY: as above.
        if let Ok(cntr) = unsafe { object::<Cntr, _>(other) } {
            let known: u64 = EVENT_FLAGS.iter().map(|(flag, _)| *flag).sum();
            if flags & !known != 0 || flags == 0 || cntr.domain() != ep.domain {
                return Err(Code::INVAL);
            }
            for (flag, event) in EVENT_FLAGS {
                if flags & flag != 0 {
                    if !state.counters[event as usize].is_empty() {
                        return Err(Code::INVAL);
                    }
                    cntr.uses.begin();
                    state.counters[event as usize].push(cntr);
                }
            }
            return Ok(0);
        }
        // SAFETY: as above.
        if let Ok(eq) = unsafe { object::<Eq, _>(other) } {
            if !state.eq.is_null() || flags != 0 || eq.fabric() != ep.domain().fabric() {
                return Err(Code::INVAL);
            }
            eq.uses.begin();
            state.eq = eq;
            return Ok(0);
        }
        Err(Code::NOSYS)
    })
}

unsafe extern "C" fn control(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(ep)", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        let get = c_int::try_from(fi::FI_GETOPSFLAG).is_ok_and(|get| get == command);
        let set = c_int::try_from(fi::FI_SETOPSFLAG).is_ok_and(|set| set == command);
        if command == fi::FI_ENABLE {
            return enable(ep);
        }
        if !get && !set {
            return Err(Code::NOSYS);
        }
        // SAFETY: null or the application's flags, by the interface of these commands.
        let flags = unsafe { arg.cast::<u64>().as_mut() }.ok_or(Code::INVAL)?;
        let place = match *flags & (fi::FI_TRANSMIT | fi::FI_RECV) {
            fi::FI_TRANSMIT => &ep.tx_flags,
            fi::FI_RECV => &ep.rx_flags,
            _ => return Err(Code::INVAL),
        };
        if get {
            *flags = place.load(Ordering::Relaxed);
        } else {
            let wanted = *flags & !(fi::FI_TRANSMIT | fi::FI_RECV);
            if wanted & !(SEND_FLAGS | fi::FI_MULTI_RECV) != 0 {
                return Err(Code::BADFLAGS);
            }
            place.store(wanted, Ordering::Relaxed);
        }
        Ok(0)
    })
}

fn enable(ep: &Ep) -> Result<i32, Code> {
    let domain = ep.domain();
    let mut state = ep.state();
    if state.qpn.is_some() {
        return Err(Code::STATE);
    }
    // SAFETY: null or bound, and what is bound cannot be closed.
    let av = unsafe { state.av.as_ref() }.ok_or(Code(fi::FI_ENOAV))?.table.clone();
    // SAFETY: as above.
    let cq_of = |queue: &Queue| unsafe { queue.cq.as_ref() };
    let (send, recv) = (cq_of(&state.send), cq_of(&state.recv));
    // Completions of what an endpoint does must go somewhere: the card needs a ring, the protocol at least a counter.
    let direct = domain.fabric_kind() == Kind::Direct;
    if send.is_none() && (direct || recv.is_none() && state.counters.iter().all(Vec::is_empty)) {
        return Err(Code(fi::FI_ENOCQ));
    }
    let port = |queue: &Queue| Port { queue: cq_of(queue).map(|cq| cq.queue.clone()), selective: queue.selective };
    // SAFETY: as above.
    let bound = state.counters.each_ref().map(|bound| bound.first().map(|cntr| unsafe { &**cntr }));
    domain.card.start()?;
    let mut core = domain.card.lock();
    let qpn = core.open_qp(domain.pd, state.wqe_size, state.sq, state.rq)?;
    let close = |core: &mut soft_nic::card::Core, error: Code| {
        core.close_qp(qpn);
        error
    };
    let Some(qp) = core.qp(qpn) else { return Err(Code::OTHER) };
    qp.rnr_retry = state.rnr_retry;
    let lane = Lane::new(qp.sq.clone(), qp.rq.clone(), qp.max_batch, qp.taken);
    let address = Address { qpn, qkey: qp.qkey, gid: core.gid };
    let mut common = Common {
        card: domain.card.clone(),
        pd: domain.pd,
        qpn,
        address,
        av,
        send: port(&state.send),
        recv: port(&state.recv),
        counts: Default::default(),
        inject_size: ep.inject_size,
        caps: ep.caps,
    };
    let ids = |events: &[Event]| {
        let mut ids: [Vec<u32>; EVENTS] = Default::default();
        for event in events {
            ids[*event as usize] = bound[*event as usize].iter().map(|cntr| cntr.id).collect();
        }
        ids
    };
    let path = match domain.fabric_kind() {
        Kind::Direct => {
            let all = EVENT_FLAGS.map(|(_, event)| event);
            let send_id = send.and_then(Cq::ring_id).ok_or_else(|| close(&mut core, Code(fi::FI_ENOCQ)))?;
            let enabled = core.enable_qp(qpn, send_id, recv.and_then(Cq::ring_id), ids(&all));
            enabled.map_err(|error| close(&mut core, error.into()))?;
            drop(core);
            Path::direct(common, Direct::new(lane))
        }
        Kind::Rdm => {
            let signals = [send, recv].into_iter().flatten().filter_map(|cq| cq.queue.signal.clone()).collect();
            let (ring_id, ring) = rdm::open_ring(&mut core, signals).map_err(|error| close(&mut core, error))?;
            // What peers do to this side's memory only the card sees; the rest is counted here.
            let events = ep.caps & fi::FI_RMA_EVENT != 0;
            let remote = ids(if events { &[Event::RemoteWrite, Event::RemoteRead] } else { &[] });
            if let Err(error) = core.enable_qp(qpn, ring_id, Some(ring_id), remote) {
                let error = close(&mut core, error.into());
                let _ = core.close_cq(ring_id);
                return Err(error);
            }
            drop(core);
            for event in [Event::Send, Event::Recv, Event::Write, Event::Read] {
                common.counts[event as usize] = bound[event as usize].map(|cntr| cntr.soft.clone());
            }
            let rdm = Rdm::new(&common, Parts { lane, ring, ring_id })?;
            Path::rdm(common, rdm)
        }
    };
    let path = Arc::new(path);
    path.set_min_multi_recv(state.min_multi_recv);
    for queue in [send, recv].into_iter().flatten() {
        queue.queue.attach(&path);
    }
    for cntr in bound.into_iter().flatten() {
        cntr.attach(&path);
    }
    (state.qpn, state.address) = (Some(qpn), Some(address));
    let _ = ep.path.set(path);
    Ok(0)
}

unsafe extern "C" fn cancel(fid: fi::fid_t, context: *mut c_void) -> isize {
    // SAFETY: the application's fid.
    data_entry("fi_cancel", || unsafe { object::<Ep, _>(fid) }?.path()?.cancel(context))
}

unsafe extern "C" fn getname(fid: fi::fid_t, addr: *mut c_void, len: *mut usize) -> c_int {
    entry("fi_getname", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        let bytes = ep.state().address.ok_or(Code::STATE)?.to_bytes();
        // SAFETY: `len` is null or holds the size of `addr`.
        let room = unsafe { len.as_ref() }.copied().unwrap_or(0);
        // SAFETY: as above.
        unsafe { copy_out(&bytes, addr, len) }?;
        if room < bytes.len() { Err(Code(fi::FI_ETOOSMALL)) } else { Ok(0) }
    })
}

/// How long an endpoint that is closed waits for what it still has to send.
const GOODBYE: Duration = Duration::from_secs(1);
/// Least room of a multi-receive buffer that gets another message.
const DEFAULT_MIN_MULTI_RECV: usize = 64;

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(ep)", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        let domain = ep.domain();
        let state = ep.state();
        if let Some(path) = ep.path.get() {
            path.close(GOODBYE);
            for queue in [&path.common.send.queue, &path.common.recv.queue].into_iter().flatten() {
                queue.detach(path);
            }
        }
        // SAFETY: null or bound until here.
        if let Some(av) = unsafe { state.av.as_ref() } {
            av.uses.end();
        }
        // SAFETY: as above.
        if let Some(eq) = unsafe { state.eq.as_ref() } {
            eq.uses.end();
        }
        for queue in [state.send, state.recv] {
            // SAFETY: as above.
            if let Some(cq) = unsafe { queue.cq.as_ref() } {
                cq.uses.end();
            }
        }
        for cntr in state.counters.iter().flatten() {
            // SAFETY: as above.
            let cntr = unsafe { &**cntr };
            if let Some(path) = ep.path.get() {
                cntr.detach(path);
            }
            cntr.uses.end();
        }
        drop(state);
        domain.uses.end();
        // SAFETY: the application closes it.
        drop(unsafe { take_back::<Ep, _>(fid) });
        Ok(0)
    })
}
