//! The card: its tables, its rings and its engine.

mod checked;
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
pub use self::qp::RNR_RETRY_UNLIMITED;
pub use self::recv_queue::DATAGRAM_HEADER;
pub use self::request::{MAX_RDMA_SIZE, MAX_SEND_SIZE};
pub use self::setup::SetupError;
pub use self::slab::Slab;
use self::statistics::CounterFiles;
pub use self::statistics::{LIFESPAN, Statistics};
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::process::{self, PerProcess};
use crate::wire::{WireError, is_exhaustion, shm, tcp};
use crate::{host, log, random};

/// A software card in this process.
pub struct Card {
    shared: Arc<Shared>,
    engine: Mutex<Option<Engine>>,
    domains: std::sync::atomic::AtomicU32,
}

/// How long [`Card::close_qp`] may keep sending: it doesn't wait for a peer that takes no packets, such as a stopped
/// process.
const CLOSE_LIMIT: Duration = Duration::from_millis(20);

/// This process's cards in use, by number. An unused card is dropped; a later card with its number gets another GID. A
/// forked child has no cards until it opens its own.
static CARDS: PerProcess<Mutex<Cards>> = PerProcess::new();
type Cards = Vec<(u32, Weak<Card>)>;

impl Drop for Card {
    fn drop(&mut self) {
        let mut cards = CARDS.get().lock().unwrap_or_else(PoisonError::into_inner);
        // Keeps a later card with the same number.
        cards.retain(|(_, card)| card.strong_count() > 0);
        // Leaves nothing allocated when the program ends.
        cards.shrink_to_fit();
    }
}

impl Card {
    /// Returns this process's card with this number, creating it on first use.
    ///
    /// # Errors
    /// The system is out of sockets or memory.
    pub fn open(number: u32, config: &Config) -> std::io::Result<Arc<Self>> {
        process::at_exit(answer_arrived);
        let mut cards = CARDS.get().lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Takes the place of a card that the parent process opened before it forked this one. Within this process, the old
    /// card's GID, which the program may have read by then, names this card too.
    pub fn replace_inherited(&self, inherited: &Self, gid: Gid) {
        // Protection domains of the old card may be in use with this one.
        let next = inherited.domains.load(std::sync::atomic::Ordering::Relaxed);
        self.domains.fetch_max(next, std::sync::atomic::Ordering::Relaxed);
        let mut core = self.lock();
        core.inherited_gid = Some(gid);
        core.log(format_args!(
            "a forked process has a card of its own, with a new GID; other cards can't reach it by the GID that was read before fork()"
        ));
    }

    /// Locks the card's state.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.shared.lock()
    }

    /// Polls the card once in this thread, unless the engine is polling. For calls that applications make while they
    /// wait: on a small machine the engine needs the caller's core.
    pub fn poll(&self) {
        self.shared.poll();
    }

    /// Removes a program's queue pair. What it has been sent is handled first, and its answers and the requests that it
    /// has rung go to the wire, for up to 20 ms, because hardware does all that within microseconds. With the fault
    /// `close_drops` the requests are dropped.
    pub fn close_qp(&self, qpn: u16) {
        let deadline = Instant::now() + CLOSE_LIMIT;
        let mut core = self.lock();
        let drops = core.config.faults.close_drops;
        core.take_arrived();
        while core.serves(qpn) || (!drops && core.has_unsent(qpn)) {
            // At least once, even if another thread held the lock until the deadline.
            if drops {
                core.pump_all();
            } else {
                core.poll(Instant::now(), false);
            }
            if Instant::now() >= deadline {
                break;
            }
            drop(core);
            std::thread::yield_now();
            core = self.lock();
        }
        core.close_qp(qpn);
    }

    /// Like [`Card::poll`], for threads that wait for memory that the card writes and make no libfabric calls. Does
    /// nothing and returns false if the engine has a core of its own.
    pub fn progress(&self) -> bool {
        let shared = pace::shares_a_core();
        if shared {
            self.poll();
        }
        shared
    }

    /// Returns a number for a new protection domain.
    pub fn new_domain(&self) -> u32 {
        self.domains.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    /// Starts the engine unless it is already running. It adds the card's statistics to the files in `hw_counters`, if
    /// they exist.
    pub fn start(&self, hw_counters: Option<&Path>) -> std::io::Result<()> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if engine.is_none() {
            let number = self.lock().card;
            *engine = Some(Engine::start(&self.shared, number, hw_counters.and_then(CounterFiles::open))?);
        }
        Ok(())
    }
}

/// Sends the answers that this process's cards owe, when the process ends without having closed them.
extern "C" fn answer_arrived() {
    let cards: Vec<_> = CARDS.get().lock().map_or_else(|_| Vec::new(), |cards| cards.clone());
    for card in cards.iter().filter_map(|(_, card)| card.upgrade()) {
        card.lock().answer_arrived();
    }
}

/// Draws the card's GID, and takes the name and port under which other cards find it.
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

/// Listens for cards on this host.
fn listen(gid: &Gid) -> std::io::Result<Option<shm::Listener>> {
    shm::Listener::bind(gid).map(Some).or_else(|error| {
        log::line(format_args!("softefa: no shared-memory wire: {error}"));
        match error {
            WireError::System(_, source) if source.raw_os_error().is_some_and(is_exhaustion) => Err(source),
            _ => Ok(None),
        }
    })
}

/// Returns a card's GID before it is open, for `fi_getinfo`, which reports addresses without opening cards. It holds
/// the host's number in place of a secret.
pub fn advertised_gid(config: &Config) -> Gid {
    let ip = config.ifaddr.unwrap_or(Ipv4Addr::LOCALHOST);
    let address = (config.wire != WireChoice::Shm).then_some(SocketAddrV4::new(ip, 0));
    Gid { address, secret: u64::from(host::host_id()).to_be_bytes() }
}
