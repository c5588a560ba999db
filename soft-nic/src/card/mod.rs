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
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use self::core::Core;
#[cfg(not(any(test, feature = "fuzz")))]
use self::core::Wires;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use self::core::Wires;
use self::engine::{Engine, Shared};
pub use self::qp::RNR_FOR_EVER;
pub use self::recv_queue::DATAGRAM_HEADER;
pub use self::request::{MAX_RDMA_SIZE, MAX_SEND_SIZE};
pub use self::setup::SetupError;
pub use self::slab::Slab;
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::wire::datagram;
use crate::wire::shm::{Listener, ShmError, is_exhaustion};
use crate::{host, log, random};

/// A software card of this process.
pub struct Card {
    shared: Arc<Shared>,
    engine: Mutex<Option<Engine>>,
    domains: std::sync::atomic::AtomicU32,
}

/// Cards in use, by number. An unused card is dropped; a later card with its number has another GID.
static CARDS: Mutex<Option<HashMap<u32, Weak<Card>>>> = Mutex::new(None);

impl Card {
    /// The card with this number, created on first use.
    ///
    /// # Errors
    /// The system has no socket or memory left.
    pub fn open(number: u32, config: &Config) -> std::io::Result<Arc<Self>> {
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let cards = cards.get_or_insert_default();
        if let Some(card) = cards.get(&number).and_then(Weak::upgrade) {
            return Ok(card);
        }
        let (gid, wires) = announce(config)?;
        let core = Core::new(number, gid, config.clone(), wires)?;
        let card = Arc::new(Self {
            shared: Shared::new(core),
            engine: Mutex::new(None),
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

    /// The same for threads that wait for memory which the card writes, and call nothing of libfabric. Returns false and does nothing
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

/// Opens the wires of the settings, and draws the card's GID.
fn announce(config: &Config) -> std::io::Result<(Gid, Wires)> {
    let ip = config.ifaddr.unwrap_or_else(host::default_address);
    let mut gid = Gid { ip, port: 0, secret: random::secret()? };
    let mut datagrams = None;
    let provider = match &config.wire {
        WireChoice::Auto => Some("tcp"),
        WireChoice::Shm => None,
        WireChoice::Provider(name) => Some(name.as_str()),
    };
    if let Some(provider) = provider {
        match datagram::Wire::open(provider, ip) {
            Ok((wire, port)) => (datagrams, gid.port) = (Some(wire), port),
            Err(error) => {
                log::line(format_args!("softefa: no wire to other hosts (libfabric's provider {provider}): {error}"));
                let exhausted = error.os_code().filter(|code| is_exhaustion(*code));
                // Shared memory still works.
                if config.wire != WireChoice::Auto || exhausted.is_some() {
                    return Err(std::io::Error::from_raw_os_error(exhausted.unwrap_or(libc::ENODEV)));
                }
            }
        }
    }
    let mut listener = None;
    if !matches!(config.wire, WireChoice::Provider(_)) {
        match Listener::bind(&gid) {
            Ok(bound) => listener = Some(bound),
            Err(error) => {
                log::line(format_args!("softefa: no shared-memory wire: {error}"));
                if let ShmError::System(_, source) = error
                    && source.raw_os_error().is_some_and(is_exhaustion)
                {
                    return Err(source);
                }
            }
        }
    }
    Ok((gid, Wires { listener, datagrams }))
}

/// The GID of a card before it is open: `fi_getinfo` gives addresses without opening a card. It has the number of the host in
/// place of a secret.
pub fn advertised_gid(config: &Config) -> Gid {
    let ip = config.ifaddr.unwrap_or(Ipv4Addr::LOCALHOST);
    Gid { ip, port: 0, secret: u64::from(host::host_id()).to_be_bytes() }
}
