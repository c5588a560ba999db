//! A rail: one card as a communicator uses it. Everything of the communicator on that card shares one domain and one
//! address vector, so that each peer endpoint is looked up once, whoever posts to it.

use crate::error::Error;
use crate::plugin::Plugin;
use ferrogin_libfabric::{AddressVector, Domain, Fabric, FiAddr, GdaOps, Info, bindings};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// An open card.
pub struct Rail {
    /// Number of the rail within the communicator's device.
    pub index: u32,
    /// The card.
    pub info: Info,
    /// What queues, memory and addresses are opened on.
    pub domain: Arc<Domain>,
    /// Operations for queues that a device drives.
    pub gda: GdaOps,
    /// Peers.
    pub av: Arc<AddressVector>,
}

impl Rail {
    /// Opens a card for a communicator of `nranks`.
    ///
    /// # Errors
    /// libfabric's, with the card's name.
    pub fn open(index: u32, info: &Info, nranks: usize) -> Result<Arc<Self>, Error> {
        let name = info.domain_name();
        let failed = |what: &str| Error::fabric(format!("{what} {name}"));
        let fabric = Fabric::open(info).map_err(failed("opening the fabric of card"))?;
        let domain = Domain::open(&fabric, info).map_err(failed("opening card"))?;
        let gda = domain.gda().map_err(failed("asking for GPU-driven queues on card"))?;
        // The data endpoint and some signals of each rank; it grows.
        let av = AddressVector::open(&domain, nranks * 16).map_err(failed("opening the address vector of card"))?;
        Ok(Arc::new(Self { index, info: info.clone(), domain, gda, av }))
    }

    /// The card's name.
    pub fn name(&self) -> String {
        self.info.domain_name()
    }

    /// Adds a peer's endpoint; it is taken out again when the result is dropped.
    ///
    /// # Errors
    /// libfabric's.
    pub fn peer(self: &Arc<Self>, address: &[u8]) -> Result<Peer, ferrogin_libfabric::Error> {
        Ok(Peer { number: self.av.insert(address)?, rail: self.clone() })
    }

    /// Sets `count` completion counters aside before the first of them is opened.
    ///
    /// # Errors
    /// The card has not so many left, as far as this process knows.
    pub fn reserve_counters(&self, count: usize) -> Result<CounterBudget, Error> {
        let card = self.name();
        let limit = self.info.counter_count();
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        let used_here = used.entry(card.clone()).or_default();
        // 0 is a provider that does not say.
        if limit != 0 && count > limit.saturating_sub(*used_here) {
            return Err(Error::Budget(format!(
                "{count} completion counters are needed on card {card} (for each context on it: 2, one for each \
                 counter, two for each signal), but it has {limit}, of which this process uses {used_here}; ask for \
                 fewer signals, counters or contexts"
            )));
        }
        *used_here += count;
        Ok(CounterBudget { card, count, used: *used_here, limit })
    }
}

/// Completion counters in use by this process, by card.
static USED: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// Completion counters set aside; given back when dropped.
#[derive(Debug)]
pub struct CounterBudget {
    card: String,
    count: usize,
    /// In use with these, when they were set aside.
    pub used: usize,
    /// That the card has, or 0.
    pub limit: usize,
}

impl fmt::Display for CounterBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            0 => write!(f, "{} on {}", self.used, self.card),
            limit => write!(f, "{} of {limit} on {}", self.used, self.card),
        }
    }
}

impl Drop for CounterBudget {
    fn drop(&mut self) {
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = used.get_mut(&self.card) {
            *count = count.saturating_sub(self.count);
        }
    }
}

/// A peer's endpoint in the address vector.
pub struct Peer {
    /// Its number.
    pub number: FiAddr,
    rail: Arc<Rail>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Err(error) = self.rail.av.remove(self.number) {
            crate::trace!("removing a peer's address from card {}: {error}", self.rail.name());
        }
    }
}

/// Send queue, inline size and traffic class that an endpoint asks a card for.
#[derive(Debug, Clone, Copy)]
pub struct QueueWish {
    /// Requests in flight; a power of two.
    pub depth: usize,
    /// Wide requests, which can carry a write's bytes inline.
    pub wide: bool,
    /// libfabric's traffic class, or 0.
    pub tclass: u32,
}

/// Inline bytes of a wide request.
const WIDE_INLINE: usize = 80;

impl Rail {
    /// How to open endpoints on this card as `wish` says.
    ///
    /// # Errors
    /// The card has no such queues.
    pub fn endpoint_info(&self, plugin: &Plugin, wish: QueueWish) -> Result<Info, ferrogin_libfabric::Error> {
        let name = self.name();
        let mut hints = plugin.hints(Some(&name)).tx_size(wish.depth).tclass(wish.tclass);
        if wish.wide {
            hints = hints.inject_size(WIDE_INLINE);
        }
        let mut found = plugin.lib.getinfo(&hints)?.into_iter();
        let matching = found.find(|info| info.domain_name() == name && info.fabric_name() == self.info.fabric_name());
        let mut info =
            matching.ok_or_else(|| ferrogin_libfabric::Error::Argument { what: format!("card {name} is gone") })?;
        // libfabric 2.6 ignores this class in hints and takes it from the info that opens an endpoint: see fi_efa(7).
        if wish.tclass == bindings::FI_TC_LOW_LATENCY {
            info.set_tclass(wish.tclass);
        }
        Ok(info)
    }
}
