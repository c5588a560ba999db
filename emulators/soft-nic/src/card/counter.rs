//! Completion counters: events that the card counts, in its own memory or the caller's.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::fault::COUNTER_MASK;
use crate::location::Location;
use crate::log;
use crate::memory::{self, Mapping};

/// A counter's value. The card keeps a shadow copy: it stores to the memory and never reads it back.
#[derive(Debug)]
pub struct Word {
    at: *mut u64,
    shadow: u64,
    /// GPU memory that the CPU cannot access: the count goes there too.
    on_gpu: Option<Location>,
    /// The inode and the offset in the file of [`Word::mapped`]; 0 and the address in other memory.
    place: (u64, u64),
    _own: Option<Arc<AtomicU64>>,
    _map: Option<Arc<Mapping>>,
}

// SAFETY: `at` is a word that this value keeps, or memory that the caller of `Word::at` keeps mapped; the card uses it
// only under its lock.
unsafe impl Send for Word {}

impl Word {
    /// Creates a word in the card's memory.
    pub fn own(start: u64) -> Self {
        let own = Arc::new(AtomicU64::default());
        let at = own.as_ptr();
        Self { at, shadow: start, on_gpu: None, place: (0, at as u64), _own: Some(own), _map: None }.stored()
    }

    /// Creates a word at `offset` in a file or a device's buffer.
    ///
    /// # Errors
    /// Those of [`Mapping::word`] and [`Location::by_driver`].
    pub fn mapped(fd: BorrowedFd<'_>, offset: u64, start: u64) -> io::Result<Self> {
        let place = memory::place_in_file(fd, offset)?;
        match Mapping::word(fd, offset) {
            Ok((map, at)) => Ok(Self { at, shadow: start, on_gpu: None, place, _own: None, _map: Some(map) }.stored()),
            Err(error) => {
                let on_gpu = Some(Location::by_driver(error, fd, offset, size_of::<u64>(), None)?);
                Ok(Self { on_gpu, place, ..Self::own(start) }.stored())
            }
        }
    }

    /// Creates a word in the caller's memory.
    ///
    /// # Safety
    /// `at` is 8-byte aligned and stays mapped and writable until the counter is closed.
    pub unsafe fn at(at: *mut u64, start: u64) -> Self {
        Self { at, shadow: start, on_gpu: None, place: (0, at as u64), _own: None, _map: None }.stored()
    }

    fn stored(mut self) -> Self {
        self.set(self.shadow);
        self
    }

    /// Sets the value, modulo 2^31.
    pub fn set(&mut self, value: u64) {
        self.shadow = value & COUNTER_MASK;
        if let Some(place) = self.on_gpu {
            let bytes = self.shadow.to_ne_bytes();
            // SAFETY: the array has that many bytes; the caller of `Word::mapped` keeps the memory until the counter is
            // closed.
            if let Err(error) = unsafe { place.write(bytes.as_ptr(), bytes.len()) } {
                log::line(format_args!("softefa: a counter in memory of a GPU cannot be written: {error}"));
            }
        }
        // SAFETY: `at` is a mapped, aligned word, kept by this value or by the caller of `Word::at`. Release: a reader
        // of the count sees the payload written before it.
        unsafe { memory::store_release(self.at, self.shadow) };
    }

    /// Adds to the value, modulo 2^31.
    pub fn add(&mut self, value: u64) {
        self.set(self.shadow.wrapping_add(value));
    }

    /// Returns the inode and the offset of the file that the word is in; 0 and the address if it is in other memory.
    pub(crate) fn place(&self) -> (u64, u64) {
        self.place
    }

    /// Returns the word's address, for readers without the card's lock. A word that the CPU cannot access has a copy in
    /// the card's memory.
    pub fn address(&self) -> *mut u64 {
        self.at
    }
}

/// A counter: completions, and completions in error.
#[derive(Debug)]
pub struct Counter {
    /// Requests that completed without error.
    pub completions: Word,
    /// Requests that failed.
    pub errors: Word,
    /// Number of queue pairs that the counter is attached to. It cannot be closed before they are.
    pub attached: u32,
}

/// An event that a queue pair's counters count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Event {
    /// A send from this queue pair completed.
    Send,
    /// A message arrived for this queue pair.
    Recv,
    /// An RDMA write from this queue pair completed.
    Write,
    /// An RDMA read from this queue pair completed.
    Read,
    /// A peer wrote to this side's memory.
    RemoteWrite,
    /// A peer read this side's memory.
    RemoteRead,
}

/// Number of [`Event`]s.
pub const EVENTS: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_wraps_at_31_bits() {
        let mut word = Word::own(COUNTER_MASK - 1);
        // SAFETY: `word` keeps its memory until the end of this test.
        let read = |word: &Word| unsafe { memory::load_acquire(word.address()) };
        assert_eq!(read(&word), 0x7fff_fffe);
        word.add(1);
        assert_eq!(read(&word), 0x7fff_ffff);
        word.add(1);
        assert_eq!(read(&word), 0);
        word.set(5);
        assert_eq!(read(&word), 5);
    }

    #[test]
    fn caller_memory_is_written_and_never_read() {
        let mut value = 77u64;
        // SAFETY: `value` lives until the end of this test.
        let mut word = unsafe { Word::at(&raw mut value, 3) };
        assert_eq!(value, 3);
        value = 1000;
        word.add(1);
        assert_eq!(value, 4);
    }
}
