//! Context handles: set-up between the ranks, and the checks of NCCL's calls before the data path takes them.

use super::engine::{Engine, Note, Put, Signal};
use super::lane::Lane;
use super::memory::{Memory, Registered};
use super::rail;
use super::ranks::Ranks;
use super::record::Immediate;
use super::requests::Request;
use super::stream::StreamId;
use crate::error::Error;
use crate::registry::{self, Kind};
use crate::trace;
use ferrogin_ffi::rma::{RmaConfigV14, SIGNAL_OP_ADD, SIGNAL_OP_INC};
use ferrogin_libfabric::bindings;
use ferrogin_rendezvous::ring::Step;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Contexts behind one handle, at most.
const CONTEXTS_MAX: c_int = 1 << 12;
/// Bytes of an endpoint's address, at most.
const ADDRESS_MAX: usize = bindings::FI_NAME_MAX as usize;

/// A rank's part of `createContext`, before its addresses (one [`WireAddress`] for each rail) and the numbers of retired contexts.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireContext {
    contexts: U32,
    number: U32,
    token: U64,
    retired: U32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireAddress {
    len: U16,
    bytes: [u8; ADDRESS_MAX],
}
ferrogin_ffi::assert_layout!(WireContext, size 20, align 1, { contexts @ 0, number @ 4, token @ 8, retired @ 16 });
ferrogin_ffi::assert_layout!(WireAddress, size 66, align 1, { len @ 0, bytes @ 2 });

/// The endpoints of a destroyed context.
struct Retired {
    number: u32,
    _lanes: Vec<Lane<Note>>,
}

/// Endpoints of destroyed contexts, which take the late traffic of peers until all ranks have destroyed theirs.
#[derive(Default)]
pub struct RetiredContexts(Mutex<Vec<Retired>>);

impl RetiredContexts {
    fn lock(&self) -> MutexGuard<'_, Vec<Retired>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn numbers(&self) -> Vec<u32> {
        self.lock().iter().map(|retired| retired.number).collect()
    }

    /// Closes the endpoints of contexts that all ranks have destroyed.
    fn close(&self, peers: &[Peer]) {
        self.lock().retain(|one| !peers.iter().all(|peer| peer.retired.contains(&one.number)));
    }

    /// Closes all endpoints.
    pub fn close_all(&self) {
        self.lock().clear();
    }
}

/// What `createContext` returns. One thread at a time drives it, and any thread may ask for its error.
pub struct Context {
    ranks: Arc<Ranks>,
    retired: Arc<RetiredContexts>,
    /// The communicator's handle.
    pub comm: usize,
    number: u32,
    contexts: usize,
    failed: AtomicBool,
    /// `None` once the context is destroyed.
    engine: Mutex<Option<Engine>>,
}

impl Context {
    /// Collective: opens an endpoint on each rail and exchanges addresses. `comm` is the communicator's handle.
    ///
    /// # Errors
    /// The configuration is invalid; a card refuses; another rank failed or has another configuration.
    pub fn create(
        ranks: &Arc<Ranks>,
        (registered, retired): (&Arc<Registered>, &Arc<RetiredContexts>),
        comm: *mut c_void,
        config: &RmaConfigV14,
    ) -> Result<Self, Error> {
        if !(0..=CONTEXTS_MAX).contains(&config.n_contexts) {
            return Err(Error::Argument(format!(
                "nContexts = {} is not between 0 and {CONTEXTS_MAX}",
                config.n_contexts
            )));
        }
        if config.rank_stride < 0 {
            return Err(Error::Argument(format!("rankStride = {} is negative", config.rank_stride)));
        }
        let contexts = (config.n_contexts as usize).max(1);
        let immediate = Immediate::new(ranks.nranks, contexts).ok_or_else(|| {
            Error::Usage(format!(
                "{contexts} contexts of {} ranks are too many for 32 bits of immediate data: use fewer contexts",
                ranks.nranks
            ))
        })?;
        // An InfiniBand traffic class carries the DSCP in its upper six bits.
        let tclass = match config.traffic_class {
            class @ 0..=255 => bindings::FI_TC_DSCP | (class as u32 >> 2),
            _ => 0,
        };
        let _span = trace::span("RMA createContext", ranks.rank);
        let opened = (|| {
            let lanes = (0..ranks.rails.len()).map(|rail| Lane::open(ranks, rail, tclass));
            let lanes = lanes.collect::<Result<Vec<_>, _>>()?;
            let addresses = lanes.iter().map(|lane| address(&lane.address()?)).collect::<Result<Vec<_>, _>>()?;
            Ok((lanes, addresses, rail::random()?, retired.numbers()))
        })();
        let part = |number: u32, (_, addresses, token, retired): &(_, Vec<WireAddress>, u64, Vec<u32>)| {
            let head = WireContext {
                contexts: (contexts as u32).into(),
                number: number.into(),
                token: (*token).into(),
                retired: (retired.len() as u32).into(),
            };
            let retired: Vec<U32> = retired.iter().map(|number| (*number).into()).collect();
            [head.as_bytes(), addresses.as_bytes(), retired.as_bytes()].concat()
        };
        let ((mut lanes, ..), blocks, number) = ranks.agree_in_order(Step::CreateContext, opened, part)?;
        let peers = blocks.iter().enumerate().map(|(rank, block)| {
            Peer::parse(block, (contexts, number, ranks.rails.len())).ok_or_else(|| {
                Error::Usage(format!(
                    "rank {rank} and this rank create different contexts in the same call: all ranks must create the \
                     same contexts in the same order, with the same ferrogin"
                ))
            })
        });
        let inserted = peers.collect::<Result<Vec<_>, _>>().and_then(|peers| {
            for (rail, lane) in lanes.iter_mut().enumerate() {
                for (rank, peer) in peers.iter().enumerate() {
                    let what = || format!("inserting the address of rank {rank} on card {}", ranks.rails[rail].name());
                    lane.insert_peer(&peer.addresses[rail]).map_err(|source| Error::Fabric { what: what(), source })?;
                }
            }
            Ok(peers)
        });
        // A card takes a peer's requests only once it knows the peer's address.
        let (peers, ..) = ranks.agree_in_order(Step::ContextReady, inserted, |_, _| Vec::new())?;
        retired.close(&peers);
        let tokens = peers.iter().map(|peer| peer.token).collect();
        let engine = Engine::new(ranks.clone(), registered.clone(), contexts, immediate, lanes, tokens);
        let (ranks, retired, engine) = (ranks.clone(), retired.clone(), Mutex::new(Some(engine)));
        Ok(Self { ranks, retired, comm: comm as usize, number, contexts, failed: AtomicBool::new(false), engine })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the data path. A failure of it stays.
    fn with<T>(&self, call: impl FnOnce(&mut Engine) -> Result<T, Error>) -> Result<T, Error> {
        let mut engine = self.lock();
        let engine = engine
            .as_mut()
            .ok_or_else(|| Error::Usage("NCCL called destroyContext before this call had returned".to_owned()))?;
        let result = call(engine);
        if engine.failure().is_some() {
            self.failed.store(true, Ordering::Release);
        }
        result
    }

    /// True once an operation has failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// `rmaProgress`.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn progress(&self) -> Result<(), Error> {
        self.with(Engine::progress)
    }

    /// Whether a request is done, which ends it; `None` for a request that is not open.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn test(&self, request: Request) -> Result<Option<bool>, Error> {
        self.with(|engine| engine.test(request))
    }

    /// `destroyContext`. The endpoints stay for the late traffic of peers.
    pub fn destroy(&self) {
        let Some(engine) = self.lock().take() else { return };
        let _span = trace::span("RMA destroyContext", self.ranks.rank);
        let retired = Retired { number: self.number, _lanes: engine.retire() };
        self.retired.lock().push(retired);
    }

    fn stream(&self, context: c_int, rank: u32) -> Result<StreamId, Error> {
        let context = usize::try_from(context).ok().filter(|context| *context < self.contexts).ok_or_else(|| {
            Error::Argument(format!("context {context} does not exist: this handle has {}", self.contexts))
        })?;
        match rank as usize {
            peer if peer < self.ranks.nranks => Ok(StreamId { peer, context }),
            _ => Err(Error::Argument(format!("rank {rank} does not exist: the job has {}", self.ranks.nranks))),
        }
    }

    fn memory(&self, handle: *mut c_void) -> Result<Arc<Memory>, Error> {
        let memory = registry::get::<Memory>(handle, Kind::RmaMemory)?;
        if memory.comm == self.ranks.number {
            return Ok(memory);
        }
        Err(Error::Argument("the memory handle belongs to another communicator".to_owned()))
    }

    /// Checks the arguments of a transfer: bytes of `near` on this rank, and of `far` on rank `peer`.
    fn transfer(&self, peer: usize, call: &Transfer) -> Result<(), Error> {
        let Transfer { near: (near, near_offset), far: (far, far_offset), size, .. } = call;
        near.own().check("memory of this rank", *near_offset, *size)?;
        far.peers[peer].check(format_args!("memory of rank {peer}"), *far_offset, *size)
    }

    /// `iput`, and `iputSignal` with a signal. Handles of memory may be NULL with a size of 0.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed.
    pub fn put(
        &self,
        (context, rank): (c_int, u32),
        (from, source): (u64, *mut c_void),
        (to, target): (u64, *mut c_void),
        size: usize,
        signal: Option<SignalCall>,
        more_follows: bool,
    ) -> Result<Request, Error> {
        let stream = self.stream(context, rank)?;
        let mut put = Put { source: None, target: None, size: size as u64, more_follows };
        if size > 0 {
            let call =
                Transfer { near: (self.memory(source)?, from), far: (self.memory(target)?, to), size: size as u64 };
            self.transfer(stream.peer, &call)?;
            (put.source, put.target) = (Some(call.near), Some(call.far));
        }
        let signal = signal.map(|signal| self.signal(stream.peer, signal)).transpose()?;
        self.with(|engine| engine.put(stream, put, signal))
    }

    fn signal(&self, peer: usize, call: SignalCall) -> Result<Signal, Error> {
        let memory = self.memory(call.memory)?;
        let value = match call.operation {
            SIGNAL_OP_INC => 1,
            SIGNAL_OP_ADD => call.value,
            other => {
                return Err(Error::Argument(format!(
                    "signalOp {other} is not known: use NCCL_NET_SIGNAL_OP_INC ({SIGNAL_OP_INC}) or _ADD ({SIGNAL_OP_ADD})"
                )));
            }
        };
        memory.peers[peer].check(format_args!("signal in memory of rank {peer}"), call.offset, 8)?;
        if memory.peers[peer].word(call.offset).is_none() {
            return Err(Error::Argument(format!("the signal at offset {} is not aligned to 8 bytes", call.offset)));
        }
        Ok(Signal { memory: memory.number, offset: call.offset, value, strong: call.strong })
    }

    /// `iget`.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed.
    pub fn get(
        &self,
        (context, rank): (c_int, u32),
        (from, remote): (u64, *mut c_void),
        (to, local): (u64, *mut c_void),
        size: usize,
        more_follows: bool,
    ) -> Result<Request, Error> {
        let stream = self.stream(context, rank)?;
        let mut get = Put { source: None, target: None, size: size as u64, more_follows };
        if size > 0 {
            let call =
                Transfer { near: (self.memory(local)?, to), far: (self.memory(remote)?, from), size: size as u64 };
            self.transfer(stream.peer, &call)?;
            (get.source, get.target) = (Some(call.far), Some(call.near));
        }
        self.with(|engine| engine.get(stream.peer, get))
    }

    /// `iflush`: makes the bytes of completed gets visible to the GPU. Done when it returns.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed; the driver fails.
    pub fn flush(&self, (context, rank): (c_int, u32), memory: *mut c_void) -> Result<(), Error> {
        self.stream(context, rank)?;
        // NCCL passes the handle of its signals, of which there may be none.
        if !memory.is_null() {
            self.memory(memory)?;
        }
        self.with(|_| Ok(self.ranks.device.flush_writes()?))
    }
}

/// The arguments of a signal.
#[derive(Debug, Clone, Copy)]
pub struct SignalCall {
    /// The handle of the word's memory.
    pub memory: *mut c_void,
    /// Offset of the word.
    pub offset: u64,
    /// `signalValue`.
    pub value: u64,
    /// `signalOp`.
    pub operation: u32,
    /// `isStrongSignal`.
    pub strong: bool,
}

struct Transfer {
    near: (Arc<Memory>, u64),
    far: (Arc<Memory>, u64),
    size: u64,
}

/// What a rank tells in `createContext`.
#[derive(Debug)]
pub(super) struct Peer {
    addresses: Vec<Vec<u8>>,
    token: u64,
    retired: BTreeSet<u32>,
}

impl Peer {
    fn parse(block: &[u8], (contexts, number, rails): (usize, u32, usize)) -> Option<Self> {
        let (head, rest) = WireContext::ref_from_prefix(block).ok()?;
        let (addresses, retired) = <[WireAddress]>::ref_from_prefix_with_elems(rest, rails).ok()?;
        let retired = <[U32]>::ref_from_bytes(retired).ok()?;
        let same = head.contexts.get() as usize == contexts && head.number.get() == number;
        (same && head.retired.get() as usize == retired.len()).then_some(())?;
        let addresses = addresses.iter().map(|address| {
            let len = usize::from(address.len.get());
            address.bytes.get(..len).map(<[u8]>::to_vec).filter(|bytes| !bytes.is_empty())
        });
        Some(Self {
            addresses: addresses.collect::<Option<_>>()?,
            token: head.token.get(),
            retired: retired.iter().map(|number| number.get()).collect(),
        })
    }
}

fn address(bytes: &[u8]) -> Result<WireAddress, Error> {
    let mut address = WireAddress { len: (bytes.len() as u16).into(), bytes: [0; ADDRESS_MAX] };
    let fits = address.bytes.get_mut(..bytes.len()).map(|place| place.copy_from_slice(bytes));
    fits.map(|()| address).ok_or_else(|| {
        Error::Usage(format!(
            "the provider's addresses have {} bytes, more than {ADDRESS_MAX}: please report it",
            bytes.len()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(contexts: u32, number: u32, addresses: &[WireAddress], retired: &[u32]) -> Vec<u8> {
        let head = WireContext {
            contexts: contexts.into(),
            number: number.into(),
            token: 9.into(),
            retired: (retired.len() as u32).into(),
        };
        let retired: Vec<U32> = retired.iter().map(|number| (*number).into()).collect();
        [head.as_bytes(), addresses.as_bytes(), retired.as_bytes()].concat()
    }

    #[test]
    fn block_of_another_call_is_refused() {
        let here = address(&[1, 2, 3]).unwrap();
        let peer = Peer::parse(&block(3, 7, &[here, here], &[1, 4]), (3, 7, 2)).unwrap();
        assert_eq!((peer.addresses, peer.token), (vec![vec![1, 2, 3]; 2], 9));
        assert_eq!(peer.retired.into_iter().collect::<Vec<_>>(), [1, 4]);
        let mut long = here;
        long.len = 65.into();
        for (bytes, wanted) in [
            (block(3, 8, &[here], &[]), (3, 7, 1)),
            (block(2, 7, &[here], &[]), (3, 7, 1)),
            (block(3, 7, &[here], &[]), (3, 7, 2)),
            (block(3, 7, &[long], &[]), (3, 7, 1)),
            (block(3, 7, &[here], &[5])[..87].to_vec(), (3, 7, 1)),
            (Vec::new(), (3, 7, 0)),
        ] {
            assert!(Peer::parse(&bytes, wanted).is_none(), "{wanted:?}");
        }
        assert!(address(&[0; 65]).is_err());
    }
}
