//! The card's implementation of `mlx5::device::Device`.

use std::ptr::NonNull;
use std::sync::Arc;

use mlx5::cq::{CqParts, Layout};
use mlx5::device::{
    Access, Caps, CqAttr, Device, DeviceError, Endpoint, Handle, Mr, Pd, QpAttr, RawCq, RawQp, RawWindow, SrqAttr,
};
use mlx5::rq::RecvParts;
use mlx5::sq::SendParts;
use mlx5::srq::SrqParts;
use mlx5::wire::{BLOCK, SEGMENT};
use mlx5::wqe::{Limits, Transport, Umr, WindowType};
use soft_nic::random::Random;

use super::connection::Address;
use super::cq::{self, CompletionQueue};
use super::cq_writer::{Blocks, Compression};
use super::qp::{self, Peer, QueuePair, SendRing, State};
use super::receive::{Order, ReceiveQueue};
use super::responder::ENDLESS_MS;
use super::shared::Shared;
use super::{Alive, Card, system};

/// The most blocks in a send ring, and entries in a receive ring.
const MAX_RING: u32 = 1 << 15;
const MAX_CQES: u32 = 1 << 22;
const LIMITS: Limits = Limits { max_inline: 512, max_sge: 30 };
/// The most buffers per receive: descriptors have at most 512 bytes.
const MAX_RECEIVE_SGE: u32 = 30;

pub(super) fn caps() -> Caps {
    Caps {
        name: "softefa-mlx5".into(),
        compression: true,
        type1_windows: true,
        type2_windows: true,
        atomics: true,
        blueflame: true,
        max_posts: MAX_RING / 4,
        max_cqes: MAX_CQES,
        limits: LIMITS,
    }
}

struct Domain {
    alive: Arc<Alive>,
    pd: u32,
}

/// A region's or window's key, which is removed on drop.
struct Key {
    alive: Arc<Alive>,
    key: u32,
    _domain: Handle,
}

impl Drop for Key {
    fn drop(&mut self) {
        self.alive.inner.lock().mkeys.remove(self.key);
    }
}

struct Completions {
    alive: Arc<Alive>,
    cqn: u32,
    _memory: Arc<Shared>,
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.alive.inner.lock().cqs.remove(&self.cqn);
    }
}

struct SharedReceives {
    alive: Arc<Alive>,
    srqn: u32,
    _memory: Arc<Shared>,
    _domain: Handle,
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        self.alive.inner.lock().receives.remove(&self.srqn);
    }
}

struct Pair {
    alive: Arc<Alive>,
    qpn: u32,
    _memory: Arc<Shared>,
    /// The objects that the queue pair uses, to keep them open.
    _uses: [Option<Handle>; 4],
}

impl Drop for Pair {
    fn drop(&mut self) {
        let mut core = self.alive.inner.lock();
        core.qps.remove(&self.qpn);
        core.receives.remove(&self.qpn);
    }
}

impl Card {
    fn own<'h, R: Send + Sync + 'static>(&self, handle: &'h Handle, what: &'static str) -> Result<&'h R, DeviceError> {
        handle.get::<R>().ok_or(DeviceError::Foreign { what })
    }

    fn same(&self, alive: &Arc<Alive>, what: &'static str) -> Result<(), DeviceError> {
        if Arc::ptr_eq(alive, &self.alive) { Ok(()) } else { Err(DeviceError::Foreign { what }) }
    }

    fn pd(&self, pd: &Pd) -> Result<u32, DeviceError> {
        let domain: &Domain = self.own(&pd.handle, "the protection domain")?;
        self.same(&domain.alive, "the protection domain")?;
        Ok(domain.pd)
    }

    fn pair<'h>(&self, qp: &'h Handle) -> Result<&'h Pair, DeviceError> {
        let pair: &Pair = self.own(qp, "the queue pair")?;
        self.same(&pair.alive, "the queue pair")?;
        Ok(pair)
    }

    pub(super) fn cqn(&self, cq: &Handle) -> Result<u32, DeviceError> {
        let completions: &Completions = self.own(cq, "the completion queue")?;
        self.same(&completions.alive, "the completion queue")?;
        Ok(completions.cqn)
    }
}

/// Returns the base-2 logarithm of the smallest power of two that is at least `asked` and `least`.
fn log_of(what: &'static str, asked: u64, least: u64, max: u32) -> Result<u32, DeviceError> {
    let size = asked.max(least).next_power_of_two();
    if size > u64::from(max) {
        return Err(DeviceError::Limit { what, asked, max: u64::from(max) });
    }
    Ok(size.ilog2())
}

fn log_stride(sges: u32, before: u32) -> Result<u32, DeviceError> {
    if sges > MAX_RECEIVE_SGE {
        let (asked, max) = (u64::from(sges), u64::from(MAX_RECEIVE_SGE));
        return Err(DeviceError::Limit { what: "buffers of a receive", asked, max });
    }
    let segments = (sges.max(1) + before).next_power_of_two();
    Ok((segments as usize * SEGMENT).ilog2())
}

fn check_limits(limits: &Limits) -> Result<(), DeviceError> {
    for (what, asked, max) in [
        ("inline bytes of a request", limits.max_inline, LIMITS.max_inline),
        ("buffers of a request", limits.max_sge, LIMITS.max_sge),
    ] {
        if asked > max {
            return Err(DeviceError::Limit { what, asked: asked.into(), max: max.into() });
        }
    }
    Ok(())
}

#[allow(unsafe_code)]
impl Device for Card {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        let pd = self.alive.inner.lock().number();
        Ok(Pd { handle: Handle::new(Domain { alive: self.alive.clone(), pd }) })
    }

    unsafe fn register(&self, pd: &Pd, addr: NonNull<u8>, length: usize, access: Access) -> Result<Mr, DeviceError> {
        let number = self.pd(pd)?;
        let remote = Access::REMOTE_WRITE.with(Access::REMOTE_ATOMIC);
        if access.0 & remote.0 != 0 && !access.has(Access::LOCAL_WRITE) {
            return Err(DeviceError::Call { call: "remote rights without local write", errno: libc::EINVAL });
        }
        let address = addr.as_ptr() as usize;
        let populated = soft_nic::memory::populate(address, length, access.has(Access::LOCAL_WRITE));
        populated.map_err(system("registering memory"))?;
        let mut core = self.alive.inner.lock();
        let tag = core.random.next_u32() as u8;
        let key = core.mkeys.add_region(number, address as u64, length as u64, access, tag)?;
        drop(core);
        let handle = Handle::new(Key { alive: self.alive.clone(), key, _domain: pd.handle.clone() });
        let (addr, length) = (address as u64, length as u64);
        Ok(Mr { handle, pd: pd.clone(), addr, length, access, lkey: key, rkey: key })
    }

    fn alloc_window(&self, pd: &Pd, window: WindowType) -> Result<RawWindow, DeviceError> {
        let number = self.pd(pd)?;
        let mut core = self.alive.inner.lock();
        let tag = core.random.next_u32() as u8;
        let rkey = core.mkeys.add_window(number, window, tag)?;
        drop(core);
        let handle = Handle::new(Key { alive: self.alive.clone(), key: rkey, _domain: pd.handle.clone() });
        Ok(RawWindow { handle, pd: pd.clone(), window, rkey })
    }

    fn create_cq(&self, attr: &CqAttr) -> Result<RawCq, DeviceError> {
        let log = log_of("completions of a queue", attr.entries.into(), 1, MAX_CQES)?;
        let mut core = self.alive.inner.lock();
        let layout = core.settings.compressed_layout;
        let compression = attr.compression.then(|| Compression {
            layout,
            blocks: Blocks::Random(Random::seeded(core.random.next_u64())),
            across_laps: true,
        });
        let queue = CompletionQueue::new(log, compression).map_err(system("mmap"))?;
        let (cqn, memory) = (core.number(), queue.memory.clone());
        let slots = memory.slots(cq::RING, log);
        core.cqs.insert(cqn, queue);
        drop(core);
        let completions = Completions { alive: self.alive.clone(), cqn, _memory: memory.clone() };
        let handle = Handle::new(completions);
        let parts = CqParts {
            slots,
            record: memory.driver_record(cq::CONSUMER),
            arm_record: memory.driver_record(cq::ARM),
            arm: memory.arm_register(cq::ARM_REGISTER),
            cqn,
            layout: if attr.compression { layout.into() } else { Layout::Plain },
            start_index: 0,
            keep_alive: handle.clone(),
        };
        Ok(RawCq { handle, parts })
    }

    fn create_srq(&self, pd: &Pd, attr: &SrqAttr) -> Result<SrqParts, DeviceError> {
        self.pd(pd)?;
        // One descriptor marks the end of the list and holds no receive.
        let log = log_of("receives of a shared queue", u64::from(attr.entries) + 1, 2, MAX_RING)?;
        let stride = log_stride(attr.max_sge, 1)?;
        let memory = Arc::new(Shared::new(qp::SEND_RING + (1 << (log + stride))).map_err(system("mmap"))?);
        let mut core = self.alive.inner.lock();
        let srqn = core.number();
        core.receives.insert(
            srqn,
            ReceiveQueue {
                memory: memory.clone(),
                record: qp::RECEIVE_RECORD,
                ring: qp::SEND_RING,
                log_entries: log,
                log_stride: stride,
                order: Order::List(0),
                taken: 0,
            },
        );
        drop(core);
        let (ring, record) = (memory.ring(qp::SEND_RING, log, stride), memory.driver_record(qp::RECEIVE_RECORD));
        let keep_alive = Handle::new(SharedReceives {
            alive: self.alive.clone(),
            srqn,
            _memory: memory,
            _domain: pd.handle.clone(),
        });
        Ok(SrqParts { ring, record, srqn, keep_alive })
    }

    fn create_qp(&self, pd: &Pd, attr: &QpAttr) -> Result<RawQp, DeviceError> {
        let number = self.pd(pd)?;
        let (send_cq, recv_cq) = (self.cqn(&attr.send_cq)?, self.cqn(&attr.recv_cq)?);
        check_limits(&attr.limits)?;
        let largest = attr.limits.max_ds().max(Umr::BIND_SEGMENTS).div_ceil(BLOCK / SEGMENT) as u64;
        let blocks = log_of("blocks of a send queue", u64::from(attr.max_send.max(1)) * largest, largest, MAX_RING)?;
        let receives = log_of("receives of a queue pair", attr.max_recv.into(), 1, MAX_RING)?;
        let stride = log_stride(attr.max_recv_sge, 0)?;
        let shared = match &attr.srq {
            Some(srq) => {
                let receives: &SharedReceives = self.own(srq, "the shared receive queue")?;
                self.same(&receives.alive, "the shared receive queue")?;
                Some(receives.srqn)
            }
            None => None,
        };
        let (len, own) = QueuePair::layout(blocks, receives, stride);
        let memory = Arc::new(Shared::new(len).map_err(system("mmap"))?);
        let mut core = self.alive.inner.lock();
        let qpn = core.number();
        if shared.is_none() {
            core.receives.insert(
                qpn,
                ReceiveQueue {
                    memory: memory.clone(),
                    record: qp::RECEIVE_RECORD,
                    ring: own,
                    log_entries: receives,
                    log_stride: stride,
                    order: Order::Ring,
                    taken: 0,
                },
            );
        }
        let rnr_timeout_ms = core.settings.rnr_timeout.map_or(ENDLESS_MS, |rnr_timeout| rnr_timeout.as_millis() as u64);
        core.qps.insert(
            qpn,
            QueuePair {
                pd: number,
                transport: attr.transport,
                send_cq,
                recv_cq,
                memory: memory.clone(),
                send: SendRing { log_blocks: blocks, next: 0 },
                receives: shared.unwrap_or(qpn),
                state: State::New,
                peer: None,
                qkey: 0,
                rnr_timeout_ms,
                rung: false,
                issued: Default::default(),
                token: 0,
                inbox: Default::default(),
                incoming: None,
                answered: 0,
                unready: None,
                blocked: false,
            },
        );
        drop(core);
        let uses = [Some(pd.handle.clone()), Some(attr.send_cq.clone()), Some(attr.recv_cq.clone()), attr.srq.clone()];
        let pair = Pair { alive: self.alive.clone(), qpn, _memory: memory.clone(), _uses: uses };
        let handle = Handle::new(pair);
        let send = SendParts {
            ring: memory.ring(qp::SEND_RING, blocks, BLOCK.ilog2()),
            record: memory.driver_record(qp::SEND_RECORD),
            register: memory.register(qp::REGISTER, qp::REGISTER_HALF),
            qpn,
            transport: attr.transport,
            limits: attr.limits,
            max_posts: attr.max_send.max(1),
            signal_all: attr.signal_all,
            start_index: 0,
            keep_alive: handle.clone(),
        };
        let recv = shared.is_none().then(|| RecvParts {
            ring: memory.ring(own, receives, stride),
            record: memory.driver_record(qp::RECEIVE_RECORD),
            keep_alive: handle.clone(),
        });
        Ok(RawQp { handle, pd: pd.clone(), send, recv })
    }

    fn endpoint(&self, qp: &Handle) -> Result<Endpoint, DeviceError> {
        let pair = self.pair(qp)?;
        Ok(Endpoint { qpn: pair.qpn, psn: 0, lid: 0, gid: self.address.to_bytes() })
    }

    fn connect(&self, qp: &Handle, peer: &Endpoint) -> Result<(), DeviceError> {
        let pair = self.pair(qp)?;
        let connection = self.alive.inner.connection(Address::from_bytes(&peer.gid))?;
        let mut core = self.alive.inner.lock();
        match core.qps.get_mut(&pair.qpn) {
            Some(own) if own.transport == Transport::Rc && own.state == State::New => {
                own.peer = Some(Peer { connection, qpn: peer.qpn });
                own.state = State::Working;
                own.rung = true;
                Ok(())
            }
            _ => Err(DeviceError::Call {
                call: "connecting a queue pair that is already connected or is for datagrams",
                errno: libc::EINVAL,
            }),
        }
    }

    fn open_datagrams(&self, qp: &Handle, qkey: u32) -> Result<(), DeviceError> {
        let pair = self.pair(qp)?;
        let mut core = self.alive.inner.lock();
        match core.qps.get_mut(&pair.qpn) {
            Some(own) if own.transport == Transport::Ud && own.state == State::New => {
                own.qkey = qkey;
                own.state = State::Working;
                own.rung = true;
                Ok(())
            }
            _ => Err(DeviceError::Call {
                call: "opening for datagrams a queue pair that is already open or is for connections",
                errno: libc::EINVAL,
            }),
        }
    }
}
