//! `fi_endpoint`, and the calls of an endpoint.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ferrogin_libfabric::bindings as fi;

use super::av::{Av, copy_out};
use super::bindings::{Bindings, CqBinding};
use super::call::SEND_FLAGS;
use super::cntr::Cntr;
use super::completion::Completer;
use super::cq::Cq;
use super::data_path::DataPath;
use super::direct::Direct;
use super::domain::Domain;
use super::ep::{Ep, Queue, State};
use super::eq::Eq;
use super::fabric::Kind;
use super::guard::{Code, data_entry, entry};
use super::info::{self, Given};
use super::object::{give, head, object, table, take_back};
use super::queue_pair::QueuePair;
use super::rdm::{self, Parts, Rdm};
use super::{ops_msg, ops_rma, options, unsupported};
use soft_nic::address::Address;
use soft_nic::card::RNR_FOR_EVER;
use soft_nic::card::counter::{EVENTS, Event};

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
    // SAFETY: the application's arguments are passed on unchanged, and it keeps them valid during the call.
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(domain) }?;
        // SAFETY: `fi_endpoint(3)` has an info of `fi_getinfo`, which is alive during the call.
        let given = unsafe { Given::borrow(info, 0) }.ok_or(Code::INVAL)?;
        let (tx, rx) = (given.tx(), given.rx());
        if given.ep().is_some_and(|ep| ep.kind != fi::fi_ep_type::FI_EP_RDM) {
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
        let unbound = Queue { cq: ptr::null(), selective: false };
        let state = State {
            min_multi_recv: DEFAULT_MIN_MULTI_RECV,
            writes_take_receives: rx.map_or(0, |rx| rx.mode) & fi::FI_RX_CQ_DATA != 0,
            rnr_retry: RNR_FOR_EVER,
            wqe_size,
            sq,
            rq,
            av: ptr::null(),
            send: unbound,
            recv: unbound,
            eq: ptr::null(),
            counters: Default::default(),
            qpn: None,
            address: None,
        };
        let ep = Ep {
            fid,
            domain: ptr::from_ref(domain),
            state: Mutex::new(state),
            caps: given.info.caps,
            inject_size: match domain.fabric_kind() {
                Kind::Direct => inject.max(info::NARROW_INLINE),
                Kind::Rdm => info::RDM_INJECT,
            },
            path: OnceLock::new(),
            tx_flags: AtomicU64::new(tx.map_or(0, |tx| tx.op_flags) & SEND_FLAGS & !fi::FI_REMOTE_CQ_DATA),
            rx_flags: AtomicU64::new(rx.map_or(0, |rx| rx.op_flags) & (fi::FI_COMPLETION | fi::FI_MULTI_RECV)),
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { give(ep, out) }?;
        domain.uses.begin();
        Ok(0)
    })
}

/// The flags of `fi_ep_bind` that attach a counter, and their events.
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let ep: &Ep = unsafe { object(fid) }?;
        let mut state = ep.state();
        if state.qpn.is_some() {
            return Err(Code::STATE);
        }
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        if let Ok(av) = unsafe { object::<Av, _>(other) } {
            if !state.av.is_null() || av.domain() != ep.domain {
                return Err(Code::INVAL);
            }
            av.uses.begin();
            state.av = av;
            return Ok(0);
        }
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        if let Ok(eq) = unsafe { object::<Eq, _>(other) } {
            if !state.eq.is_null() || flags != 0 || eq.fabric() != ep.domain().fabric {
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let ep: &Ep = unsafe { object(fid) }?;
        let get = c_int::try_from(fi::FI_GETOPSFLAG).is_ok_and(|get| get == command);
        let set = c_int::try_from(fi::FI_SETOPSFLAG).is_ok_and(|set| set == command);
        if command == fi::FI_ENABLE {
            return enable(ep);
        }
        if !get && !set {
            return Err(Code::NOSYS);
        }
        // SAFETY: null, or the flags that `fi_control(3)` asks for these commands, writable during the call.
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
    // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
    let av = unsafe { state.av.as_ref() }.ok_or(Code(fi::FI_ENOAV))?.table.clone();
    // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
    let cq_of = |queue: &Queue| unsafe { queue.cq.as_ref() };
    let (send, recv) = (cq_of(&state.send), cq_of(&state.recv));
    // The card needs a completion queue, the protocol a completion queue or a counter.
    let direct = domain.fabric_kind() == Kind::Direct;
    if send.is_none() && (direct || recv.is_none() && state.counters.iter().all(Vec::is_empty)) {
        return Err(Code(fi::FI_ENOCQ));
    }
    let port = |queue: &Queue| CqBinding { queue: cq_of(queue).map(|cq| cq.queue.clone()), selective: queue.selective };
    // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
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
    qp.unsolicited_writes = !state.writes_take_receives;
    let queue_pair = QueuePair::new(qp.sq.clone(), qp.rq.clone(), qp.max_batch, qp.taken);
    let address = Address { qpn, qkey: qp.qkey, gid: core.gid };
    let mut bindings = Bindings {
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
            DataPath::direct(bindings, Direct::new(queue_pair))
        }
        Kind::Rdm => {
            let signals = [send, recv].into_iter().flatten().filter_map(|cq| cq.queue.signal.clone()).collect();
            let (ring_id, ring) = rdm::open_ring(&mut core, signals).map_err(|error| close(&mut core, error))?;
            // Only the card sees remote accesses. The protocol counts the other events.
            let events = ep.caps & fi::FI_RMA_EVENT != 0;
            let remote = ids(if events { &[Event::RemoteWrite, Event::RemoteRead] } else { &[] });
            if let Err(error) = core.enable_qp(qpn, ring_id, Some(ring_id), remote) {
                let error = close(&mut core, error.into());
                let _ = core.close_cq(ring_id);
                return Err(error);
            }
            drop(core);
            for event in [Event::Send, Event::Recv, Event::Write, Event::Read] {
                bindings.counts[event as usize] = bound[event as usize].map(|cntr| cntr.soft.clone());
            }
            let rdm = Rdm::new(&bindings, Parts { queue_pair, ring, ring_id })?;
            DataPath::rdm(bindings, rdm)
        }
    };
    let path = Arc::new(path);
    let completer: Arc<dyn Completer> = path.clone();
    path.set_min_multi_recv(state.min_multi_recv);
    for queue in [send, recv].into_iter().flatten() {
        queue.queue.attach(&completer);
    }
    for cntr in bound.into_iter().flatten() {
        cntr.attach(&completer);
    }
    (state.qpn, state.address) = (Some(qpn), Some(address));
    let _ = ep.path.set(path);
    Ok(0)
}

unsafe extern "C" fn cancel(fid: fi::fid_t, context: *mut c_void) -> isize {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    data_entry("fi_cancel", || unsafe { object::<Ep, _>(fid) }?.path()?.cancel(context))
}

unsafe extern "C" fn getname(fid: fi::fid_t, addr: *mut c_void, len: *mut usize) -> c_int {
    entry("fi_getname", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let ep: &Ep = unsafe { object(fid) }?;
        let bytes = ep.state().address.ok_or(Code::STATE)?.to_bytes();
        // SAFETY: null or checked not to be null; the application keeps its length variable valid during the call.
        let room = unsafe { len.as_ref() }.copied().unwrap_or(0);
        // SAFETY: `len` is null or holds the size of the buffer, which the application keeps writable during the call.
        unsafe { copy_out(&bytes, addr, len) }?;
        if room < bytes.len() { Err(Code(fi::FI_ETOOSMALL)) } else { Ok(0) }
    })
}

/// The time limit for a closing endpoint to send posted requests.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);
/// Default of the least room of a multi-receive buffer that takes another message.
const DEFAULT_MIN_MULTI_RECV: usize = 64;

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(ep)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let ep: &Ep = unsafe { object(fid) }?;
        let domain = ep.domain();
        let state = ep.state();
        let completer = ep.path.get().map(|path| path.clone() as Arc<dyn Completer>);
        if let Some((path, completer)) = ep.path.get().zip(completer.as_ref()) {
            let drops = domain.card.lock().config.faults.close_drops;
            path.close(if drops { Duration::ZERO } else { DRAIN_LIMIT });
            for queue in [&path.bindings.send.queue, &path.bindings.recv.queue].into_iter().flatten() {
                queue.detach(completer);
            }
        }
        // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
        if let Some(av) = unsafe { state.av.as_ref() } {
            av.uses.end();
        }
        // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
        if let Some(eq) = unsafe { state.eq.as_ref() } {
            eq.uses.end();
        }
        for queue in [state.send, state.recv] {
            // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
            if let Some(cq) = unsafe { queue.cq.as_ref() } {
                cq.uses.end();
            }
        }
        for cntr in state.counters.iter().flatten() {
            // SAFETY: null or bound to this endpoint, and a bound object cannot be closed before the endpoint.
            let cntr = unsafe { &**cntr };
            if let Some(completer) = &completer {
                cntr.detach(completer);
            }
            cntr.uses.end();
        }
        drop(state);
        domain.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Ep, _>(fid) });
        Ok(0)
    })
}
