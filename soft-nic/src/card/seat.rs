//! The core that an engine keeps to on a small machine.
//!
//! Two cards of one host that talk to each other are two engines and two threads that wait for them. When both engines come
//! to lie on one core, every exchange takes two switches more, and the scheduler leaves it so, for both cores are busy.
//! So each engine takes a seat: a core of those it may use, with as few other engines as can be had.

use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use nix::unistd::Pid;

/// With as many cores, threads that do not sleep find one each.
const CROWD: usize = 8;
/// Engines that one core can have; more go where they like.
const ROWS: u32 = 64;
/// The calling thread.
const SELF: Pid = Pid::from_raw(0);

/// A small machine, where threads that do not sleep share cores.
pub fn is_crowded() -> bool {
    std::thread::available_parallelism().map_or(1, NonZero::get) < CROWD
}

/// A seat, and whether the engine sits there.
#[derive(Debug)]
pub(super) struct Seat {
    core: CpuSet,
    usual: CpuSet,
    seated: bool,
    /// A name that one socket of the network namespace can have; the kernel gives it back when the process ends.
    _claim: OwnedFd,
}

impl Seat {
    /// Finds a seat for the calling thread and sits down; `None` where there is nothing to choose.
    pub(super) fn take() -> Option<Self> {
        if !is_crowded() {
            return None;
        }
        let usual = sched_getaffinity(SELF).ok()?;
        let cores: Vec<usize> = (0..CpuSet::count()).filter(|core| usual.is_set(*core) == Ok(true)).collect();
        if cores.len() < 2 {
            return None;
        }
        for row in 0..ROWS {
            for &number in &cores {
                match claim(&format!("softefa/seat/{number}/{row}")) {
                    Ok(claim) => {
                        let mut core = CpuSet::new();
                        core.set(number).ok()?;
                        let mut seat = Self { core, usual, seated: false, _claim: claim };
                        seat.sit(true);
                        return Some(seat);
                    }
                    Err(Errno::EADDRINUSE) => {}
                    Err(_) => return None,
                }
            }
        }
        None
    }

    /// Keeps to the seat, or gets up: beside a thread that computes all the time any core is better.
    pub(super) fn sit(&mut self, down: bool) {
        if down != self.seated {
            self.seated = down;
            // If it cannot be had the scheduler decides, as ever.
            let _ = sched_setaffinity(SELF, if down { &self.core } else { &self.usual });
        }
    }
}

fn claim(name: &str) -> Result<OwnedFd, Errno> {
    let socket = socket::socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    socket::bind(socket.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores() -> Vec<usize> {
        let set = sched_getaffinity(SELF).unwrap();
        (0..CpuSet::count()).filter(|core| set.is_set(*core) == Ok(true)).collect()
    }

    #[test]
    fn a_seat_is_taken_left_and_given_back() {
        let before = cores();
        let Some(mut seat) = Seat::take() else {
            println!("SKIP a_seat_is_taken_left_and_given_back: one core, or many");
            return;
        };
        let mine = cores();
        assert_eq!(mine.len(), 1);
        seat.sit(false);
        assert_eq!(cores(), before);
        seat.sit(true);
        assert_eq!(cores(), mine);
        seat.sit(false);
    }

    #[test]
    fn a_claim_is_one_sockets() {
        let name = format!("softefa/seat/test/{}", std::process::id());
        let first = claim(&name).unwrap();
        assert_eq!(claim(&name).err(), Some(Errno::EADDRINUSE));
        drop(first);
        assert!(claim(&name).is_ok());
    }
}
