//! The card: its tables, its rings and its engine.

mod complete;
mod connect;
mod connection;
mod core;
pub mod counter;
mod egress;
mod engine;
mod fetch;
#[cfg(feature = "fuzzing")]
mod fuzzing;
mod ingress;
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
mod statistics;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
mod traced;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use self::core::Core;
use self::core::Listeners;
use self::engine::{Engine, Shared};
pub use self::qp::RNR_FOR_EVER;
pub use self::recv_queue::DATAGRAM_HEADER;
pub use self::request::{MAX_RDMA_SIZE, MAX_SEND_SIZE};
pub use self::setup::SetupError;
pub use self::slab::Slab;
use self::statistics::CounterFiles;
pub use self::statistics::{LIFESPAN, Statistics};
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::wire::{WireError, is_exhaustion, shm, tcp};
use crate::{host, log, random};

/// A software card of this process.
pub struct Card {
    shared: Arc<Shared>,
    engine: Mutex<Option<Engine>>,
    domains: std::sync::atomic::AtomicU32,
}

/// The longest time in which [`Card::close_qp`] sends. A peer that takes no packets, as a stopped process, is not waited for.
const CLOSE_LIMIT: Duration = Duration::from_millis(20);

/// Cards in use, by number. An unused card is dropped; a later card with its number has another GID.
static CARDS: Mutex<Vec<(u32, Weak<Card>)>> = Mutex::new(Vec::new());

impl Drop for Card {
    fn drop(&mut self) {
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        // Not a later card with the same number.
        cards.retain(|(_, card)| card.strong_count() > 0);
        // So that nothing is left at the end of the program.
        cards.shrink_to_fit();
    }
}

impl Card {
    /// The card with this number, created on first use.
    ///
    /// # Errors
    /// The system has no socket or memory left.
    pub fn open(number: u32, config: &Config) -> std::io::Result<Arc<Self>> {
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(card) = cards.iter().filter(|(at, _)| *at == number).find_map(|(_, card)| card.upgrade()) {
            return Ok(card);
        }
        let (gid, listeners) = announce(config)?;
        let core = Core::new(number, gid, config.clone(), listeners)?;
        let card = Arc::new(Self {
            shared: Shared::new(core),
            engine: Mutex::new(None),
            domains: std::sync::atomic::AtomicU32::new(1),
        });
        cards.push((number, Arc::downgrade(&card)));
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

    /// A number for a new protection domain.
    pub fn new_domain(&self) -> u32 {
        self.domains.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    /// Starts the engine unless it runs already. It adds what the card counts to the files in `hw_counters`, if they exist.
    pub fn start(&self, hw_counters: Option<&Path>) -> std::io::Result<()> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if engine.is_none() {
            let number = self.lock().card;
            *engine = Some(Engine::start(&self.shared, number, hw_counters.and_then(CounterFiles::open))?);
        }
        Ok(())
    }
}

/// Takes the name and the port under which other cards find this one, and draws its GID.
fn announce(config: &Config) -> std::io::Result<(Gid, Listeners)> {
    let mut gid = Gid { address: None, secret: random::secret()? };
    let mut listeners = Listeners::default();
    if config.wire != WireChoice::Shm {
        let ip = config.ifaddr.unwrap_or_else(host::default_address);
        let listener = tcp::Listener::bind(ip).inspect_err(|error| {
            log::line(format_args!(
                "softefa: no port on {ip} for cards on other hosts: {error}; SOFTEFA_IFADDR must be an address of \
                 this host, with a free port (sysctl net.ipv4.ip_local_port_range)"
            ));
        })?;
        gid.address = Some(SocketAddrV4::new(ip, listener.port()?));
        listeners.tcp = Some(listener);
    }
    if config.wire != WireChoice::Tcp {
        listeners.shm = listen(&gid)?;
    }
    Ok((gid, listeners))
}

/// Listens for the cards of this host.
fn listen(gid: &Gid) -> std::io::Result<Option<shm::Listener>> {
    shm::Listener::bind(gid).map(Some).or_else(|error| {
        log::line(format_args!("softefa: no shared-memory wire: {error}"));
        match error {
            WireError::System(_, source) if source.raw_os_error().is_some_and(is_exhaustion) => Err(source),
            _ => Ok(None),
        }
    })
}

/// The GID of a card before it is open: `fi_getinfo` gives addresses without opening a card. It has the number of the host in
/// place of a secret.
pub fn advertised_gid(config: &Config) -> Gid {
    let ip = config.ifaddr.unwrap_or(Ipv4Addr::LOCALHOST);
    let address = (config.wire != WireChoice::Shm).then_some(SocketAddrV4::new(ip, 0));
    Gid { address, secret: u64::from(host::host_id()).to_be_bytes() }
}
