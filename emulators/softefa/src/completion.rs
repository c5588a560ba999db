//! Completions: their formats, and the queue from which `fi_cq_read` takes them.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use efa_dp_direct::cq::{RawCqe, Status};
use efa_dp_direct::wire::CompStatus;
use ferrogin_libfabric::bindings as fi;

use super::queue_pair::RingReader;
use soft_nic::card::signal::Signal;

/// An operation's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failure {
    /// Positive libfabric error number.
    pub err: i32,
    /// EFA completion status, or 0.
    pub status: u8,
    /// Bytes that did not fit.
    pub olen: usize,
}

impl Failure {
    /// Returns the failure of a request that completed with this status, which is not ok. The numbers are the efa
    /// provider's.
    pub(super) fn of_status(raw: u8) -> Self {
        use CompStatus as S;
        let err = match Status::from_raw(raw) {
            Status::Known(S::Flushed) => fi::FI_ECANCELED,
            Status::Known(S::LocalUnreachableRemote) => fi::FI_EHOSTUNREACH,
            Status::Known(S::LocalBadLength | S::RemoteBadLength) => fi::FI_EMSGSIZE,
            Status::Known(S::RemoteAbort | S::LocalUnresponsiveRemote) => fi::FI_ECONNABORTED,
            Status::Known(S::RemoteBadDestQpn | S::RemoteUnknownPeer) => fi::FI_ENOTCONN,
            Status::Known(S::RemoteRnr) => fi::FI_ENORX,
            Status::Known(S::RemoteBadStatus) => fi::FI_EREMOTEIO,
            Status::Known(
                S::Ok
                | S::LocalQpInternalError
                | S::LocalUnsupportedOp
                | S::LocalInvalidAh
                | S::LocalInvalidLkey
                | S::RemoteBadAddress
                | S::RemoteFeatureMismatch,
            ) => fi::FI_EINVAL,
            Status::Unknown(_) => fi::FI_EOTHER,
        };
        Self { err, status: raw, olen: 0 }
    }

    pub(super) fn of_code(err: i32) -> Self {
        Self { err, status: 0, olen: 0 }
    }
}

/// One completion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub context: *mut c_void,
    /// `FI_SEND | FI_MSG` and the like.
    pub flags: u64,
    pub len: usize,
    /// A message's buffer, if the context does not identify it.
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    /// The sender's address in the address vector, or `FI_ADDR_NOTAVAIL`.
    pub source: u64,
    pub failure: Option<Failure>,
}

// SAFETY: the pointers are the application's contexts and buffers, which this provider only returns to it.
unsafe impl Send for Entry {}

impl Entry {
    pub(super) fn new(context: *mut c_void, flags: u64) -> Self {
        Self {
            context,
            flags,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
            tag: 0,
            source: fi::FI_ADDR_NOTAVAIL,
            failure: None,
        }
    }
}

/// Returns the size of an entry in a format; `None` for a format that does not exist.
pub(super) fn entry_size(format: fi::fi_cq_format::Type) -> Option<usize> {
    match format {
        fi::fi_cq_format::FI_CQ_FORMAT_CONTEXT => Some(size_of::<fi::fi_cq_entry>()),
        fi::fi_cq_format::FI_CQ_FORMAT_MSG => Some(size_of::<fi::fi_cq_msg_entry>()),
        fi::fi_cq_format::FI_CQ_FORMAT_DATA => Some(size_of::<fi::fi_cq_data_entry>()),
        fi::fi_cq_format::FI_CQ_FORMAT_TAGGED => Some(size_of::<fi::fi_cq_tagged_entry>()),
        _ => None,
    }
}

// Each format begins with the one before it, so a prefix of the longest is written.
const _: () = assert!(offset_of!(fi::fi_cq_tagged_entry, flags) == offset_of!(fi::fi_cq_msg_entry, flags));
const _: () = assert!(offset_of!(fi::fi_cq_tagged_entry, len) == offset_of!(fi::fi_cq_msg_entry, len));
const _: () = assert!(offset_of!(fi::fi_cq_tagged_entry, data) == offset_of!(fi::fi_cq_data_entry, data));
const _: () = assert!(offset_of!(fi::fi_cq_tagged_entry, buf) == offset_of!(fi::fi_cq_data_entry, buf));

/// An endpoint that completes into a [`CqQueue`].
pub(super) trait Completer: Send + Sync {
    /// Returns the queue pair's number.
    fn qpn(&self) -> u16;
    /// Returns the application's completion for a ring entry; `None` if the application gets none.
    fn complete(&self, raw: &RawCqe) -> Option<Entry>;
    /// Makes the card progress in this thread.
    fn poll_card(&self);
    /// Processes the completions that the card has written.
    fn settle(&self);
}

/// A completion queue: the entries that the application can read, and the sources of more.
pub(super) struct CqQueue {
    ready: Mutex<VecDeque<Entry>>,
    /// Raised when an entry is added, if threads may wait.
    pub signal: Option<Arc<Signal>>,
    /// Size of an entry in the application's format.
    entry_size: usize,
    /// How many entries the application requested.
    capacity: usize,
    /// The card's ring, on `efa-direct`.
    ring: Option<Mutex<RingReader>>,
    /// Free entries of the ring: those that no outstanding request needs.
    room: AtomicU32,
    /// Endpoints that complete here.
    endpoints: Mutex<Vec<Arc<dyn Completer>>>,
}

/// Entries taken from a ring at once.
const BURST: usize = 256;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CqQueue {
    pub(super) fn new(
        entry_size: usize,
        capacity: usize,
        ring: Option<RingReader>,
        signal: Option<Arc<Signal>>,
    ) -> Self {
        Self {
            ready: Mutex::default(),
            signal,
            entry_size,
            capacity,
            room: AtomicU32::new(ring.as_ref().map_or(0, RingReader::entries)),
            ring: ring.map(Mutex::new),
            endpoints: Mutex::default(),
        }
    }

    pub(super) fn attach(&self, endpoint: &Arc<dyn Completer>) {
        lock(&self.endpoints).push(endpoint.clone());
    }

    /// Removes an endpoint whose queue pair is closed, after its last completions.
    pub(super) fn detach(&self, endpoint: &Arc<dyn Completer>) {
        if let Some(ring) = &self.ring {
            self.take(ring, usize::MAX);
        }
        lock(&self.endpoints).retain(|p| !Arc::ptr_eq(p, endpoint));
    }

    /// Reserves a ring entry for a request. Returns false if there is none.
    pub(super) fn reserve(&self) -> bool {
        self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1)).is_ok()
    }

    /// Releases a request's entry, which the application has read.
    pub(super) fn release(&self) {
        self.room.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether there is no room for more completions until the application reads.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.ready).len() >= self.capacity
    }

    pub(super) fn push(&self, entry: Entry) {
        lock(&self.ready).push_back(entry);
        if let Some(signal) = &self.signal {
            signal.raise();
        }
    }

    /// Whether the application can read this many entries, or a failed operation's.
    pub(super) fn has_entries(&self, wanted: usize) -> bool {
        let ready = lock(&self.ready);
        ready.len() >= wanted || ready.iter().any(|entry| entry.failure.is_some())
    }

    /// Returns how many of `wanted` entries the queue may hold at once.
    pub(super) fn possible(&self, wanted: usize) -> usize {
        wanted.min(self.capacity)
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.ready).len()
    }

    /// Polls the card in this thread, and takes its completions. An application that reads is mostly waiting.
    pub(super) fn progress(&self) {
        let first = lock(&self.endpoints).first().cloned();
        if let Some(endpoint) = first {
            endpoint.poll_card();
        }
        self.settle();
    }

    /// Takes the completions that the card has written, for all endpoints of the queue.
    pub(super) fn settle(&self) {
        if let Some(ring) = &self.ring {
            return self.take(ring, BURST);
        }
        // The lock is not held here: an endpoint's progress may push to this queue and to its other one.
        let count = lock(&self.endpoints).len();
        for i in 0..count {
            let endpoint = lock(&self.endpoints).get(i).cloned();
            if let Some(endpoint) = endpoint {
                endpoint.settle();
            }
        }
    }

    /// Takes up to `most` completions from the ring.
    fn take(&self, ring: &Mutex<RingReader>, most: usize) {
        let mut ring = lock(ring);
        let endpoints = lock(&self.endpoints);
        for _ in 0..most {
            let Some(raw) = ring.next() else { break };
            let qpn = raw.common().qp_num;
            if let Some(endpoint) = endpoints.iter().find(|endpoint| endpoint.qpn() == qpn)
                && let Some(entry) = endpoint.complete(&raw)
            {
                self.push(entry);
            }
        }
    }

    /// Reads up to `count` entries, and their sources.
    ///
    /// # Errors
    /// The error code for the application: the queue is empty, or the next entry is a failed operation's.
    ///
    /// # Safety
    /// `buf` holds `count` entries of this queue's format, `source` is null or holds as many addresses.
    pub(super) unsafe fn read(&self, buf: *mut c_void, count: usize, source: *mut u64) -> Result<usize, i32> {
        let mut ready = lock(&self.ready);
        let mut read = 0;
        while read < count {
            match ready.front() {
                Some(entry) if entry.failure.is_none() => {
                    let whole = fi::fi_cq_tagged_entry {
                        op_context: entry.context,
                        flags: entry.flags,
                        len: entry.len,
                        buf: entry.buf,
                        data: entry.data,
                        tag: entry.tag,
                    };
                    let to: *mut u8 = buf.cast::<u8>().wrapping_add(read * self.entry_size);
                    // SAFETY: the caller provides room for `count` entries of `entry_size`, and every format is a
                    // prefix of the longest.
                    unsafe { ptr::copy_nonoverlapping((&raw const whole).cast(), to, self.entry_size) };
                    if !source.is_null() {
                        // SAFETY: not null, and this function's caller provides room for `count` sources; this is one
                        // of them.
                        unsafe { source.wrapping_add(read).write(entry.source) };
                    }
                    ready.pop_front();
                    read += 1;
                }
                Some(_) if read == 0 => return Err(fi::FI_EAVAIL),
                _ => break,
            }
        }
        match ready.front() {
            _ if read > 0 => Ok(read),
            None => Err(fi::FI_EAGAIN),
            Some(entry) if entry.failure.is_some() => Err(fi::FI_EAVAIL),
            Some(_) => Ok(0),
        }
    }

    /// Takes the failed operation at the head of the queue, if there is one.
    pub(super) fn take_failed(&self) -> Option<(Entry, Failure)> {
        let mut ready = lock(&self.ready);
        let failure = ready.front()?.failure?;
        ready.pop_front().map(|entry| (entry, failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(format: fi::fi_cq_format::Type) -> CqQueue {
        CqQueue::new(entry_size(format).unwrap(), 4, None, None)
    }

    fn entry(n: usize) -> Entry {
        Entry { len: n, tag: 7, data: 8, source: 9, ..Entry::new(n as *mut c_void, fi::FI_RECV) }
    }

    #[test]
    fn formats_are_prefixes_of_longest_format() {
        for (format, words) in [
            (fi::fi_cq_format::FI_CQ_FORMAT_CONTEXT, 1),
            (fi::fi_cq_format::FI_CQ_FORMAT_MSG, 3),
            (fi::fi_cq_format::FI_CQ_FORMAT_DATA, 5),
            (fi::fi_cq_format::FI_CQ_FORMAT_TAGGED, 6),
        ] {
            let queue = queue(format);
            queue.push(entry(1));
            queue.push(entry(2));
            let mut room = [u64::MAX; 13];
            let mut source = [0; 2];
            // SAFETY: the arrays hold two entries of any format.
            let read = unsafe { queue.read(room.as_mut_ptr().cast(), 2, source.as_mut_ptr()) };
            assert_eq!((read, source), (Ok(2), [9; 2]));
            for (n, entry) in room.chunks(words).take(2).enumerate() {
                let n = n as u64 + 1;
                assert_eq!(entry, &[n, fi::FI_RECV, n, 0, 8, 7][..words]);
            }
            assert_eq!(room[2 * words], u64::MAX, "not beyond the entries");
        }
        assert_eq!(entry_size(99), None);
    }

    #[test]
    fn failures_are_read_by_readerr() {
        let queue = queue(fi::fi_cq_format::FI_CQ_FORMAT_CONTEXT);
        let mut room = [0u64; 4];
        // SAFETY: the array holds four entries.
        let mut read = || unsafe { queue.read(room.as_mut_ptr().cast(), 4, ptr::null_mut()) };
        assert_eq!(read(), Err(fi::FI_EAGAIN));
        queue.push(entry(1));
        queue.push(Entry { failure: Some(Failure::of_status(10)), ..entry(2) });
        queue.push(entry(3));
        assert!(queue.take_failed().is_none(), "not at the head");
        assert_eq!(read(), Ok(1));
        assert_eq!(read(), Err(fi::FI_EAVAIL));
        let (failed, failure) = queue.take_failed().unwrap();
        assert_eq!((failed.len, failure.err, failure.status), (2, fi::FI_ENORX, 10));
        assert_eq!(read(), Ok(1));
        assert_eq!(read(), Err(fi::FI_EAGAIN));
    }
}
