//! A communicator's windows, by the keys that peers' signals name them with, and how the signal proxy adds to their
//! words.
#![allow(unsafe_code)]

use crate::device::{Adds, Device, DeviceError};
use ferrogin_ffi::signals::Region;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// One of this rank's windows on one rail.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Its bytes, by the addresses that peers use, which are this process's.
    pub region: Region,
    /// How the signal proxy adds to its words.
    pub adds: Adds,
}

type ByKey = HashMap<(u32, u32), Window>;

/// The windows that are registered now, by rail and remote key.
#[derive(Debug, Default)]
pub struct Windows(RwLock<ByKey>);

impl Windows {
    /// Adds a window.
    pub fn add(&self, rail: u32, rkey: u32, window: Window) {
        self.0.write().insert((rail, rkey), window);
    }

    /// Removes windows. The signal proxy may still access their memory in its current round.
    pub fn remove(&self, keys: &[(u32, u32)]) {
        let mut windows = self.0.write();
        for key in keys {
            windows.remove(key);
        }
    }

    /// Finds a window that is currently registered. Its memory stays until the end of the signal proxy's round.
    pub fn find(&self, rail: u32, rkey: u32) -> Option<Window> {
        self.0.read().get(&(rail, rkey)).copied()
    }
}

/// A word that the signal proxy adds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// Its address: the GPU's, which is also this process's with [`Adds::Cpu`].
    pub address: u64,
    /// How to add to it.
    pub adds: Adds,
}

/// Makes the bytes that the card wrote before the round's completions visible, then adds in order, each in one step.
///
/// # Safety
/// Each word must be 8-byte aligned, and its memory must stay mapped until the end of the round.
///
/// # Errors
/// The GPU's driver fails. Words before the failing one may have been added to.
pub unsafe fn add_all(device: &dyn Device, adds: &[(Word, u64)]) -> Result<(), DeviceError> {
    if device.needs_flush() {
        device.flush_writes()?;
    }
    // Consecutive words that the driver adds to share one call.
    for run in adds.chunk_by(|(a, _), (b, _)| a.adds == b.adds) {
        match run[0].0.adds {
            adds @ (Adds::Stream | Adds::Copy) => {
                let words: Vec<_> = run.iter().map(|(word, amount)| (word.address, *amount)).collect();
                // SAFETY: this function's caller keeps the words mapped.
                unsafe { device.add(adds, &words) }?;
            }
            Adds::Mapped { distance } => {
                for (word, amount) in run {
                    // SAFETY: this function's caller keeps the word mapped for the CPU, too, and it's aligned.
                    unsafe { add_mapped(word.address.wrapping_add(distance) as *mut u64, *amount) };
                }
            }
            Adds::Cpu => {
                for (word, amount) in run {
                    // SAFETY: this function's caller keeps the word mapped, and it's aligned. Kernels access it
                    // atomically too.
                    let word = unsafe { AtomicU64::from_ptr(word.address as *mut u64) };
                    // Release: a waiter that acquires the new value sees everything that the completions up to it
                    // covered.
                    word.fetch_add(*amount, Ordering::Release);
                }
            }
        }
    }
    Ok(())
}

/// Adds to a word of a GPU behind PCIe, which has no atomic operations for the CPU.
///
/// # Safety
/// The word must be aligned, and mapped for the CPU.
unsafe fn add_mapped(word: *mut u64, amount: u64) {
    // SAFETY: this function's caller keeps the word mapped. No Rust reference covers it.
    let sum = unsafe { word.read_volatile() }.wrapping_add(amount);
    // SAFETY: as above.
    unsafe { word.write_volatile(sum) };
    // The mapping combines writes. The fence makes this one leave the CPU before the next word is read or written.
    fence(Ordering::SeqCst);
}
