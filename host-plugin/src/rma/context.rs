//! Context handles: setting them up across the ranks, and destroying them.

use super::engine::Engine;
use super::lane::{Address, Lane};
use super::memory::{Memories, Registered};
use super::rail;
use super::ranks::Ranks;
use super::record::Immediate;
use crate::error::Error;
use crate::trace;
use ferrogin_ffi::rma::RmaConfigV14;
use ferrogin_libfabric::bindings;
use ferrogin_rendezvous::ring::Step;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum number of contexts behind one handle.
const CONTEXTS_MAX: c_int = 1 << 12;
/// The head of a rank's block in `createContext`. Its addresses (one [`Address`] per rail) and its retired contexts'
/// numbers follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireContext {
    contexts: U32,
    number: U32,
    token: U64,
    retired: U32,
}
ferrogin_ffi::assert_layout!(WireContext, size 20, align 1, { contexts @ 0, number @ 4, token @ 8, retired @ 16 });

/// A destroyed context's endpoints.
struct Retired {
    number: u32,
    _lanes: Vec<Lane>,
}

/// Endpoints of destroyed contexts, kept open for peers' late traffic until all ranks have destroyed theirs.
#[derive(Default)]
pub struct RetiredContexts(Mutex<Vec<Retired>>);

impl RetiredContexts {
    fn numbers(&self) -> Vec<u32> {
        self.0.lock().iter().map(|retired| retired.number).collect()
    }

    /// Closes the endpoints of contexts that all ranks have destroyed.
    fn close(&self, peers: &[Peer]) {
        self.0.lock().retain(|one| !peers.iter().all(|peer| peer.retired.contains(&one.number)));
    }

    /// Closes all endpoints.
    pub fn close_all(&self) {
        self.0.lock().clear();
    }
}

/// What `createContext` returns. Only one thread at a time uses it.
pub struct Context {
    retired: Arc<RetiredContexts>,
    /// The communicator's handle.
    pub comm: usize,
    number: u32,
    /// The memory that calls have named.
    pub memories: Memories,
    /// The data path.
    pub engine: Engine,
}

impl Context {
    /// Collective: opens an endpoint on each rail and exchanges addresses. `comm` is the communicator's handle.
    ///
    /// # Errors
    /// The configuration is invalid; a card refuses; another rank failed or has a different configuration.
    pub fn create(
        ranks: &Arc<Ranks>,
        registered: &Arc<Registered>,
        retired: &Arc<RetiredContexts>,
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
            let addresses = lanes.iter().map(Lane::address).collect::<Result<Vec<_>, _>>()?;
            Ok((lanes, addresses, rail::random()?, retired.numbers()))
        })();
        let part = |number: u32, (_, addresses, token, retired): &(_, Vec<Address>, u64, Vec<u32>)| {
            let head = WireContext {
                contexts: (contexts as u32).into(),
                number: number.into(),
                token: (*token).into(),
                retired: (retired.len() as u32).into(),
            };
            let retired: Vec<U32> = retired.iter().map(|number| (*number).into()).collect();
            [head.as_bytes(), addresses.as_bytes(), retired.as_bytes()].concat()
        };
        let ((mut lanes, ..), blocks, number) = ranks.agree_in_order(Step::CreateContext, |_| opened, part)?;
        let peers = blocks.iter().enumerate().map(|(rank, block)| {
            Peer::parse(block, contexts, number, ranks.rails.len()).ok_or_else(|| {
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
        // A card accepts a peer's requests only once it knows the peer's address.
        let (peers, ..) = ranks.agree_in_order(Step::ContextReady, |_| inserted, |_, _| Vec::new())?;
        retired.close(&peers);
        let tokens = peers.iter().map(|peer| peer.token).collect();
        let engine = Engine::new(ranks.clone(), registered.clone(), contexts, immediate, lanes, tokens);
        Ok(Self { retired: retired.clone(), comm: comm as usize, number, memories: Memories::default(), engine })
    }

    /// Implements `destroyContext`. The endpoints stay open for peers' late traffic.
    pub fn destroy(self) {
        let _span = trace::span("RMA destroyContext", self.engine.ranks.rank);
        let retired = Retired { number: self.number, _lanes: self.engine.retire() };
        self.retired.0.lock().push(retired);
    }
}

/// What a rank announces in `createContext`.
#[derive(Debug)]
pub(super) struct Peer {
    addresses: Vec<Address>,
    token: u64,
    retired: BTreeSet<u32>,
}

impl Peer {
    fn parse(block: &[u8], contexts: usize, number: u32, rails: usize) -> Option<Self> {
        let (head, rest) = WireContext::ref_from_prefix(block).ok()?;
        let (addresses, retired) = <[Address]>::ref_from_prefix_with_elems(rest, rails).ok()?;
        let retired = <[U32]>::ref_from_bytes(retired).ok()?;
        let same = head.contexts.get() as usize == contexts && head.number.get() == number;
        (same && head.retired.get() as usize == retired.len()).then_some(())?;
        Some(Self {
            addresses: addresses.to_vec(),
            token: head.token.get(),
            retired: retired.iter().map(|number| number.get()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(contexts: u32, number: u32, addresses: &[Address], retired: &[u32]) -> Vec<u8> {
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
        let here = [7; size_of::<Address>()];
        let peer = Peer::parse(&block(3, 7, &[here, here], &[1, 4]), 3, 7, 2).unwrap();
        assert_eq!((peer.addresses, peer.token), (vec![here; 2], 9));
        assert_eq!(peer.retired.into_iter().collect::<Vec<_>>(), [1, 4]);
        for (bytes, (contexts, number, rails)) in [
            (block(3, 8, &[here], &[]), (3, 7, 1)),
            (block(2, 7, &[here], &[]), (3, 7, 1)),
            (block(3, 7, &[here], &[]), (3, 7, 2)),
            (block(3, 7, &[here], &[5])[..87].to_vec(), (3, 7, 1)),
            (Vec::new(), (3, 7, 0)),
        ] {
            let peer = Peer::parse(&bytes, contexts, number, rails);
            assert!(peer.is_none(), "{contexts} contexts, number {number}, {rails} rails");
        }
    }
}
