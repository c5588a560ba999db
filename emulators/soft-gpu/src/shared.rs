//! The state of an interprocess event: a page of memory that all its processes map.
//!
//! A record takes the next number. When its stream reaches the record, the number is stored in its place in the page.
//! Queries and waits are for the last record at the time. There are [`PLACES`] places, so a record also counts as done
//! when the one that many later is.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::code::{Code, Outcome};
use crate::guard::log;
use crate::memfd;

/// The memory files' name.
pub(crate) const NAME: &str = "softgpu-event";
const PLACES: usize = 128;
/// How long to sleep before polling a record again.
const PAUSE: Duration = Duration::from_micros(20);

#[repr(C)]
struct Words {
    /// The last number taken by a record, and the last record visible to queries and waits.
    taken: AtomicU64,
    last: AtomicU64,
    places: [Place; PLACES],
}

#[repr(C)]
struct Place {
    /// The process that made the record.
    process: AtomicU64,
    /// The last finished record with this place.
    done: AtomicU64,
}

const _: () = assert!(size_of::<Words>() <= 4096);

/// An event's page, as mapped by this process.
pub(crate) struct Shared {
    pub(crate) file: OwnedFd,
    address: usize,
    len: usize,
}

impl Shared {
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(crate) fn new() -> Outcome<Self> {
        Self::map(memfd::create(NAME, memfd::page_size()).map_err(|_| Code::OUT_OF_MEMORY)?)
    }

    /// Maps the page in a file made by [`new`](Self::new), which can't shrink.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(crate) fn map(file: OwnedFd) -> Outcome<Self> {
        let len = memfd::page_size() as usize;
        let address = memfd::shared(0, len, &file, 0).map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(Self { file, address, len })
    }

    fn words(&self) -> &Words {
        let at = memfd::backing(self.address as u64) as *const Words;
        // SAFETY: the page is mapped as long as `self` lives, aligned and long enough. Its words are atomic, and any
        // bytes are valid.
        unsafe { &*at }
    }

    fn place(&self, number: u64) -> &Place {
        &self.words().places[number as usize % PLACES]
    }

    /// Takes a number for a record. The caller submits its [`end`](Self::end) to a stream before calling
    /// [`publish`](Self::publish), so a wait on the same stream comes after what it waits for.
    pub(crate) fn take(&self) -> u64 {
        let number = self.words().taken.fetch_add(1, Ordering::Relaxed) + 1;
        self.place(number).process.store(std::process::id().into(), Ordering::Relaxed);
        number
    }

    /// Makes the record visible to queries and waits.
    pub(crate) fn publish(&self, number: u64) {
        self.words().last.fetch_max(number, Ordering::Release);
    }

    /// Marks the record as done: its stream has reached it.
    pub(crate) fn end(&self, number: u64) {
        self.place(number).done.fetch_max(number, Ordering::Release);
    }

    /// Returns the last record, unless there is none or it is done.
    pub(crate) fn pending(&self) -> Option<u64> {
        let number = self.words().last.load(Ordering::Acquire);
        (!self.is_done(number)).then_some(number)
    }

    fn is_done(&self, number: u64) -> bool {
        number == 0 || self.place(number).done.load(Ordering::Acquire) >= number
    }

    /// Waits until the record is done.
    ///
    /// # Errors
    /// `CUDA_ERROR_UNKNOWN`: its process exited first.
    pub(crate) fn wait(&self, number: u64) -> Outcome {
        for round in 1u64.. {
            if self.is_done(number) {
                break;
            }
            if round.is_multiple_of(1000) {
                self.check(number)?;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// # Errors
    /// `CUDA_ERROR_UNKNOWN`: the record isn't done, and its process has exited.
    pub(crate) fn check(&self, number: u64) -> Outcome {
        let process = self.place(number).process.load(Ordering::Relaxed);
        if is_running(process) || self.is_done(number) {
            return Ok(());
        }
        log(format_args!(
            "process {process} exited before its stream reached an event that this process waits for: synchronize there first"
        ));
        Err(Code::UNKNOWN)
    }
}

/// Whether a process is running. A zombie isn't, as the state letter after its name shows.
fn is_running(process: u64) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{process}/stat"));
    state.is_ok_and(|state| !state.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])))
}

impl Drop for Shared {
    fn drop(&mut self) {
        memfd::unmap(self.address, self.len);
    }
}
