//! `fi_endpoint`, and the calls of an endpoint.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use ferrogin_libfabric::bindings as fi;

use super::av::Av;
use super::bindings::{Bindings, CqBinding};
use super::call::SEND_FLAGS;
use super::cntr::Cntr;
use super::completion::Completer;
use super::cq::Cq;
use super::data_path::DataPath;
use super::direct::Direct;
use super::domain::Domain;
use super::entry::{Answer, Command, Out, entry_points};
use super::ep::{Ep, Queue, State};
use super::eq::Eq;
use super::fabric::Kind;
use super::guard::Code;
use super::info::{self, RawHints};
use super::library::refuse_attribute;
use super::object::{Fid, Held, Uses, close, give, head, table};
use super::queue_pair::QueuePair;
use super::rdm::{self, Parts, Rdm};
use super::{ops_msg, ops_rma, options, unsupported};
use soft_nic::address::Address;
use soft_nic::card::RNR_RETRY_UNLIMITED;
use soft_nic::card::counter::{EVENTS, Event};

static OPS: fi::fi_ops =
    fi::fi_ops { close: Some(close::<Ep>), bind: Some(bind), control: Some(control), ..unsupported::FID };

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

/// How much room a multi-receive buffer needs by default to take another message.
const DEFAULT_MIN_MULTI_RECV: usize = 64;

fn open_endpoint(
    domain: &Domain,
    given: Option<RawHints<'_>>,
    out: &Out<'_, *mut fi::fid_ep>,
    context: *mut c_void,
) -> Result<i32, Code> {
    let given = given.ok_or(Code::INVAL)?;
    let (tx, rx) = (given.tx(), given.rx());
    let refuse = |why: std::fmt::Arguments<'_>| Err(refuse_attribute("fi_endpoint", Code::INVAL, why));
    if let Some(ep) = given.ep() {
        if ep.kind != fi::fi_ep_type::FI_EP_RDM {
            return refuse(format_args!("ep_attr->type {}: only FI_EP_RDM", ep.kind));
        }
        if ep.tx_ctx_cnt > 1 || ep.rx_ctx_cnt > 1 {
            return refuse(format_args!(
                "ep_attr->tx_ctx_cnt {}, rx_ctx_cnt {}: at most 1",
                ep.tx_ctx_cnt, ep.rx_ctx_cnt
            ));
        }
    }
    let faults = domain.card.lock().config.faults.clone();
    let inject = tx.map_or(0, |tx| tx.inject_size);
    let (tx_size, rx_size) = (tx.map_or(0, |tx| tx.size), rx.map_or(0, |rx| rx.size));
    let (wqe_size, sq, rq) = match domain.fabric_kind() {
        Kind::Direct => {
            let wqe_size = info::wqe_size(inject, &faults).ok_or(Code::INVAL)?;
            let sq = info::queue_size(tx_size, info::max_sq(wqe_size, &faults)).ok_or(Code::INVAL)?;
            (wqe_size, sq, info::queue_size(rx_size, faults.rq_size).ok_or(Code::INVAL)?)
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
    let state = State {
        min_multi_recv: DEFAULT_MIN_MULTI_RECV,
        writes_take_receives: rx.map_or(0, |rx| rx.mode) & fi::FI_RX_CQ_DATA != 0,
        rnr_retry: RNR_RETRY_UNLIMITED,
        wqe_size,
        sq,
        rq,
        av: None,
        send: None,
        recv: None,
        eq: None,
        counters: Default::default(),
        qpn: None,
        address: None,
    };
    let ep = Ep {
        fid,
        domain: Held::new(domain),
        state: Mutex::new(state),
        caps: given.info.caps,
        inject_size: match domain.fabric_kind() {
            Kind::Direct => inject.max(info::NARROW_INLINE),
            Kind::Rdm => info::RDM_INJECT,
        },
        path: OnceLock::new(),
        tx_flags: AtomicU64::new(tx.map_or(0, |tx| tx.op_flags) & SEND_FLAGS & !fi::FI_REMOTE_CQ_DATA),
        rx_flags: AtomicU64::new(rx.map_or(0, |rx| rx.op_flags) & (fi::FI_COMPLETION | fi::FI_MULTI_RECV)),
        uses: Uses::default(),
    };
    give(ep, out);
    Ok(0)
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

fn bind_cq(ep: &Ep, state: &mut State, cq: &Cq, flags: u64) -> Result<i32, Code> {
    let known = fi::FI_TRANSMIT | fi::FI_RECV | fi::FI_SELECTIVE_COMPLETION;
    let (send, recv) = (flags & fi::FI_TRANSMIT != 0, flags & fi::FI_RECV != 0);
    let twice = send && state.send.is_some() || recv && state.recv.is_some();
    if flags & !known != 0 || !(send || recv) || twice || !cq.domain.is(&ep.domain) {
        return Err(Code::INVAL);
    }
    let bound = || Queue { cq: Held::new(cq), selective: flags & fi::FI_SELECTIVE_COMPLETION != 0 };
    if send {
        state.send = Some(bound());
    }
    if recv {
        state.recv = Some(bound());
    }
    Ok(0)
}

fn bind_counter(ep: &Ep, state: &mut State, cntr: &Cntr, flags: u64) -> Result<i32, Code> {
    let known: u64 = EVENT_FLAGS.iter().map(|(flag, _)| *flag).sum();
    if flags & !known != 0 || flags == 0 || !cntr.domain.is(&ep.domain) {
        return Err(Code::INVAL);
    }
    for (_, event) in EVENT_FLAGS.into_iter().filter(|(flag, _)| flags & flag != 0) {
        let place = &mut state.counters[event as usize];
        if place.is_some() {
            return Err(Code::INVAL);
        }
        *place = Some(Held::new(cntr));
    }
    Ok(0)
}

entry_points! {
    /// `fi_endpoint`.
    pub(super) fn open(
        domain: *mut fi::fid_domain,
        info: *mut fi::fi_info,
        out: *mut *mut fi::fid_ep,
        context: *mut c_void,
    ) -> c_int
    as ("fi_endpoint") (
        domain: &Domain = domain,
        given: Option<RawHints<'_>> = info.cast_const(),
        out: Out<'_, *mut fi::fid_ep> = out,
    ) {
        open_endpoint(domain, given, &out, context)
    }

    /// `fi_endpoint2`.
    pub(super) fn open2(
        domain: *mut fi::fid_domain,
        info: *mut fi::fi_info,
        out: *mut *mut fi::fid_ep,
        flags: u64,
        context: *mut c_void,
    ) -> c_int
    as ("fi_endpoint") (
        domain: &Domain = domain,
        given: Option<RawHints<'_>> = info.cast_const(),
        out: Out<'_, *mut fi::fid_ep> = out,
    ) {
        if flags != 0 {
            return Err(Code::BADFLAGS);
        }
        open_endpoint(domain, given, &out, context)
    }

    fn bind(fid: *mut fi::fid, other: *mut fi::fid, flags: u64) -> c_int
    as ("fi_ep_bind") (ep: &Ep = fid, other: Fid<'_> = other) {
        let mut state = ep.state();
        if state.qpn.is_some() {
            return Err(Code::STATE);
        }
        if let Ok(av) = other.object::<Av>() {
            if state.av.is_some() || !av.domain.is(&ep.domain) {
                return Err(Code::INVAL);
            }
            state.av = Some(Held::new(av));
        } else if let Ok(cq) = other.object::<Cq>() {
            return bind_cq(ep, &mut state, cq, flags);
        } else if let Ok(cntr) = other.object::<Cntr>() {
            return bind_counter(ep, &mut state, cntr, flags);
        } else if let Ok(eq) = other.object::<Eq>() {
            if state.eq.is_some() || flags != 0 || !eq.fabric.is(&ep.domain.fabric) {
                return Err(Code::INVAL);
            }
            state.eq = Some(Held::new(eq));
        } else {
            return Err(Code::NOSYS);
        }
        Ok(0)
    }

    fn control(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int
    as ("fi_control(ep)") (ep: &Ep = fid, command: Command<'_> = (command, arg)) {
        let (flags, get) = match command {
            Command::Enable => return enable(ep),
            Command::GetFlags(flags) => (flags, true),
            Command::SetFlags(flags) => (flags, false),
            _ => return Err(Code::NOSYS),
        };
        let flags = flags.ok_or(Code::INVAL)?;
        let asked = flags.read();
        let place = match asked & (fi::FI_TRANSMIT | fi::FI_RECV) {
            fi::FI_TRANSMIT => &ep.tx_flags,
            fi::FI_RECV => &ep.rx_flags,
            _ => return Err(Code::INVAL),
        };
        if get {
            flags.write(place.load(Ordering::Relaxed));
        } else {
            let wanted = asked & !(fi::FI_TRANSMIT | fi::FI_RECV);
            if wanted & !(SEND_FLAGS | fi::FI_MULTI_RECV) != 0 {
                return Err(Code::BADFLAGS);
            }
            place.store(wanted, Ordering::Relaxed);
        }
        Ok(0)
    }

    fn cancel(fid: fi::fid_t, context: *mut c_void) -> isize as ("fi_cancel") (ep: &Ep = fid) {
        ep.path()?.cancel(context)?;
        Ok(0)
    }

    fn getname(fid: fi::fid_t, addr: *mut c_void, len: *mut usize) -> c_int
    as ("fi_getname") (ep: &Ep = fid, answer: Answer<'_> = (addr, len)) {
        let bytes = ep.state().address.ok_or(Code::STATE)?.to_bytes();
        let room = answer.room();
        answer.fill(&bytes)?;
        if room < bytes.len() { Err(Code(fi::FI_ETOOSMALL)) } else { Ok(0) }
    }
}

fn enable(ep: &Ep) -> Result<i32, Code> {
    let domain = &ep.domain;
    let mut state = ep.state();
    if state.qpn.is_some() {
        return Err(Code::STATE);
    }
    let av = state.av.as_ref().ok_or(Code(fi::FI_ENOAV))?.table.clone();
    let (send, recv) = (state.send.as_ref().map(|send| &*send.cq), state.recv.as_ref().map(|recv| &*recv.cq));
    // The card needs a completion queue, the protocol a completion queue or a counter.
    let direct = domain.fabric_kind() == Kind::Direct;
    let bound = state.counters.each_ref().map(|cntr| cntr.as_deref());
    if send.is_none() && (direct || recv.is_none() && bound.iter().all(Option::is_none)) {
        return Err(Code(fi::FI_ENOCQ));
    }
    let port = |queue: &Option<Queue>| {
        let queue = queue.as_ref();
        CqBinding {
            queue: queue.map(|queue| queue.cq.queue.clone()),
            selective: queue.is_some_and(|queue| queue.selective),
        }
    };
    domain.card.start(None)?;
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
