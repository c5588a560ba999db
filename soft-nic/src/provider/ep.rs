//! `fid_ep`: a queue pair.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrogin_fabric::bindings as fi;

use super::av::{Av, copy_out};
use super::cntr::Cntr;
use super::cq::Cq;
use super::domain::Domain;
use super::guard::{Code, entry};
use super::info;
use super::object::{Object, give, head, object, table, take_back};
use super::unsupported;
use crate::address::Address;
use crate::card::counter::{EVENTS, Event};

#[repr(C)]
pub(super) struct Ep {
    fid: fi::fid_ep,
    domain: *const Domain,
    state: Mutex<State>,
}

// SAFETY: repr(C), begins with fid_ep; this provider makes fids of this class here only.
unsafe impl Object for Ep {
    const CLASS: u32 = fi::FI_CLASS_EP;
}

struct State {
    /// Bytes of a work request, entries of the send and of the receive queue.
    wqe_size: u32,
    sq: u32,
    rq: u32,
    av: *const Av,
    send_cq: *const Cq,
    recv_cq: *const Cq,
    counters: [Vec<*const Cntr>; EVENTS],
    qpn: Option<u16>,
    address: Option<Address>,
}

impl Ep {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn domain(&self) -> &Domain {
        // SAFETY: a domain outlives its endpoints.
        unsafe { &*self.domain }
    }

    /// What an address of the bound address vector leads to.
    pub(super) fn target(&self, at: u64) -> Result<super::av::Entry, Code> {
        // SAFETY: null or bound, and what is bound cannot be closed.
        let av = unsafe { self.state().av.as_ref() }.ok_or(Code::STATE)?;
        av.get(at).ok_or(Code::INVAL)
    }

    /// Memory of the send and of the receive queue.
    pub(super) fn queues(&self) -> Result<(fi::fi_efa_wq_attr, fi::fi_efa_wq_attr), Code> {
        let qpn = self.state().qpn.ok_or(Code::STATE)?;
        let mut core = self.domain().card.lock();
        let qp = core.qp(qpn).ok_or(Code::STATE)?;
        let attr = |queue: &crate::card::queue::WorkQueue, max_batch, caps| fi::fi_efa_wq_attr {
            buffer: queue.buffer(),
            entry_size: queue.entry_size,
            num_entries: queue.entries,
            doorbell: queue.doorbell(),
            max_batch,
            caps,
        };
        let caps = fi::fi_efa_wq_caps::FI_EFA_WQ_CAPS_64_BIT_REQ_ID as u16;
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
    cancel: Some(unsupported::cancel),
    getopt: Some(getopt),
    setopt: Some(setopt),
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
        let wqe_size = info::wqe_size(inject, &faults).ok_or(Code::INVAL)?;
        let sq = info::queue_size(tx.map_or(0, |tx| tx.size), info::max_sq(wqe_size, &faults)).ok_or(Code::INVAL)?;
        let rq = info::queue_size(rx.map_or(0, |rx| rx.size), info::MAX_RQ).ok_or(Code::INVAL)?;
        let fid = fi::fid_ep {
            fid: head(fi::FI_CLASS_EP, context, &OPS),
            ops: table(&EP_OPS),
            cm: table(&CM_OPS),
            msg: table(&unsupported::MSG),
            rma: table(&unsupported::RMA),
            tagged: table(&unsupported::TAGGED),
            atomic: table(&unsupported::ATOMIC),
            collective: ptr::null_mut(),
        };
        let state = State {
            wqe_size,
            sq,
            rq,
            av: ptr::null(),
            send_cq: ptr::null(),
            recv_cq: ptr::null(),
            counters: Default::default(),
            qpn: None,
            address: None,
        };
        // SAFETY: `out` is the application's.
        unsafe { give(Ep { fid, domain: ptr::from_ref(domain), state: Mutex::new(state) }, out) }?;
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
            let twice = send && !state.send_cq.is_null() || recv && !state.recv_cq.is_null();
            if flags & !known != 0 || !(send || recv) || twice || cq.domain() != ep.domain {
                return Err(Code::INVAL);
            }
            for (wanted, place) in [(send, 0), (recv, 1)] {
                if wanted {
                    cq.uses.begin();
                    *(if place == 0 { &mut state.send_cq } else { &mut state.recv_cq }) = cq;
                }
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
        Err(Code::NOSYS)
    })
}

unsafe extern "C" fn control(fid: *mut fi::fid, command: c_int, _arg: *mut c_void) -> c_int {
    entry("fi_control(ep)", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        match command {
            fi::FI_ENABLE => enable(ep),
            _ => Err(Code::NOSYS),
        }
    })
}

fn enable(ep: &Ep) -> Result<i32, Code> {
    let mut state = ep.state();
    if state.qpn.is_some() {
        return Err(Code::STATE);
    }
    if state.av.is_null() {
        return Err(Code(fi::FI_ENOAV));
    }
    // SAFETY: null or bound, and what is bound cannot be closed.
    let send = unsafe { state.send_cq.as_ref() }.ok_or(Code(fi::FI_ENOCQ))?.id;
    // SAFETY: as above.
    let recv = unsafe { state.recv_cq.as_ref() }.map(|cq| cq.id);
    let counters = state.counters.each_ref().map(|bound| {
        // SAFETY: as above.
        bound.iter().map(|cntr| unsafe { (**cntr).id }).collect::<Vec<_>>()
    });
    let domain = ep.domain();
    domain.card.start()?;
    let mut core = domain.card.lock();
    let qpn = core.open_qp(domain.pd, state.wqe_size, state.sq, state.rq)?;
    if let Err(error) = core.enable_qp(qpn, send, recv, counters) {
        core.close_qp(qpn);
        return Err(error.into());
    }
    let gid = core.gid;
    let qkey = core.qp(qpn).map_or(0, |qp| qp.qkey);
    (state.qpn, state.address) = (Some(qpn), Some(Address { gid, qpn, qkey }));
    Ok(0)
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

unsafe extern "C" fn getopt(fid: fi::fid_t, level: c_int, name: c_int, value: *mut c_void, len: *mut usize) -> c_int {
    entry("fi_getopt", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        if level != fi::FI_OPT_ENDPOINT as c_int {
            return Err(Code(fi::FI_ENOPROTOOPT));
        }
        let answer = match u32::try_from(name) {
            Ok(fi::FI_OPT_MAX_RMA_SIZE) => crate::card::request::MAX_RDMA_SIZE as usize,
            Ok(fi::FI_OPT_INJECT_RMA_SIZE) => {
                if ep.state().wqe_size == 128 {
                    info::WIDE_INLINE
                } else {
                    0
                }
            }
            _ => return Err(Code(fi::FI_ENOPROTOOPT)),
        };
        // SAFETY: `len` is null or holds the size of `value`.
        unsafe { copy_out(&answer.to_ne_bytes(), value, len) }?;
        Ok(0)
    })
}

/// Options that change nothing about a card that has what they ask for anyway.
unsafe extern "C" fn setopt(fid: fi::fid_t, level: c_int, name: c_int, value: *const c_void, len: usize) -> c_int {
    entry("fi_setopt", || {
        // SAFETY: the application's fid.
        unsafe { object::<Ep, _>(fid) }?;
        if level != fi::FI_OPT_ENDPOINT as c_int {
            return Err(Code(fi::FI_ENOPROTOOPT));
        }
        if value.is_null() || len == 0 {
            return Err(Code::INVAL);
        }
        // SAFETY: `len` bytes, at least one, by the interface.
        let enable = unsafe { value.cast::<u8>().read() } != 0;
        match name {
            // Without device RDMA and with emulation there would be another card.
            fi::FI_OPT_EFA_USE_DEVICE_RDMA if enable => Ok(0),
            fi::FI_OPT_EFA_HOMOGENEOUS_PEERS => Ok(0),
            _ if u32::try_from(name).is_ok_and(|n| {
                matches!(n, fi::FI_OPT_CUDA_API_PERMITTED | fi::FI_OPT_SHARED_MEMORY_PERMITTED | fi::FI_OPT_FI_HMEM_P2P)
            }) =>
            {
                Ok(0)
            }
            _ => Err(Code(fi::FI_ENOPROTOOPT)),
        }
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(ep)", || {
        // SAFETY: the application's fid.
        let ep: &Ep = unsafe { object(fid) }?;
        let domain = ep.domain();
        let state = ep.state();
        if let Some(qpn) = state.qpn {
            domain.card.lock().close_qp(qpn);
        }
        // SAFETY: null or bound until here.
        if let Some(av) = unsafe { state.av.as_ref() } {
            av.uses.end();
        }
        for cq in [state.send_cq, state.recv_cq] {
            // SAFETY: as above.
            if let Some(cq) = unsafe { cq.as_ref() } {
                cq.uses.end();
            }
        }
        for cntr in state.counters.iter().flatten() {
            // SAFETY: as above.
            unsafe { &**cntr }.uses.end();
        }
        drop(state);
        domain.uses.end();
        // SAFETY: the application closes it.
        drop(unsafe { take_back::<Ep, _>(fid) });
        Ok(0)
    })
}
