//! The record of a process: what its GPU and its card did, in the order in which each of them did it.
//!
//! Every library that takes part appends to a file of its own in the directory that `GIN_CHECK` names. A record is its
//! length, the time, the event's number and its fields. Numbers are in LEB128. A process that is killed leaves at most
//! one incomplete record, at the end.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// A field of a record.
trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(from: &mut &[u8]) -> Option<Self>;
}

impl Field for u64 {
    fn put(&self, out: &mut Vec<u8>) {
        let mut rest = *self;
        while rest >= 0x80 {
            out.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        out.push(rest as u8);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = from.split_first()?;
            *from = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

impl Field for u32 {
    fn put(&self, out: &mut Vec<u8>) {
        u64::from(*self).put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        u64::get(from)?.try_into().ok()
    }
}

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(u64::get(from)? != 0)
    }
}

impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend_from_slice(self.as_bytes());
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let len = usize::try_from(u64::get(from)?).ok()?;
        let (text, rest) = from.split_at_checked(len)?;
        *from = rest;
        String::from_utf8(text.to_vec()).ok()
    }
}

impl Field for Vec<u64> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        self.iter().for_each(|item| item.put(out));
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let count = u64::get(from)?;
        (0..count).map(|_| u64::get(from)).collect()
    }
}

macro_rules! events {
    ($($(#[$doc:meta])* $number:literal $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty),* $(,)? })*) => {
        /// Something that happened in a process.
        #[allow(missing_docs)]
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Event {
            $($(#[$doc])* $name { $($(#[$field_doc])* $field: $kind),* },)*
        }

        impl Event {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$name { $($field),* } => {
                        out.push($number);
                        $($field.put(out);)*
                    })*
                }
            }

            fn get(mut from: &[u8]) -> Option<Self> {
                let (number, rest) = from.split_first()?;
                from = rest;
                match number {
                    $($number => Some(Self::$name { $($field: <$kind>::get(&mut from)?),* }),)*
                    _ => None,
                }
            }
        }
    };
}

events! {
    /// The first record of a file.
    1 Process {
        /// The rank that the launcher gave the process, or [`NO_RANK`].
        rank: u32,
        pid: u32,
        /// `gpu` or `card`.
        library: String,
    }

    // The software GPU.

    /// Device memory, and the file that backs it: the card names a word of it by file and offset.
    10 Memory { address: u64, bytes: u64, inode: u64, offset: u64 }
    /// Device memory was freed or unmapped.
    11 Freed { address: u64, bytes: u64 }
    /// A place in a kernel's source. `place` is unique in the process.
    12 Place {
        place: u32,
        /// `file:line`, the instruction's own first, then the places it is inlined at.
        lines: String,
    }
    /// A launch begins.
    15 Launch { launch: u64, kernel: String }
    /// The launch has ended, by itself or by a fault.
    16 Ended { launch: u64 }
    /// The host reads or writes device memory with a copy.
    17 HostCopy { write: bool, address: u64, bytes: u64 }
    /// What a thread has seen of the others: pairs of a key and a stamp. `clock` is unique in the launch.
    18 Clock { launch: u64, clock: u32, entries: Vec<u64> }
    /// Threads of one launch accessed memory that is shared with a card. `thread` and `stamp` name the moment for other
    /// threads' clocks.
    19 Access {
        launch: u64, thread: u64, stamp: u32, clock: u32, place: u32,
        /// [`WRITES`], [`STRONG`], [`ACQUIRES`], [`FENCED`].
        flags: u32,
        address: u64, bytes: u64,
        /// The value that a strong access of at most 8 bytes saw.
        value: u64,
    }
    /// A thread wrote a request's first bytes to a slot of a card's queue, in a post that the program began with this
    /// clock.
    20 Post { launch: u64, thread: u64, stamp: u32, clock: u32, place: u32, slot: u64 }
    /// A thread wrote a doorbell.
    21 Doorbell { launch: u64, thread: u64, stamp: u32, place: u32, address: u64, value: u64 }
    /// A thread has seen a word that a card counts in: a signal or a counter. Later accesses of the thread have a later
    /// stamp.
    22 Counted {
        launch: u64, thread: u64, stamp: u32, clock: u32, place: u32, address: u64,
        /// The count that it waited for, since the last reset; otherwise what it saw.
        value: u64,
        /// What it saw.
        raw: u64,
        /// 1: a wait for a signal or counter; 2: a flush; 3: a reset; 4: a load of the value.
        call: u32,
    }
    /// A race inside a launch, found while it ran.
    23 Raced {
        launch: u64, first: u32, second: u32,
        /// 1: the first access writes; 2: the second writes; 4: the memory is shared; 8: nobody wrote what is read;
        /// 16: a bulk copy reads what threads have written, without a proxy fence.
        flags: u32,
        address: u64, bytes: u32, count: u64,
    }
    /// A kernel has found a context's emulated signals: `count` words at this address, to which the signal proxy adds.
    24 Signals { address: u64, count: u32, generation: u32 }

    // The software card. A request is named by its card and a number that the card gives it.

    /// A card, named by a hash of its address.
    40 Card { card: u64 }
    /// A send queue and the memory of its ring, as the program addresses it.
    41 Queue { card: u64, queue: u32, ring: u64, slot_bytes: u32, slots: u32, doorbell: u64 }
    /// A word that the card counts in: at an address, or in a file of device memory if `inode` isn't 0, at an offset.
    42 Counter {
        card: u64, counter: u64, queue: u32,
        /// 1: local completions; 2: arrivals from peers.
        counts: u32,
        inode: u64, address: u64,
    }
    /// Memory was registered.
    43 Region { card: u64, key: u32, address: u64, bytes: u64 }
    /// Memory was deregistered.
    44 RegionGone { card: u64, key: u32 }
    /// The card has read a request from its slot. Of a write, the source is local and the target remote; of a read, the
    /// other way round.
    45 Taken {
        card: u64, request: u64, queue: u32,
        /// How many requests the queue had before.
        index: u64,
        /// 1: write; 2: read; 3: send.
        operation: u32,
        peer: u64, peer_queue: u32,
        local: u64, remote: u64, bytes: u64,
        /// The source is in the request itself.
        inline: bool,
    }
    /// A counter has gone up for a request: one of `from`.
    48 Raised { card: u64, counter: u64, from: u64, request: u64 }
    /// A request of this card has completed.
    49 Retired { card: u64, request: u64 }
    /// A queue was closed.
    50 QueueClosed { card: u64, queue: u32 }
    /// A peer's request brought immediate data, or a message of these words: an emulated signal, if the plugin posted
    /// it.
    52 Arrived { card: u64, queue: u32, from: u64, request: u64, words: Vec<u64> }
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
        // A single call, so that threads' records don't mix.
        (&self.0).write_all(records)
    }
}

/// Appends a record to `out`.
pub fn encode(out: &mut Vec<u8>, time: u64, event: &Event) {
    let mut body = Vec::with_capacity(64);
    time.put(&mut body);
    event.put(&mut body);
    (body.len() as u64).put(out);
    out.extend_from_slice(&body);
}

/// Decodes a file's records, up to the first that is incomplete or unknown.
pub fn decode(mut bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    let mut next = || {
        let len = usize::try_from(u64::get(&mut bytes)?).ok()?;
        let (mut body, rest) = bytes.split_at_checked(len)?;
        bytes = rest;
        let time = u64::get(&mut body)?;
        Some(Record { time, event: Event::get(body)? })
    };
    while let Some(record) = next() {
        records.push(record);
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Event> {
        vec![
            Event::Process { rank: NO_RANK, pid: 7, library: "gpu".into() },
            Event::Place { place: 3, lines: "a.cuh:1010\nb.cu:7".into() },
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
        for len in 0..bytes.len() {
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
