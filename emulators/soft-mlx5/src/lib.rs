//! A software ConnectX card, which executes the bytes of mlx5 work requests as the hardware does, including its silent
//! failures.
//!
//! A [`Card`] is an [`mlx5::device::Device`]. Its queues are plain memory: rings, doorbell records and doorbell
//! registers. The driver writes requests there and rings the doorbell; the engine, a single thread, reads them and
//! writes completions. Other cards, in this process or another, connect to a queue pair with the value of
//! `Device::endpoint`.
//!
//! The rules that the card checks, and the failures that it doesn't report, are those of the hardware:
//!
//! * A doorbell only counts once both the record and the register have been written. A request must carry the index of
//!   its slot and the number of its queue pair.
//! * A bind or invalidation takes effect a little later ([`Settings::max_bind_delay`]). A request with a fence waits
//!   for it; a request without one may overtake it.
//! * A UMR changes only the fields that its mask names. Its flags decide what is checked; a failed check is a bind
//!   error.
//! * A bind whose translation size is too small completes without an error, and so does every operation through that
//!   window, but no bytes move.
//! * If a tag is stale, a window belongs to another queue pair, a range is out of bounds or a right is missing, the
//!   peer gets "remote access error". Both queue pairs go to the error state, and their other requests are flushed.
//! * A message waits for a receive for the sender's RNR timeout ([`Settings::rnr_timeout`]).
//! * A compressing queue writes blocks of 1 to 7 completions at random where a title allows it, even across the end of
//!   the queue, and writes only a block's first slot.
//!
//! Each violation is logged to standard error with the queue pair, the request and the rule.

mod connection;
mod core;
mod cq;
pub mod cq_writer;
mod device;
mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    //! A completion queue's memory, for the fuzz harness.
    pub use crate::cq::{ARM, ARM_REGISTER, CONSUMER, RING};
    pub use crate::shared::Shared;
}
mod mkey;
mod qp;
mod receive;
mod requester;
mod responder;
mod settings;
mod shared;

pub use connection::Address;
pub use settings::Settings;

use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use mlx5::device::{Caps, Device, DeviceError, Handle};
use mlx5::verbs::Hardware;
use nix::poll::{PollFd, PollFlags, ppoll};

use self::connection::Connection;
use self::core::Core;
use soft_nic::random::Random;

/// The most bytes in a datagram.
pub const DATAGRAM_MTU: usize = 4096;

/// The card's state, shared by the engine and set-up.
struct Inner {
    core: Mutex<Core>,
    stop: AtomicBool,
}

impl Inner {
    /// Locks the state. If the engine panics, it is still consistent enough to be freed.
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Returns the connection to the card at `to`, opening one if needed. The engine keeps running meanwhile.
    fn connection(&self, to: Address) -> Result<u32, DeviceError> {
        let known = {
            let core = self.lock();
            to == core.address || core.connection_of.contains_key(&to)
        };
        let made = if known { None } else { Some(Connection::connect(&to)?) };
        self.lock().adopt(to, made)
    }
}

/// Keeps the engine running. The card and all objects made from it hold one.
struct Alive {
    inner: Arc<Inner>,
    engine: Option<JoinHandle<()>>,
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Release);
        if let Some(engine) = self.engine.take() {
            // If the engine panicked, that is already on standard error.
            let _ = engine.join();
        }
    }
}

/// Opens the ConnectX card that FERROGIN_MLX5 names, as `mlx5_0` or `mlx5_0:PORT:GID-INDEX`; without it, a software
/// card with `settings`.
///
/// # Errors
/// There is no such card, or the software card can't be opened.
pub fn open(settings: Settings) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(match std::env::var("FERROGIN_MLX5").ok().filter(|name| !name.is_empty()) {
        Some(name) => Arc::new(Hardware::named(&name)?),
        None => Arc::new(Card::open(settings)?),
    })
}

/// A card. It works until the card and all objects made from it are dropped.
pub struct Card {
    alive: Arc<Alive>,
    address: Address,
    caps: Caps,
}

/// Idle polls before the engine sleeps.
const SPIN_POLLS: u32 = 300;
/// The length of the first sleeps, and of the later ones.
const SHORT_SLEEP: Duration = Duration::from_micros(50);
const LONG_SLEEP: Duration = Duration::from_millis(1);
/// Short sleeps before long ones.
const SHORT_SLEEPS: u32 = 2000;

fn run(inner: &Inner) {
    let mut idle = 0_u32;
    while !inner.stop.load(Ordering::Acquire) {
        if inner.lock().poll() {
            idle = 0;
            continue;
        }
        idle = idle.saturating_add(1);
        if idle < SPIN_POLLS {
            std::thread::yield_now();
        } else {
            sleep(inner, if idle < SPIN_POLLS + SHORT_SLEEPS { SHORT_SLEEP } else { LONG_SLEEP });
        }
    }
}

/// Sleeps until a frame arrives or time runs out. Doorbells are plain memory and don't wake the engine.
fn sleep(inner: &Inner, at_most: Duration) {
    let mut core = inner.lock();
    if core.accept() {
        return;
    }
    let sockets: Vec<OwnedFd> = core
        .connections
        .values()
        .filter_map(|connection| connection.socket()?.as_fd().try_clone_to_owned().ok())
        .collect();
    drop(core);
    let mut polled: Vec<PollFd<'_>> = sockets.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
    // Ignore errors: the next poll follows in any case.
    let _ = ppoll(&mut polled, Some(at_most.into()), None);
}

fn system(call: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |error| DeviceError::Call { call, errno: error.raw_os_error().unwrap_or(0) }
}

impl Card {
    /// Opens a card that other cards can reach.
    ///
    /// # Errors
    /// [`DeviceError::Call`]: the system has no sockets or threads left.
    pub fn open(settings: Settings) -> Result<Card, DeviceError> {
        let listener = TcpListener::bind(SocketAddr::new(IpAddr::V4(settings.listen), 0))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(system("bind"))?;
        let port = listener.local_addr().map_err(system("getsockname"))?.port();
        let address = Address { ip: settings.listen.octets(), port, nonce: Random::from_system().next_u64() };
        let core = Mutex::new(Core::new(address, listener, settings));
        let inner = Arc::new(Inner { core, stop: AtomicBool::new(false) });
        let engine = std::thread::Builder::new()
            .name("softefa-mlx5".into())
            .spawn({
                let inner = inner.clone();
                move || run(&inner)
            })
            .map_err(system("pthread_create"))?;
        let alive = Arc::new(Alive { inner, engine: Some(engine) });
        Ok(Card { alive, address, caps: device::caps() })
    }

    /// Returns the address at which other cards reach this one.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Makes the card at `to` reachable for datagrams. The bytes of its address take the place of the GID in the
    /// address vector.
    ///
    /// # Errors
    /// [`DeviceError::Peer`]: no card answers at the address.
    pub fn create_ah(&self, to: Address) -> Result<(), DeviceError> {
        self.alive.inner.connection(to).map(drop)
    }

    /// Returns a descriptor that becomes readable when a completion queue that the consumer armed has an event.
    ///
    /// # Errors
    /// [`DeviceError::Foreign`]: the queue belongs to another card. [`DeviceError::Call`]: the process is out of descriptors.
    pub fn events(&self, cq: &Handle) -> Result<OwnedFd, DeviceError> {
        let cqn = self.cqn(cq)?;
        let core = self.alive.inner.lock();
        let queue = core.cqs.get(&cqn).ok_or(DeviceError::Foreign { what: "the completion queue" })?;
        queue.event().try_clone_to_owned().map_err(system("dup"))
    }
}
