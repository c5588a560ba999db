//! The card: its tables, its rings and its engine.

mod complete;
mod connect;
mod connection;
mod core;
pub mod counter;
mod datagram_wire;
mod egress;
mod engine;
mod fetch;
#[cfg(feature = "fuzzing")]
mod fuzzing;
mod ingress;
mod late_wire;
pub mod pace;
mod qp;
pub mod queue;
mod recv_queue;
pub mod region;
mod reorder;
mod request;
mod setup;
pub mod signal;
mod slab;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
mod traced;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use self::core::Core;
use self::core::Wires;
use self::engine::{Engine, Shared};
use self::late_wire::{LateWire, open_wire, opened_here};
pub use self::qp::RNR_FOR_EVER;
pub use self::recv_queue::DATAGRAM_HEADER;
pub use self::request::{MAX_RDMA_SIZE, MAX_SEND_SIZE};
pub use self::setup::SetupError;
pub use self::slab::Slab;
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::wire::shm::{Listener, ShmError, is_exhaustion};
use crate::{host, log, random};

/// A software card of this process.
pub struct Card {
    shared: Arc<Shared>,
    engine: Mutex<Option<Engine>>,
    late_wire: LateWire,
    domains: std::sync::atomic::AtomicU32,
}

/// The longest time in which [`Card::close_qp`] sends. A peer that takes no packets, as a stopped process, is not waited for.
const CLOSE_LIMIT: Duration = Duration::from_millis(20);

/// Cards in use, by number. An unused card is dropped; a later card with its number has another GID.
static CARDS: Mutex<Option<HashMap<u32, Weak<Card>>>> = Mutex::new(None);

impl Card {
    /// The card with this number, created on first use.
    ///
    /// # Errors
    /// The system has no socket or memory left.
    pub fn open(number: u32, config: &Config) -> std::io::Result<Arc<Self>> {
        Self::open_with(number, config, announce)
    }

    /// [`Card::open`], but the wire to other hosts opens at the first [`Card::open_wire`].
    ///
    /// The wire is libfabric's. Where libfabric itself may be the caller, it holds a lock that opening the wire takes.
    ///
    /// # Errors
    /// As [`Card::open`], or the system has no port left.
    pub fn open_with_late_wire(number: u32, config: &Config) -> std::io::Result<Arc<Self>> {
        Self::open_with(number, config, announce_later)
    }

    fn open_with(
        number: u32,
        config: &Config,
        announce: impl FnOnce(&Config) -> std::io::Result<(Gid, Wires, LateWire)>,
    ) -> std::io::Result<Arc<Self>> {
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let cards = cards.get_or_insert_default();
        if let Some(card) = cards.get(&number).and_then(Weak::upgrade) {
            return Ok(card);
        }
        let (gid, wires, late_wire) = announce(config)?;
        let core = Core::new(number, gid, config.clone(), wires)?;
        let card = Arc::new(Self {
            shared: Shared::new(core),
            engine: Mutex::new(None),
            late_wire,
            domains: std::sync::atomic::AtomicU32::new(1),
        });
        cards.insert(number, Arc::downgrade(&card));
        Ok(card)
    }

    /// The card's state.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.shared.lock()
    }

    /// Polls the card once in this thread, unless the engine is polling. For calls that applications make while they wait: on a small
    /// machine the engine needs the core that the caller uses.
    pub fn poll(&self) {
        self.shared.poll();
    }

    /// Removes a queue pair of a program. The requests that it has rung are given to the wire first, as far as that takes
    /// no longer than 20 ms: hardware fetches within a microsecond of the doorbell. With the fault `close_drops` they are
    /// dropped.
    pub fn close_qp(&self, qpn: u16) {
        let deadline = Instant::now() + CLOSE_LIMIT;
        let mut core = self.lock();
        while !core.config.faults.close_drops && core.has_unsent(qpn) {
            // At least once, also where another thread kept the lock until the deadline.
            core.poll(Instant::now(), false);
            if Instant::now() >= deadline {
                break;
            }
            drop(core);
            std::thread::yield_now();
            core = self.lock();
        }
        core.close_qp(qpn);
    }

    /// The same as [`Card::poll`] for threads that wait for memory which the card writes, and call nothing of libfabric. Returns false and does nothing
    /// where the engine has a core of its own.
    pub fn progress(&self) -> bool {
        let shared = pace::shares_a_core();
        if shared {
            self.poll();
        }
        shared
    }

    /// Opens the wire to other hosts, unless it is open. A queue pair must not receive before: peers know the port already.
    ///
    /// # Errors
    /// There is no such wire, and the settings want it.
    pub fn open_wire(&self) -> std::io::Result<()> {
        self.late_wire.open(&self.shared, close_wires)
    }

    /// A number for a new protection domain.
    pub fn new_domain(&self) -> u32 {
        self.domains.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    /// Starts the engine unless it runs already.
    pub fn start(&self) -> std::io::Result<()> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if engine.is_none() {
            let number = self.lock().card;
            *engine = Some(Engine::start(&self.shared, number)?);
        }
        Ok(())
    }
}

/// Closes the wires at the end of the process: libfabric's own handler runs later, and ends what the wires use.
extern "C" fn close_wires() {
    if !opened_here() {
        return;
    }
    let cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
    for card in cards.iter().flat_map(|cards| cards.values()).filter_map(Weak::upgrade) {
        if card.late_wire.wait_at_exit() {
            card.lock().drain();
        }
    }
}

/// The libfabric provider of the wire to other hosts.
fn provider_of(config: &Config) -> Option<&str> {
    match &config.wire {
        WireChoice::Auto => Some("tcp"),
        WireChoice::Shm => None,
        WireChoice::Provider(name) => Some(name),
    }
}

/// Draws the GID of a card without a wire to other hosts.
fn draw(config: &Config) -> std::io::Result<Gid> {
    Ok(Gid { ip: config.ifaddr.unwrap_or_else(host::default_address), port: 0, secret: random::secret()? })
}

/// Opens the wires of the settings, and draws the card's GID.
fn announce(config: &Config) -> std::io::Result<(Gid, Wires, LateWire)> {
    let mut gid = draw(config)?;
    let mut datagrams = None;
    if let Some(provider) = provider_of(config)
        && let Some((wire, port)) = open_wire(provider, SocketAddrV4::new(gid.ip, 0), config.wire != WireChoice::Auto)?
    {
        (datagrams, gid.port) = (Some(wire), port);
    }
    Ok((gid, Wires { listener: listen(config, &gid)?, datagrams }, LateWire::default()))
}

/// The same with a wire to other hosts that opens later.
fn announce_later(config: &Config) -> std::io::Result<(Gid, Wires, LateWire)> {
    let mut gid = draw(config)?;
    let mut late_wire = LateWire::default();
    if let Some(provider) = provider_of(config) {
        (late_wire, gid.port) = LateWire::reserve(provider, gid.ip, config.wire != WireChoice::Auto)?;
    }
    Ok((gid, Wires { listener: listen(config, &gid)?, datagrams: None }, late_wire))
}

/// Listens for the cards of this host.
fn listen(config: &Config, gid: &Gid) -> std::io::Result<Option<Listener>> {
    if matches!(config.wire, WireChoice::Provider(_)) {
        return Ok(None);
    }
    Listener::bind(gid).map(Some).or_else(|error| {
        log::line(format_args!("softefa: no shared-memory wire: {error}"));
        match error {
            ShmError::System(_, source) if source.raw_os_error().is_some_and(is_exhaustion) => Err(source),
            _ => Ok(None),
        }
    })
}

/// The GID of a card before it is open: `fi_getinfo` gives addresses without opening a card. It has the number of the host in
/// place of a secret.
pub fn advertised_gid(config: &Config) -> Gid {
    let ip = config.ifaddr.unwrap_or(Ipv4Addr::LOCALHOST);
    Gid { ip, port: 0, secret: u64::from(host::host_id()).to_be_bytes() }
}
