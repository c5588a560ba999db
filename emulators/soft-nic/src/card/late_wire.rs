//! A wire to other hosts that opens later than its card.
//!
//! The wire is an endpoint of libfabric. A caller that opens a card may be libfabric in its own start, and holds a lock then that opening an
//! endpoint takes. Such a card reserves its port, which is a part of its GID, and opens the wire in a thread of its own when
//! a queue pair is about to receive.
#![allow(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrIn, sockopt};

use super::engine::Shared;
use crate::log;
use crate::wire::datagram::Wire;
use crate::wire::shm::is_exhaustion;

/// Longest wait for the wire. A caller that holds libfabric's lock would wait for ever.
const LIMIT: Duration = Duration::from_secs(10);
/// Longest wait of a process that ends.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// What opens a wire.
#[derive(Debug)]
struct Reservation {
    provider: String,
    address: SocketAddrV4,
    /// The settings ask for this wire.
    asked: bool,
    /// Holds the port, and does not listen: libfabric may bind the same port, and no other program gets it.
    _port: OwnedFd,
}

#[derive(Debug, Default)]
enum State {
    Reserved(Reservation),
    Opening,
    /// Open, or there is none; or the number of the error.
    #[default]
    Done,
    Failed(i32),
}

#[derive(Debug, Default)]
struct Progress {
    state: Mutex<State>,
    done: Condvar,
}

/// The wire of a card that may be open later.
#[derive(Debug, Default)]
pub(crate) struct LateWire(Arc<Progress>);

impl Progress {
    /// Waits until nothing is being opened; false after the limit.
    fn wait(&self, limit: Duration) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let opening = |state: &mut State| matches!(state, State::Opening);
        let (_state, waited) =
            self.done.wait_timeout_while(state, limit, opening).unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.done.notify_all();
    }
}

impl LateWire {
    /// Reserves a port for a wire of `provider`.
    ///
    /// # Errors
    /// The address is not one of this host, or the system has no port left.
    pub(crate) fn reserve(provider: &str, ip: Ipv4Addr, asked: bool) -> std::io::Result<(Self, u16)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let port = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
        socket::setsockopt(&port, sockopt::ReuseAddr, &true)?;
        socket::bind(port.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(ip, 0))).inspect_err(|error| {
            log::line(format_args!(
                "softefa: no port on {ip} for the wire to other hosts: {error}; SOFTEFA_IFADDR must be an address of this host"
            ));
        })?;
        let number = socket::getsockname::<SockaddrIn>(port.as_raw_fd())?.port();
        let address = SocketAddrV4::new(ip, number);
        let reservation = Reservation { provider: provider.to_owned(), address, asked, _port: port };
        let progress = Progress { state: Mutex::new(State::Reserved(reservation)), done: Condvar::new() };
        Ok((Self(Arc::new(progress)), number))
    }

    /// Opens the wire unless it is open, and waits for that. The process calls `close_wires` when it ends.
    pub(crate) fn open(&self, card: &Arc<Shared>, close_wires: extern "C" fn()) -> std::io::Result<()> {
        {
            let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
            match std::mem::replace(&mut *state, State::Opening) {
                State::Reserved(reservation) => {
                    // A process that ends within libfabric's handlers must not find the wire in use.
                    static AT_EXIT: Once = Once::new();
                    AT_EXIT.call_once(|| {
                        PROCESS.store(std::process::id(), std::sync::atomic::Ordering::Relaxed);
                        // SAFETY: the handler takes no argument, and the library with its code is never unloaded.
                        unsafe { libc::atexit(close_wires) };
                    });
                    let (progress, card) = (self.0.clone(), card.clone());
                    let body = move || progress.set(install(&card, &reservation));
                    if let Err(error) = std::thread::Builder::new().name("softefa-wire".into()).spawn(body) {
                        *state = State::Failed(error.raw_os_error().unwrap_or(libc::EAGAIN));
                    }
                }
                before => *state = before,
            }
        }
        if !self.0.wait(LIMIT) {
            log::line(format_args!(
                "softefa: the wire to other hosts is not open after {} s: libfabric is busy; cards of other hosts cannot connect yet",
                LIMIT.as_secs()
            ));
        }
        match &*self.0.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Failed(errno) => Err(std::io::Error::from_raw_os_error(*errno)),
            _ => Ok(()),
        }
    }

    /// Waits until the wire is not being opened; false if that takes longer than the end of a process may.
    pub(crate) fn wait_at_exit(&self) -> bool {
        self.0.wait(EXIT_LIMIT)
    }
}

/// Opens the wire of a reservation, and gives it to the card.
fn install(card: &Shared, reservation: &Reservation) -> State {
    let opened = open_wire(&reservation.provider, reservation.address, reservation.asked);
    match opened {
        Ok(wire) => {
            card.lock().datagrams = wire.map(|(wire, _)| wire);
            State::Done
        }
        Err(error) => State::Failed(error.raw_os_error().unwrap_or(libc::ENODEV)),
    }
}

/// The process that opened a wire.
static PROCESS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Whether this process opened the wires. A child of it has the handler of its end, and none of its threads.
pub(crate) fn opened_here() -> bool {
    PROCESS.load(std::sync::atomic::Ordering::Relaxed) == std::process::id()
}

/// Opens the wire to other hosts. A wire that the settings do not ask for may be missing, because shared memory still works.
pub(crate) fn open_wire(provider: &str, address: SocketAddrV4, asked: bool) -> std::io::Result<Option<(Wire, u16)>> {
    Wire::open(provider, address).map(Some).or_else(|error| {
        log::line(format_args!("softefa: no wire to other hosts (libfabric's provider {provider}): {error}"));
        let exhausted = error.os_code().filter(|code| is_exhaustion(*code));
        if asked || exhausted.is_some() {
            return Err(std::io::Error::from_raw_os_error(exhausted.unwrap_or(libc::ENODEV)));
        }
        Ok(None)
    })
}
