//! A rail: a card as used by one communicator. All the communicator's contexts and windows share the card's domain and
//! address vector, so each peer's card is inserted once per `createContext`, however many endpoints post to it.

use crate::address::EndpointAddress;
use crate::cards::CardQuery;
use crate::error::Error;
use ferrogin_libfabric::{AddressVector, Domain, Fabric, FiAddr, GdaOps, Info, MemoryRegion, bindings};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// An open card.
pub struct Rail {
    /// The rail's number within the communicator's NCCL device.
    pub index: u32,
    /// The card.
    pub info: Info,
    /// The domain of all queues, regions and addresses.
    pub domain: Arc<Domain>,
    /// Operations for queues that kernels drive.
    pub gda: GdaOps,
    /// Addresses of the peers' endpoints.
    pub av: Arc<AddressVector>,
}

impl Rail {
    /// Opens a card for a communicator of `nranks` ranks.
    ///
    /// # Errors
    /// A libfabric call fails; the error names it and the card.
    pub fn open(index: u32, info: &Info, nranks: usize) -> Result<Arc<Self>, Error> {
        // Room for two contexts with a different card per rank; the vector grows if needed.
        let (domain, name) = (open(info)?, info.domain_name());
        let av = AddressVector::open(&domain, nranks * 2);
        let av = av.map_err(Error::fabric(format!("opening the address vector of card {name}")))?;
        let gda = domain.gda().map_err(Error::fabric(format!("asking for GPU-driven queues on card {name}")))?;
        Ok(Arc::new(Self { index, info: info.clone(), domain, gda, av }))
    }

    /// Returns the card's name.
    pub fn name(&self) -> String {
        self.info.domain_name()
    }

    /// Inserts peers' endpoints into the address vector until the result is dropped. Also returns the index of the
    /// first address that libfabric refused, if any, and the reason.
    ///
    /// # Errors
    /// libfabric refuses all addresses.
    pub fn insert(
        &self,
        addresses: &[EndpointAddress],
    ) -> Result<(Peers, Option<(usize, ferrogin_libfabric::Error)>), ferrogin_libfabric::Error> {
        let bytes: Vec<_> = addresses.iter().map(|address| address.to_bytes()).collect();
        let mut peers = Peers::new(&self.av);
        let mut refused = None;
        for (at, result) in self.av.insert_all(&bytes)?.into_iter().enumerate() {
            match result {
                Ok(number) => peers.numbers.push(number),
                Err(error) => refused = refused.or(Some((at, error))),
            }
        }
        Ok((peers, refused))
    }

    /// Returns a region's local and remote key. EFA keys have 32 bits.
    ///
    /// # Errors
    /// The provider returns no key, or one longer than 32 bits.
    pub fn keys(&self, region: &MemoryRegion) -> Result<(u32, u32), Error> {
        let lkey = self.gda.lkey(region).map_err(Error::fabric(format!("asking card {} for a key", self.name())))?;
        let rkey = u32::try_from(region.key()).map_err(|_| {
            Error::Usage(format!(
                "card {} returned the remote key {:#x}, but EFA keys have 32 bits: check that the libfabric provider \
                 is efa or softefa",
                self.name(),
                region.key()
            ))
        })?;
        Ok((lkey, rkey))
    }

    /// Reserves `count` completion counters, before any of them is opened.
    ///
    /// # Errors
    /// The card has fewer free counters, going by what this process uses.
    pub fn reserve_counters(&self, count: usize) -> Result<CounterBudget, Error> {
        let card = self.name();
        let limit = self.info.counter_count();
        let mut used = USED.lock();
        let used_here = used.entry(card.clone()).or_default();
        // 0 means that the provider reports no limit.
        if limit != 0 && count > limit.saturating_sub(*used_here) {
            return Err(Error::Budget(format!(
                "{count} completion counters are needed on card {card} (for each context on it: 2, one for each \
                 counter, two for each signal), but the card has {limit}, and this process uses {used_here} of them: \
                 request fewer signals, counters or contexts"
            )));
        }
        *used_here += count;
        Ok(CounterBudget { card, count, used: *used_here, limit })
    }
}

/// Opens a card.
///
/// # Errors
/// A libfabric call fails; the error names it and the card.
pub(crate) fn open(info: &Info) -> Result<Arc<Domain>, Error> {
    let name = info.domain_name();
    let failed = |what: &str| Error::fabric(format!("{what} {name}"));
    let fabric = Fabric::open(info).map_err(failed("opening the fabric of card"))?;
    Domain::open(&fabric, info).map_err(failed("opening card"))
}

/// Completion counters in use by this process, by card.
static USED: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// Reserved completion counters; released when dropped.
#[derive(Debug)]
pub struct CounterBudget {
    card: String,
    count: usize,
    /// Counters of the card that this process uses, including these.
    pub used: usize,
    /// The card's number of counters; 0 if unknown.
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
        let mut used = USED.lock();
        if let Some(count) = used.get_mut(&self.card) {
            *count = count.saturating_sub(self.count);
        }
    }
}

/// Peers' endpoints in a rail's address vector. Removed when dropped.
pub struct Peers {
    numbers: Vec<FiAddr>,
    av: Arc<AddressVector>,
}

impl Peers {
    /// Starts without peers.
    pub fn new(av: &Arc<AddressVector>) -> Self {
        Self { numbers: Vec::new(), av: av.clone() }
    }

    /// Inserts an address.
    ///
    /// # Errors
    /// The libfabric call fails.
    pub fn insert(&mut self, address: &[u8]) -> Result<(), ferrogin_libfabric::Error> {
        self.numbers.push(self.av.insert(address)?);
        Ok(())
    }

    /// Returns their numbers in the address vector.
    pub fn numbers(&self) -> &[FiAddr] {
        &self.numbers
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        for number in &self.numbers {
            if let Err(error) = self.av.remove(*number) {
                crate::trace!("removing a peer's address: {error}");
            }
        }
    }
}

/// Options of an endpoint's queues.
#[derive(Debug, Clone, Copy)]
pub struct QueueOptions {
    /// Requests in flight; a power of two.
    pub depth: usize,
    /// 128-byte requests, which can carry a write's bytes inline.
    pub wide: bool,
    /// libfabric's traffic class, or 0.
    pub tclass: u32,
    /// Receives of an endpoint for emulated signals: a write with immediate data takes one. 0 for kernels' endpoints.
    pub receives: usize,
}

/// Entries in a receive queue that nothing is posted on.
const RECEIVES: usize = 16;
/// Inline bytes of a 128-byte request.
const WIDE_INLINE: usize = 80;

impl Rail {
    /// Returns the info to open endpoints with `options` on this card.
    ///
    /// # Errors
    /// The card has no such queues.
    pub fn endpoint_info(&self, query: &CardQuery, options: QueueOptions) -> Result<Info, ferrogin_libfabric::Error> {
        let name = self.name();
        let hints = query.hints(Some(&name)).tx_size(options.depth).tclass(options.tclass);
        // Kernels post no receives, and without this hint a provider makes room for thousands.
        let receives = if options.receives == 0 { RECEIVES } else { options.receives };
        let most = self.info.rx_size();
        let mut hints = hints.rx_size(if most == 0 { receives } else { receives.min(most) });
        if options.receives != 0 {
            let mode = bindings::FI_CONTEXT | bindings::FI_CONTEXT2 | bindings::FI_RX_CQ_DATA;
            let caps = self.info.caps() & bindings::FI_HMEM | bindings::FI_RMA | bindings::FI_MSG;
            hints = hints.mode(mode).caps(caps);
        }
        if options.wide {
            hints = hints.inject_size(WIDE_INLINE);
        }
        let mut found = query.lib.getinfo(&hints)?.into_iter();
        let matching = found.find(|info| info.domain_name() == name && info.fabric_name() == self.info.fabric_name());
        let mut info = matching.ok_or_else(|| ferrogin_libfabric::Error::Argument {
            what: format!("libfabric no longer offers card {name}"),
        })?;
        // libfabric 2.6 ignores this class in hints, and reads it from the info that an endpoint is opened with: see
        // fi_efa(7).
        if options.tclass == bindings::FI_TC_LOW_LATENCY {
            info.set_tclass(options.tclass);
        }
        Ok(info)
    }
}
