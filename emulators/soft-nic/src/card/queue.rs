//! The card's side of the rings of queue pairs and completion queues.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use efa_dp_direct::cq::RawCqe;
use efa_dp_direct::wire::{LkeyCtrl, RxDesc};

use super::signal::Signal;
use crate::memory::{self, Mapping, page_size};

/// Size of a receive queue's entry in bytes (`efa_io_rx_desc`).
pub const RQ_ENTRY_LEN: u32 = 16;

/// A work queue: its ring and doorbell, in card memory that the application may only write.
#[derive(Debug)]
pub struct WorkQueue {
    map: Mapping,
    doorbell_at: usize,
    /// Size of an entry in bytes: 16, 64 or 128.
    pub entry_size: u32,
    /// Number of entries, a power of two.
    pub entries: u32,
}

impl WorkQueue {
    /// Creates a work queue. `slot` spreads the doorbells of many queues over cache sets.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn new(entry_size: u32, entries: u32, slot: u16) -> io::Result<Self> {
        let page = page_size();
        let ring = (entry_size as usize * entries as usize).next_multiple_of(page);
        let map = Mapping::anonymous(ring + page)?;
        Ok(Self { map, doorbell_at: ring + (usize::from(slot) * 64) % page, entry_size, entries })
    }

    /// Returns the address of the ring's first byte.
    pub fn buffer(&self) -> *mut u8 {
        self.map.as_ptr()
    }

    /// Returns the address of the doorbell register.
    pub fn doorbell(&self) -> *mut u32 {
        self.map.as_ptr().wrapping_add(self.doorbell_at).cast()
    }

    /// Stores an entry word by word, as the card reads it. Bytes beyond an entry's size are ignored.
    pub fn store(&self, index: u32, bytes: &[u8]) {
        let slot = self.slot_of(index) as usize * self.entry_size as usize;
        for (i, word) in bytes.as_chunks::<8>().0.iter().take(self.entry_size as usize / 8).enumerate() {
            self.map.u64_at(slot + 8 * i).store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    fn register(&self) -> &AtomicU32 {
        self.map.u32_at(self.doorbell_at)
    }

    /// Rings the doorbell, after all entries stored so far.
    pub fn ring(&self, producer: u32) {
        fence(Ordering::Release);
        self.register().store(producer, Ordering::Release);
    }

    /// Returns the value that the doorbell was last rung with.
    pub fn rung(&self) -> u32 {
        self.register().load(Ordering::Acquire)
    }

    /// Returns the producer index last rung, for a card that is at `from`. Host drivers ring the low 16 bits of the
    /// index, device code all 32: a value that is too far ahead as 32 bits but not as 16 is a 16-bit one.
    pub fn rung_after(&self, from: u32) -> u32 {
        let rung = self.rung();
        let short = from.wrapping_add(u32::from((rung as u16).wrapping_sub(from as u16)));
        let fits = |index: u32| index.wrapping_sub(from) <= self.entries;
        if rung <= u16::MAX.into() && !fits(rung) && fits(short) { short } else { rung }
    }

    /// Sets the doorbell register to the index where the queue starts. Software gets the register's address after this
    /// call.
    pub fn preset(&self, value: u32) {
        self.register().store(value, Ordering::Relaxed);
    }

    /// Empties the ring. Its next request has the index `start`.
    pub fn clear(&self, start: u32) {
        // The queue pair's owner posts nothing meanwhile.
        self.map.clear(self.entry_size as usize * self.entries as usize);
        self.preset(start);
    }

    /// Returns the slot of the request with this index.
    pub fn slot_of(&self, index: u32) -> u32 {
        index & (self.entries - 1)
    }

    /// Returns the phase bit that a request with this index must have.
    pub fn phase_of(&self, index: u32) -> u8 {
        (index >> self.entries.trailing_zeros()) as u8 & 1
    }

    /// Reads the receive descriptor at `index`.
    pub fn fetch_receive(&self, index: u32) -> RxDesc {
        let [addr, rest]: [u64; 2] = self.map.words_at(self.slot_of(index) as usize * RQ_ENTRY_LEN as usize);
        RxDesc {
            buf_addr_lo: addr as u32,
            buf_addr_hi: (addr >> 32) as u32,
            req_id: rest as u16,
            length: (rest >> 16) as u16,
            lkey_ctrl: LkeyCtrl((rest >> 32) as u32),
        }
    }

    /// Copies the entry at `index` out of the ring, into 64 or 128 bytes of `entry`.
    pub fn fetch(&self, index: u32, entry: &mut [u8; 128]) {
        let slot = self.slot_of(index) as usize * self.entry_size as usize;
        let low: [u64; 8] = self.map.words_at(slot);
        let high: [u64; 8] = if self.entry_size == 128 { self.map.words_at(slot + 64) } else { [0; 8] };
        for (bytes, word) in entry.chunks_exact_mut(8).zip(low.into_iter().chain(high)) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
    }
}

/// A doorbell and its last value: all that polling an idle queue reads, side by side for all of the card's queues.
#[derive(Debug)]
pub(crate) struct Watch {
    /// The queue pair.
    pub qpn: u16,
    /// Producer index up to which requests were taken.
    pub seen: u32,
    /// The doorbell is ignored.
    pub paused: bool,
    queue: Arc<WorkQueue>,
    doorbell: *const u32,
}

// SAFETY: `doorbell` points into the mapping of `queue`, which this value keeps alive.
unsafe impl Send for Watch {}

impl Watch {
    pub(crate) fn new(qpn: u16, queue: Arc<WorkQueue>, seen: u32) -> Self {
        let doorbell = queue.doorbell();
        Self { qpn, seen, paused: false, queue, doorbell }
    }

    /// Whether the doorbell has been rung since the last poll.
    pub fn is_rung(&self) -> bool {
        debug_assert_eq!(self.doorbell, self.queue.doorbell());
        // SAFETY: the doorbell lies in the queue's mapping, which `queue` keeps.
        let rung = unsafe { memory::load_doorbell(self.doorbell) };
        rung != self.seen && !self.paused && self.queue.rung_after(self.seen) != self.seen
    }
}

/// Size of a completion queue's entry in bytes: that of `efa_io_rx_cdesc_ex`, so that receives of writes fit.
pub const CQ_ENTRY_LEN: u32 = 32;

/// A completion queue's ring.
#[derive(Debug)]
pub struct CompletionRing {
    map: Mapping,
    /// Number of entries, a power of two.
    pub entries: u32,
    next: u32,
    /// Number of queue pairs bound to it.
    pub bound: u32,
    /// Events to raise after a completion.
    pub signals: Vec<Arc<Signal>>,
    doorbell: Option<ArmDoorbell>,
}

/// A completion queue's doorbell (`efa_io_regs_defs.h`): the reader's index in bits 0 to 15, the number of events it
/// has taken in bits 29 and 30, and in bit 31 whether it wants an event.
#[derive(Debug)]
struct ArmDoorbell {
    map: Mapping,
    seen: u32,
    /// Events raised so far.
    raised: u32,
    armed: bool,
}

impl ArmDoorbell {
    /// Reads the register. Returns true if the reader wants an event and has not read everything up to `next`.
    ///
    /// The register holds only the last write, which may have replaced an earlier one that asked for an event. So once
    /// the reader has taken all events, every write arms. At worst the reader gets one extra event.
    fn poll(&mut self, next: u32) -> bool {
        let value = self.map.u32_at(0).load(Ordering::Acquire);
        if value == self.seen {
            return false;
        }
        self.seen = value;
        self.armed = (value >> 29) & 3 == self.raised & 3;
        self.armed && value >> 31 != 0 && value as u16 != next as u16
    }
}

impl CompletionRing {
    /// Creates a ring in the card's memory. `entries` is a power of two.
    pub fn new(entries: u32) -> io::Result<Self> {
        // New memory is zero, and unused pages are never touched.
        let map = Mapping::anonymous(entries as usize * CQ_ENTRY_LEN as usize)?;
        Ok(Self::over(map, entries))
    }

    fn over(map: Mapping, entries: u32) -> Self {
        Self { map, entries, next: 0, bound: 0, signals: Vec::new(), doorbell: None }
    }

    /// Gives the ring a doorbell that arms its events, and returns its address.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn add_doorbell(&mut self) -> io::Result<*mut u32> {
        let map = Mapping::anonymous(page_size())?;
        let at = map.as_ptr().cast();
        self.doorbell = Some(ArmDoorbell { map, seen: 0, raised: 0, armed: false });
        Ok(at)
    }

    /// Raises the event that the reader asked for through the doorbell, if completions are already waiting.
    pub(crate) fn poll_doorbell(&mut self) {
        let next = self.next;
        if self.doorbell.as_mut().is_some_and(|doorbell| doorbell.poll(next)) {
            self.raise();
        }
    }

    fn raise(&mut self) {
        let armed = self.doorbell.as_mut().is_some_and(|doorbell| std::mem::take(&mut doorbell.armed));
        for signal in &self.signals {
            if armed {
                signal.arm();
            }
            let raised = signal.raise();
            if let Some(doorbell) = self.doorbell.as_mut().filter(|_| raised) {
                doorbell.raised = doorbell.raised.wrapping_add(1);
            }
        }
    }

    /// Creates a ring in the application's memory.
    ///
    /// # Errors
    /// `EINVAL` if the memory is too small or not aligned, or `entries` is not a power of two.
    pub fn in_memory(map: Mapping, entries: u32) -> io::Result<Self> {
        let len = entries as usize * CQ_ENTRY_LEN as usize;
        if map.len() < len
            || !(map.as_ptr() as usize).is_multiple_of(CQ_ENTRY_LEN as usize)
            || !entries.is_power_of_two()
        {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // An unwritten entry must have the previous lap's phase, which is 0.
        map.clear(len);
        Ok(Self::over(map, entries))
    }

    /// Returns the address of the ring's first byte.
    pub fn buffer(&self) -> *mut u8 {
        self.map.as_ptr()
    }

    /// Appends an entry; `emit` returns its bytes for the lap's phase. A reader a lap behind loses the oldest entry, as
    /// on hardware.
    pub fn append(&mut self, emit: impl FnOnce(bool) -> RawCqe) {
        let phase = self.next_phase();
        let mut words = [0u64; 4];
        for (word, bytes) in words.iter_mut().zip(emit(phase).0.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let slot = (self.next & (self.entries - 1)) as usize * CQ_ENTRY_LEN as usize;
        for (i, word) in words.into_iter().enumerate().rev() {
            // The phase is in word 0, which is written last and releases the others.
            self.map.u64_at(slot + 8 * i).store(word, Ordering::Release);
        }
        self.next = self.next.wrapping_add(1);
        if let Some(doorbell) = &mut self.doorbell {
            doorbell.poll(self.next);
        }
        self.raise();
    }

    /// Returns the phase of the next entry.
    pub(crate) fn next_phase(&self) -> bool {
        (self.next >> self.entries.trailing_zeros()) & 1 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;

    #[test]
    fn slots_and_phases_follow_the_index() {
        let queue = WorkQueue::new(64, 8, 3).unwrap();
        for index in [0, 7, 8, 15, 16, u32::MAX] {
            assert_eq!((queue.slot_of(index), queue.phase_of(index)), (index % 8, (index / 8 % 2) as u8), "{index}");
        }
    }

    #[test]
    fn doorbell_of_16_bits_goes_on_behind_65535() {
        let queue = WorkQueue::new(64, 16, 0).unwrap();
        for (from, doorbell, rung) in [
            (0, 5, 5),
            (65530, 65535, 65535),
            (65530, 65540, 65540),
            (65530, 4, 65540),
            (65536, 0, 65536),
            (131_070, 3, 131_075),
            (u32::MAX - 1, 3, 3),
            // Too far ahead either way: the rule that refuses it sees the doorbell unchanged.
            (65530, 20, 20),
            (8, 3, 3),
        ] {
            queue.preset(doorbell);
            assert_eq!(queue.rung_after(from), rung, "{from} {doorbell}");
        }
    }

    #[test]
    fn request_only_has_the_bytes_of_its_slot() {
        for size in [64u8, 128] {
            let queue = WorkQueue::new(size.into(), 2, 0).unwrap();
            for at in 0..2 * usize::from(size) {
                queue.map.write(at, &[at as u8]);
            }
            let mut bytes = [0xa5; 128];
            queue.fetch(3, &mut bytes);
            let expected = std::array::from_fn(|at| if at < size.into() { size + at as u8 } else { 0 });
            assert_eq!(bytes, expected);
        }
    }

    #[test]
    fn receive_is_read_from_its_slot_with_all_its_bits() {
        let queue = WorkQueue::new(RQ_ENTRY_LEN, 8, 0).unwrap();
        let desc = RxDesc::single(0x1234, 0x0123_4567_89ab_cdef, 0x5678, 0x9a_bcde);
        for (i, word) in desc.to_words().into_iter().enumerate() {
            queue.map.u64_at(5 * RQ_ENTRY_LEN as usize + 8 * i).store(word, Ordering::Relaxed);
        }
        assert_eq!(queue.fetch_receive(13), desc);
        assert_ne!(queue.fetch_receive(12), desc);
    }

    #[test]
    fn watch_sees_a_doorbell_until_it_is_taken() {
        let queue = Arc::new(WorkQueue::new(64, 8, 0).unwrap());
        let mut watch = Watch::new(4, queue.clone(), 0);
        assert!(!watch.is_rung());
        queue.preset(3);
        assert!(watch.is_rung());
        watch.seen = 3;
        assert!(!watch.is_rung());
    }

    #[test]
    fn application_memory_for_completions_is_checked_and_cleared() {
        let page = page_size();
        let file = memory::sealed_memfd("completions", page).unwrap();
        let from = |offset: u64, len| Mapping::shared(file.as_fd(), offset, len).unwrap();
        let refused = |map, entries| {
            CompletionRing::in_memory(map, entries).is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
        };
        assert!(refused(from(0, 255), 8), "too small");
        assert!(refused(from(16, 256), 8), "not aligned");
        assert!(refused(from(0, 256), 6), "no power of two");
        let map = from(32, 257);
        map.write(0, &[0xa5; 257]);
        let ring = CompletionRing::in_memory(map, 8).unwrap();
        let mut bytes = [0; 257];
        ring.map.read(0, &mut bytes);
        assert_eq!((&bytes[..256], bytes[256]), (&[0; 256][..], 0xa5));
        assert!(CompletionRing::in_memory(from(0, 256), 8).is_ok(), "no byte too many");
    }

    /// A ring with a doorbell, and the signal that its events raise.
    struct Armed {
        ring: CompletionRing,
        signal: Arc<Signal>,
    }

    impl Armed {
        fn new() -> Self {
            let mut ring = CompletionRing::new(8).unwrap();
            ring.add_doorbell().unwrap();
            let signal = Arc::new(Signal::new().unwrap());
            ring.signals.push(signal.clone());
            Self { ring, signal }
        }

        fn is_raised(&self) -> bool {
            let mut fds = [PollFd::new(self.signal.fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
        }

        fn completes(&mut self) -> bool {
            self.ring.append(|_| RawCqe([0; 32]));
            self.is_raised()
        }

        /// Rings as a reader that has read up to `index`, has taken `events` and wants another. Returns whether an
        /// event was raised.
        fn arms(&mut self, index: u32, events: u32) -> bool {
            let value = 1 << 31 | events << 29 | index;
            self.ring.doorbell.as_ref().unwrap().map.u32_at(0).store(value, Ordering::Release);
            self.ring.poll_doorbell();
            self.is_raised()
        }
    }

    #[test]
    fn armed_ring_raises_one_event() {
        let mut armed = Armed::new();
        assert!(!armed.completes(), "nothing is armed");
        assert!(!armed.arms(1, 0), "the reader has read all");
        assert!(armed.completes());
        let _ = nix::unistd::read(armed.signal.fd(), &mut [0; 8]);
        assert!(!armed.completes(), "an event disarms");
        assert!(!armed.arms(3, 0), "a write from before the event does not arm");
        assert!(!armed.completes());
        assert!(armed.arms(3, 1), "a completion waits already");
    }

    #[test]
    fn stored_requests_are_fetched_from_their_slots() {
        let queue = WorkQueue::new(64, 8, 0).unwrap();
        for index in 8..16u32 {
            queue.store(index, &[index as u8; 64]);
        }
        for index in 8..16 {
            let mut bytes = [0; 128];
            queue.fetch(index, &mut bytes);
            assert_eq!(bytes[..64], [index as u8; 64]);
        }
    }

    #[test]
    fn completions_fill_the_slots_in_turn_with_the_phase_of_their_lap() {
        let mut ring = CompletionRing::new(4).unwrap();
        for n in 0..19u8 {
            let mut phase_of_entry = None;
            ring.append(|phase| {
                phase_of_entry = Some(phase);
                RawCqe([n; 32])
            });
            assert_eq!(phase_of_entry, Some(n / 4 % 2 == 0), "entry {n}");
            let mut slots = [[0; 32]; 4];
            ring.map.read(0, slots.as_flattened_mut());
            assert_eq!(slots[usize::from(n) % 4], [n; 32]);
            let before = n.saturating_sub(1);
            assert_eq!(slots[usize::from(before) % 4], [before; 32], "the entry before stays");
        }
    }
}
