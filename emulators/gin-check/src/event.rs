//! The record of a process: what its GPU and its card did, in the order in which each of them did it.
//!
//! Every library that takes part appends to a file of its own in the directory that `GIN_CHECK` names, a line of JSON per
//! record: the time, and the event. A process that is killed leaves at most one incomplete record, at the end.

use crate::race::{Example, Pair};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Operation {
    Write,
    Read,
    Send,
}

/// A call into the library, whose promises order more than a post does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// An operation, or anything else.
    Other,
    /// A wait for a signal or counter.
    Wait,
    /// A flush, or a wait for one.
    Flush,
    /// A reset of a signal or counter.
    Reset,
    /// A load of a signal's or counter's value.
    Value,
}

/// A moment of a thread: its stamp names the moment in other threads' clocks, its clock is the number of an
/// [`Event::Clock`].
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct At {
    pub launch: u64,
    pub thread: u64,
    pub stamp: u32,
    pub clock: u32,
    pub place: u32,
}

/// A look at a word that a card or a signal proxy may count in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// Where the word is.
    pub address: u64,
    /// The count that the thread waited for, since the last reset; otherwise what it saw.
    pub value: u64,
    /// What it saw.
    pub raw: u64,
    /// The call that looked.
    pub call: Call,
}

/// Something that happened in a process.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The first record of a file.
    Process {
        /// The rank that the launcher gave the process, or [`NO_RANK`].
        rank: u32,
        pid: u32,
        /// `gpu` or `card`.
        library: String,
    },

    // The software GPU.
    /// Device memory, and the file that backs it: the card names a word of it by file and offset.
    Memory { address: u64, bytes: u64, inode: u64, offset: u64 },
    /// Device memory was freed or unmapped.
    Freed { address: u64, bytes: u64 },
    /// A place in a kernel's source. `place` is unique in the process.
    Place {
        place: u32,
        /// `file:line`, the instruction's own first, then the places it is inlined at.
        lines: Vec<String>,
    },
    /// A launch begins.
    Launch { launch: u64, kernel: String },
    /// The launch has ended, by itself or by a fault.
    Ended { launch: u64 },
    /// The host reads or writes device memory with a copy.
    HostCopy { write: bool, address: u64, bytes: u64 },
    /// What a thread has seen of the others: pairs of a key and a stamp. `clock` is unique in the launch.
    Clock { launch: u64, clock: u32, entries: Vec<u64> },
    /// A thread accessed memory that is shared with a card.
    Access {
        at: At,
        /// [`WRITES`], [`STRONG`], [`ACQUIRES`], [`FENCED`].
        flags: u32,
        address: u64,
        bytes: u64,
        /// The value that a strong access of at most 8 bytes saw.
        value: u64,
    },
    /// A thread wrote a request's first bytes to a slot of a card's queue, in a post that the program began with this
    /// clock.
    Post { at: At, slot: u64 },
    /// A thread wrote a doorbell.
    Doorbell { at: At, address: u64, value: u64 },
    /// A thread has seen a word that a card counts in: a signal or a counter. Later accesses of the thread have a later
    /// stamp.
    Counted { at: At, look: Look },
    /// A race inside a launch, found while it ran, between places.
    Raced { launch: u64, pair: Pair, example: Example },
    /// A kernel has found a context's emulated signals: `count` words at this address, to which the signal proxy adds.
    Signals { address: u64, count: u32, generation: u32 },

    // The software card. A request is named by its card and a number that the card gives it.
    /// A card, named by a hash of its address.
    Card { card: u64 },
    /// A send queue and the memory of its ring, as the program addresses it.
    Queue { card: u64, queue: u32, ring: u64, slot_bytes: u32, slots: u32, doorbell: u64 },
    /// A word that the card counts in: at an address, or in a file of device memory if `inode` isn't 0, at an offset.
    Counter {
        card: u64,
        counter: u64,
        queue: u32,
        /// It counts the queue's completions; otherwise arrivals from peers.
        completions: bool,
        inode: u64,
        address: u64,
    },
    /// Memory was registered.
    Region { card: u64, key: u32, address: u64, bytes: u64 },
    /// Memory was deregistered.
    RegionGone { card: u64, key: u32 },
    /// The card has read a request from its slot. Of a write, the source is local and the target remote; of a read, the
    /// other way round.
    Taken {
        card: u64,
        request: u64,
        queue: u32,
        /// How many requests the queue had before.
        index: u64,
        operation: Operation,
        peer: u64,
        peer_queue: u32,
        local: u64,
        remote: u64,
        bytes: u64,
        /// The source is in the request itself.
        inline: bool,
    },
    /// A counter has gone up for a request: one of `from`.
    Raised { card: u64, counter: u64, from: u64, request: u64 },
    /// A request of this card has completed.
    Retired { card: u64, request: u64 },
    /// A queue was closed.
    QueueClosed { card: u64, queue: u32 },
    /// A peer's request brought immediate data, or a message of these words: an emulated signal, if the plugin posted
    /// it.
    Arrived { card: u64, queue: u32, from: u64, request: u64, words: Vec<u64> },
}

/// A flag of an access: it writes.
pub const WRITES: u32 = 1;
/// It is an atomic or another strong access.
pub const STRONG: u32 = 2;
/// What it reads is acquired, by itself or by a fence after it.
pub const ACQUIRES: u32 = 4;
/// It was recorded before: this record has the moment of the fence that acquires what it read.
pub const FENCED: u32 = 8;

/// The rank of a process whose launcher doesn't tell.
pub const NO_RANK: u32 = u32::MAX;

/// An event and its time in nanoseconds of the system's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When it was recorded.
    pub time: u64,
    /// What happened.
    pub event: Event,
}

/// Returns the system's time in nanoseconds.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

/// Returns the directory for records, if this process is checked.
pub fn directory() -> Option<std::path::PathBuf> {
    std::env::var_os("GIN_CHECK").filter(|directory| !directory.is_empty()).map(Into::into)
}

/// The launchers' variables for a rank.
const RANKS: [&str; 6] = ["FERROGIN_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"];

/// A file of records.
#[derive(Debug)]
pub struct Log(File);

impl Log {
    /// Opens this process's file for a library, `gpu` or `card`.
    ///
    /// # Errors
    /// The file can't be created.
    pub fn create(directory: &Path, library: &str) -> io::Result<Self> {
        let pid = std::process::id();
        let path = directory.join(format!("{library}.{pid}"));
        let log = Self(OpenOptions::new().create(true).append(true).open(path)?);
        let rank = RANKS.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
        log.write(&[Event::Process { rank: rank.unwrap_or(NO_RANK), pid, library: library.into() }])?;
        Ok(log)
    }

    /// Appends events, each with the present time.
    ///
    /// # Errors
    /// The file can't be written, as on a full disk.
    pub fn write(&self, events: &[Event]) -> io::Result<()> {
        let (time, mut bytes) = (now(), Vec::new());
        events.iter().for_each(|event| encode(&mut bytes, time, event));
        self.append(&bytes)
    }

    /// Appends encoded records.
    ///
    /// # Errors
    /// The file can't be written, as on a full disk.
    pub fn append(&self, records: &[u8]) -> io::Result<()> {
        // A single call, so that threads' records don't mix. A part of the records would pass for all of them.
        (&self.0).write_all(records).inspect_err(|_| drop(self.0.set_len(0)))
    }
}

/// Appends a record to `out`.
pub fn encode(out: &mut Vec<u8>, time: u64, event: &Event) {
    serde_json::to_writer(&mut *out, &(time, event)).expect("memory takes any text");
    out.push(b'\n');
}

/// Decodes a file's records, up to the first that is incomplete or unknown.
pub fn decode(bytes: &[u8]) -> Vec<Record> {
    let records = bytes.split(|byte| *byte == b'\n').map_while(|line| serde_json::from_slice(line).ok());
    records.map(|(time, event)| Record { time, event }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Event> {
        vec![
            Event::Process { rank: NO_RANK, pid: 7, library: "gpu".into() },
            Event::Place { place: 3, lines: vec!["a.cuh:1010".into(), "b \"c\n.cu:7".into()] },
            Event::Clock { launch: 1, clock: 2, entries: vec![u64::MAX, 0, 127, 128] },
            Event::Retired { card: u64::MAX, request: 1 << 40 },
        ]
    }

    #[test]
    fn records_come_back_as_written() {
        let mut bytes = Vec::new();
        samples().iter().for_each(|event| encode(&mut bytes, 1 << 60, event));
        let records = decode(&bytes);
        assert!(records.iter().all(|record| record.time == 1 << 60));
        assert_eq!(records.into_iter().map(|record| record.event).collect::<Vec<_>>(), samples());
    }

    #[test]
    fn an_incomplete_last_record_is_left_out() {
        let mut bytes = Vec::new();
        samples().iter().for_each(|event| encode(&mut bytes, 1, event));
        for len in 0..bytes.len() - 1 {
            assert!(decode(&bytes[..len]).len() < samples().len());
        }
    }

    #[test]
    fn any_bytes_are_decoded_without_a_panic() {
        for seed in 0..2000u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let bytes: Vec<u8> = (0..60)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 58) as u8
                })
                .collect();
            decode(&bytes);
        }
    }
}
