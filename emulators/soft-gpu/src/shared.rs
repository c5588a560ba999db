//! The state of an event of several processes: a page of memory that all of them map.
//!
//! A record takes the next number. When its stream gets to the record, the number goes to its place in the page. A query and a wait are for
//! the last record at their call. There are [`PLACES`] places: a record counts as done, too, when the one that is so many records later is.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::code::{Code, Outcome};
use crate::guard::log;
use crate::memfd;

/// The name of the memory files.
pub(crate) const NAME: &str = "softgpu-event";
const PLACES: usize = 128;
/// Between two looks at a record of another process.
const PAUSE: Duration = Duration::from_micros(20);

#[repr(C)]
struct Words {
    /// The last number that a record took, and the last record that queries and waits see.
    taken: AtomicU64,
    last: AtomicU64,
    places: [Place; PLACES],
}

#[repr(C)]
struct Place {
    /// The process that made the record.
    process: AtomicU64,
    /// The number of the last record here that is done.
    done: AtomicU64,
}

const _: () = assert!(size_of::<Words>() <= 4096);

/// The page of one event, as this process maps it.
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

    /// The page in a file of [`new`](Self::new), which cannot shrink.
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
        // SAFETY: the page is mapped as long as `self`, aligned and long enough. Its words are atomic, and any bytes are valid for them.
        unsafe { &*at }
    }

    fn place(&self, number: u64) -> &Place {
        &self.words().places[number as usize % PLACES]
    }

    /// Takes the number of a record. The caller gives its [`end`](Self::end) to a stream, and then calls [`publish`](Self::publish): a wait
    /// on the same stream comes after what it waits for.
    pub(crate) fn take(&self) -> u64 {
        let number = self.words().taken.fetch_add(1, Ordering::Relaxed) + 1;
        self.place(number).process.store(std::process::id().into(), Ordering::Relaxed);
        number
    }

    /// Lets queries and waits see the record.
    pub(crate) fn publish(&self, number: u64) {
        self.words().last.fetch_max(number, Ordering::Release);
    }

    /// The stream has got to the record.
    pub(crate) fn end(&self, number: u64) {
        self.place(number).done.fetch_max(number, Ordering::Release);
    }

    /// The last record, unless there is none or it is done.
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
    /// `CUDA_ERROR_UNKNOWN`: its process has ended before.
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
    /// `CUDA_ERROR_UNKNOWN`: the record is not done, and its process has ended.
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

/// False also for a process that has ended and whose parent has not asked for its status: the letter behind the name says so.
fn is_running(process: u64) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{process}/stat"));
    state.is_ok_and(|state| !state.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])))
}

impl Drop for Shared {
    fn drop(&mut self) {
        memfd::unmap(self.address, self.len);
    }
}
