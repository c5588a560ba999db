//! A block's mbarriers, which count arrivals and the bytes of bulk copies.

use crate::core::Fault;
use crate::error::TrapKind;

/// The most arrivals, and bytes under way.
const MAX: i64 = (1 << 20) - 1;

/// An initialized mbarrier.
#[derive(Clone, Copy, Debug)]
pub struct Mbarrier {
    pub at: u32,
    expected: u32,
    pending: u32,
    /// The bytes that are expected and haven't arrived.
    bytes: i64,
    phase: u32,
    /// Bulk copies see the mbarrier: a fence came after the initialization.
    pub fenced: bool,
}

fn wrong(at: u32, cause: impl AsRef<str>) -> Fault {
    Fault::new(TrapKind::Mbarrier, format!("the mbarrier at {at:#x} of shared memory {}", cause.as_ref()))
}

impl Mbarrier {
    pub fn new(at: u32, arrivals: u64) -> Result<Self, Fault> {
        if !(1..=MAX as u64).contains(&arrivals) {
            return Err(wrong(at, format!("is initialized for {arrivals} arrivals; it takes 1 to {MAX}")));
        }
        let arrivals = arrivals as u32;
        Ok(Self { at, expected: arrivals, pending: arrivals, bytes: 0, phase: 0, fenced: false })
    }

    /// Returns what the program finds in the word, which is also the state that an arrival returns.
    pub fn word(&self) -> u64 {
        0xb0a5 << 48 | u64::from(self.phase & 0xffff) << 32 | u64::from(self.at ^ 0x6d62_6172)
    }

    /// Counts arrivals. Returns whether the phase is complete.
    pub fn arrive(&mut self, count: u64) -> Result<bool, Fault> {
        if count == 0 || count > u64::from(self.pending) {
            let (pending, expected) = (self.pending, self.expected);
            return Err(wrong(
                self.at,
                format!(
                    "gets {count} arrivals, and its phase waits for {pending} of {expected}; initialize it for as many as arrive"
                ),
            ));
        }
        self.pending -= count as u32;
        Ok(self.advance())
    }

    /// Adds bytes that the phase waits for, or that have arrived if negative. Returns whether the phase is complete.
    pub fn expect(&mut self, bytes: i64) -> Result<bool, Fault> {
        self.bytes += bytes;
        if !(-MAX..=MAX).contains(&self.bytes) {
            return Err(wrong(
                self.at,
                format!(
                    "counts {} bytes under way, and its limit is {MAX}; expect as many bytes as the copies have",
                    self.bytes
                ),
            ));
        }
        Ok(self.advance())
    }

    fn advance(&mut self) -> bool {
        let complete = self.pending == 0 && self.bytes == 0;
        if complete {
            self.pending = self.expected;
            self.phase = self.phase.wrapping_add(1);
        }
        complete
    }

    /// Whether the phase of this parity is complete.
    pub fn parity_done(&self, parity: u64) -> Result<bool, Fault> {
        match parity {
            0 | 1 => Ok(u64::from(self.phase & 1) != parity),
            _ => Err(wrong(self.at, format!("is waited for with the parity {parity}; a parity is 0 or 1"))),
        }
    }

    /// Whether the phase of this state is complete.
    pub fn state_done(&self, state: u64) -> Result<bool, Fault> {
        let before = Self { phase: self.phase.wrapping_sub(1), ..*self };
        match state {
            _ if state == self.word() => Ok(false),
            _ if state == before.word() => Ok(true),
            _ => Err(wrong(
                self.at,
                "is waited for with a state that is neither of its current phase nor of the one before; pass what its last arrival returned",
            )),
        }
    }

    /// Checks that the mbarrier may be invalidated.
    pub fn end(&self) -> Result<(), Fault> {
        if self.bytes == 0 {
            return Ok(());
        }
        let cause = match self.bytes {
            bytes @ 1.. => format!("is invalidated while it waits for {bytes} bytes"),
            bytes => {
                format!("is invalidated, and copies of {} bytes arrived that it did not expect (expect_tx)", -bytes)
            }
        };
        Err(wrong(self.at, cause))
    }
}

/// A block's mbarriers.
#[derive(Debug, Default)]
pub struct Mbarriers(Vec<Mbarrier>);

impl Mbarriers {
    /// Adds an mbarrier, and writes its word.
    pub fn add(&mut self, new: Mbarrier, bytes: &mut [u8]) -> Result<(), Fault> {
        if self.get(new.at, bytes).is_ok() {
            return Err(wrong(new.at, "is initialized again; invalidate it first"));
        }
        self.remove(new.at);
        self.0.push(new);
        poke(&new, bytes);
        Ok(())
    }

    /// Finds an mbarrier, and checks that its word is intact.
    pub fn get(&mut self, at: u32, bytes: &[u8]) -> Result<&mut Mbarrier, Fault> {
        let Some(found) = self.0.iter_mut().find(|one| one.at == at) else {
            return Err(wrong(at, "is not initialized, or invalidated; begin with mbarrier.init"));
        };
        if bytes.get(at as usize..at as usize + 8) != Some(&found.word().to_le_bytes()) {
            return Err(wrong(
                at,
                "was overwritten by another instruction; invalidate it before its memory is used for something else",
            ));
        }
        Ok(found)
    }

    /// Changes an mbarrier. `change` returns whether a phase is complete.
    pub fn change(
        &mut self,
        at: u32,
        bytes: &mut [u8],
        change: impl FnOnce(&mut Mbarrier) -> Result<bool, Fault>,
    ) -> Result<bool, Fault> {
        let found = self.get(at, bytes)?;
        let complete = change(found)?;
        if complete {
            poke(found, bytes);
        }
        Ok(complete)
    }

    /// Returns an mbarrier's phase, or 0.
    pub fn phase(&self, at: u32) -> u32 {
        self.0.iter().find(|one| one.at == at).map_or(0, |one| one.phase)
    }

    pub fn remove(&mut self, at: u32) {
        self.0.retain(|one| one.at != at);
    }

    /// Makes all mbarriers visible to bulk copies.
    pub fn fence(&mut self) {
        self.0.iter_mut().for_each(|one| one.fenced = true);
    }
}

fn poke(one: &Mbarrier, bytes: &mut [u8]) {
    if let Some(word) = bytes.get_mut(one.at as usize..one.at as usize + 8) {
        word.copy_from_slice(&one.word().to_le_bytes());
    }
}
