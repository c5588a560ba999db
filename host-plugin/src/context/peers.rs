//! The peers of a `createContext`: the address handle of each of their cards, and the targets that requests name.

use super::queues::OneContext;
use super::shape::Shape;
use super::wire;
use crate::address::EndpointAddress;
use crate::comm::CollComm;
use crate::error::Error;
use crate::rail::{Peers, Rail};
use ferrogin_ffi::ext::{MAX_TARGETS, Target};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Resolves the targets of all contexts. The result keeps the address handles until it's dropped.
///
/// # Errors
/// libfabric refuses an address, or resolves it to numbers that don't match it.
pub fn resolve(
    coll: &CollComm,
    shape: &Shape,
    contexts: &mut [OneContext],
    parts: &[wire::RankContexts],
) -> Result<Vec<Peers>, Error> {
    let mut all = Vec::with_capacity(coll.rails.len());
    for (at, rail) in coll.rails.iter().enumerate().take(contexts.len()) {
        let of_rail = |id: usize| id % coll.rails.len() == at;
        let reached = || parts.iter().enumerate().filter(|(peer, _)| shape.reaches(coll.rank, *peer));
        // One address per card is enough: the handle names the card, and the peers' lists have the rest.
        let mut cards = BTreeMap::new();
        for (rank, part) in reached() {
            for context in part.contexts.iter().enumerate().filter(|(id, _)| of_rail(*id)).map(|(_, context)| context) {
                if let Some(first) = context.addresses().next() {
                    cards.entry(first.gid).or_insert((rank, first));
                }
            }
        }
        let (peers, handles) = handles_of(rail, &contexts[at], &cards)?;
        all.push(peers);
        for (id, one) in contexts.iter_mut().enumerate().filter(|(id, _)| of_rail(*id)) {
            let slots = reached().map(|(_, part)| part.contexts[id].endpoints.len()).max().unwrap_or(0);
            let mut targets = vec![Target::default(); targets(slots, coll.nranks)?];
            for (rank, part) in reached() {
                for (slot, address) in part.contexts[id].addresses().enumerate() {
                    let ah = handles.get(&address.gid).copied().unwrap_or_default();
                    targets[slot * coll.nranks + rank] = Target { ah, qpn: address.qpn, qkey: address.qkey };
                }
            }
            one.targets = targets.into();
        }
    }
    Ok(all)
}

/// Returns the number of a context's targets, of which kernels can name fewer than [`MAX_TARGETS`].
fn targets(slots: usize, nranks: usize) -> Result<usize, Error> {
    let all = slots.saturating_mul(nranks);
    if all < MAX_TARGETS {
        return Ok(all);
    }
    Err(Error::Usage(format!(
        "{all} targets (one per rank and signal) are too many, because a context must have fewer than {MAX_TARGETS}: \
         create it with fewer signals"
    )))
}

/// Inserts one address per card into the rail's address vector, in one call, and queries the handles. `cards` has a
/// rank and an address for each card.
fn handles_of(
    rail: &Arc<Rail>,
    context: &OneContext,
    cards: &BTreeMap<[u8; 16], (usize, EndpointAddress)>,
) -> Result<(Peers, BTreeMap<[u8; 16], u16>), Error> {
    let what = |rank: usize| format!("resolving the address of rank {rank} on card {}", rail.name());
    let addresses: Vec<_> = cards.values().map(|(_, address)| *address).collect();
    let first = cards.values().next().map_or(0, |(rank, _)| *rank);
    let (peers, refused) = rail.insert(&addresses).map_err(Error::fabric(what(first)))?;
    if let Some((at, source)) = refused {
        let rank = cards.values().nth(at).map_or(first, |(rank, _)| *rank);
        return Err(Error::Fabric { what: what(rank), source });
    }
    let mut handles = BTreeMap::new();
    for (number, (rank, address)) in peers.numbers().iter().zip(cards.values()) {
        let found = rail.gda.query_addr(&context.endpoints[0].qp, *number).map_err(Error::fabric(what(*rank)))?;
        if (found.qpn, found.qkey) != (address.qpn, address.qkey) {
            return Err(Error::Usage(format!(
                "{}: libfabric reports queue pair {}, but the address says {}: use the libfabric that comes with the \
                 card's driver, or please report it",
                what(*rank),
                found.qpn,
                address.qpn
            )));
        }
        handles.insert(address.gid, found.ah);
    }
    Ok((peers, handles))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_targets_are_refused_before_they_are_allocated() {
        assert_eq!(targets(3, 8).unwrap(), 24);
        assert!(targets(1, MAX_TARGETS - 1).is_ok());
        for (slots, nranks) in [(1, MAX_TARGETS), (MAX_TARGETS / 8, 8), (usize::MAX / 2, 4), (usize::MAX, usize::MAX)] {
            let error = targets(slots, nranks).unwrap_err().to_string();
            assert!(error.ends_with("create it with fewer signals"), "{error}");
        }
    }
}
