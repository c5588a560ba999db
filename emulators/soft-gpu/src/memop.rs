//! Stream operations on words of memory (waits for a value, writes, and atomic reductions), and flushes of cards'
//! writes.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::code::{Code, Fault, Outcome};
use crate::context::{self, CONTEXTS};
use crate::device;
use crate::guard::{In, Out, log};
use crate::memfd;
use crate::space::{self, Running};
use crate::stream;

/// `CUstreamBatchMemOpParams`: the part that all operations share.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameters {
    operation: u32,
    /// The flags of an operation without an address.
    only_flags: u32,
    address: u64,
    value: u64,
    flags: u32,
    pad: u32,
    reserved: [u64; 2],
}

const _: () = assert!(size_of::<Parameters>() == 48);

/// `CUstreamBatchMemOpType`.
const WAIT_32: u32 = 1;
const WRITE_32: u32 = 2;
const FLUSH: u32 = 3;
const WAIT_64: u32 = 4;
const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;
const REDUCE: u32 = 8;
/// `CUstreamAtomicReductionDataType`.
const UNSIGNED_32: u32 = 14;
const UNSIGNED_64: u32 = 22;
/// `CU_STREAM_WAIT_VALUE_FLUSH`, which has no effect: cards' writes are always ordered with the words here.
const WAIT_AND_FLUSH: u32 = 1 << 30;
/// A call must have fewer operations than this.
const MAX_OPS: u32 = 256;
/// How long to sleep before polling a word again.
const PAUSE: Duration = Duration::from_micros(20);

/// Calls to cuFlushGPUDirectRDMAWrites, and stream reductions since the last one.
static FLUSHES: AtomicU64 = AtomicU64::new(0);
static REDUCED: AtomicU64 = AtomicU64::new(0);

/// The condition of a wait: `CUstreamWaitValue_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// At least the value, in wrapping arithmetic of the word's size.
    Reached,
    Equal,
    AnyBit,
    AnyBitClear,
}

impl Until {
    fn holds(self, now: u64, value: u64, wide: bool) -> bool {
        match self {
            Self::Reached if wide => now.wrapping_sub(value).cast_signed() >= 0,
            Self::Reached => (now as u32).wrapping_sub(value as u32).cast_signed() >= 0,
            Self::Equal => now == value,
            Self::AnyBit => now & value != 0,
            Self::AnyBitClear => !(now | value) & (if wide { u64::MAX } else { u64::from(u32::MAX) }) != 0,
        }
    }
}

/// `CUstreamAtomicReductionOpType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reduction {
    Add,
    And,
    Or,
}

enum Act {
    Wait(Until),
    Write,
    Reduce(Reduction),
}

struct Operation {
    act: Act,
    address: u64,
    value: u64,
    wide: bool,
}

impl Operation {
    /// Parses an operation; None for one that has no effect here. `newest` is false for the old version of the
    /// function.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    fn read(from: &Parameters, device: usize, newest: bool) -> Outcome<Option<Self>> {
        if from.operation == REDUCE && newest {
            if !device::reduces() {
                return Err(Code::NOT_SUPPORTED);
            }
            return Self::reduction(from).filter(|one| one.good(device)).map(Some).ok_or(Code::INVALID_VALUE);
        }
        let wide = [WAIT_64, WRITE_64].contains(&from.operation);
        let act = match (from.operation, from.flags) {
            (FLUSH, _) if from.only_flags == 0 => return Ok(None),
            (BARRIER, _) if newest && from.only_flags <= 1 => return Ok(None),
            (WAIT_32 | WAIT_64, flags) => Act::Wait(match flags & !WAIT_AND_FLUSH {
                0 => Until::Reached,
                1 => Until::Equal,
                2 => Until::AnyBit,
                3 => Until::AnyBitClear,
                _ => return Err(Code::INVALID_VALUE),
            }),
            (WRITE_32 | WRITE_64, 0) => Act::Write,
            // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
            (WRITE_32 | WRITE_64, 1) if !newest => Act::Write,
            _ => return Err(Code::INVALID_VALUE),
        };
        let value = if wide { from.value } else { u64::from(from.value as u32) };
        let operation = Self { act, address: from.address, value, wide };
        if operation.good(device) { Ok(Some(operation)) } else { Err(Code::INVALID_VALUE) }
    }

    /// Parses a reduction, whose layout differs: operation and type where the others have the address, then address and
    /// value.
    fn reduction(from: &Parameters) -> Option<Self> {
        let (reduction, kind) = (from.address as u32, (from.address >> 32) as u32);
        let reduction = match reduction {
            0 => Reduction::Add,
            5 => Reduction::And,
            6 => Reduction::Or,
            _ => return None,
        };
        let value = u64::from(from.flags) | u64::from(from.pad) << 32;
        let wide = kind == UNSIGNED_64;
        let good = from.only_flags == 0 && (wide || kind == UNSIGNED_32);
        good.then_some(Self { act: Act::Reduce(reduction), address: from.value, value, wide })
    }

    fn good(&self, device: usize) -> bool {
        self.address.is_multiple_of(self.size()) && self.allowed(device)
    }

    fn size(&self) -> u64 {
        if self.wide { 8 } else { 4 }
    }

    fn allowed(&self, device: usize) -> bool {
        space::allowed(device, self.address, self.size(), !matches!(self.act, Act::Wait(_)))
    }

    /// Performs the write or reduction, or checks once whether the wait is over. Returns true when done.
    fn step(&self, device: usize, fault: &Fault) -> bool {
        let _running = Running::begin();
        if !self.allowed(device) {
            log(format_args!(
                "an operation of a stream on the word at {:#x} found memory that was freed meanwhile",
                self.address
            ));
            fault.set(Code::ILLEGAL_ADDRESS);
            return true;
        }
        // SAFETY: `allowed` found the range, which stays mapped while this counts as running, and `read` checked the
        // alignment.
        let narrow = unsafe { AtomicU32::from_ptr(memfd::backing(self.address) as *mut u32) };
        // A narrow word may not be aligned for a wide access.
        let wide = self.wide.then(|| {
            // SAFETY: `allowed` found the range, which stays mapped while this counts as running, and `read` checked
            // the alignment.
            unsafe { AtomicU64::from_ptr(memfd::backing(self.address) as *mut u64) }
        });
        if let Act::Reduce(_) = self.act {
            REDUCED.fetch_add(1, Ordering::SeqCst);
        }
        match (&self.act, wide) {
            (Act::Write, Some(word)) => word.store(self.value, Ordering::SeqCst),
            (Act::Write, None) => narrow.store(self.value as u32, Ordering::SeqCst),
            (Act::Reduce(Reduction::Add), Some(word)) => drop(word.fetch_add(self.value, Ordering::SeqCst)),
            (Act::Reduce(Reduction::And), Some(word)) => drop(word.fetch_and(self.value, Ordering::SeqCst)),
            (Act::Reduce(Reduction::Or), Some(word)) => drop(word.fetch_or(self.value, Ordering::SeqCst)),
            (Act::Reduce(Reduction::Add), None) => drop(narrow.fetch_add(self.value as u32, Ordering::SeqCst)),
            (Act::Reduce(Reduction::And), None) => drop(narrow.fetch_and(self.value as u32, Ordering::SeqCst)),
            (Act::Reduce(Reduction::Or), None) => drop(narrow.fetch_or(self.value as u32, Ordering::SeqCst)),
            (Act::Wait(until), wide) => {
                let now =
                    wide.map_or_else(|| u64::from(narrow.load(Ordering::SeqCst)), |word| word.load(Ordering::SeqCst));
                return until.holds(now, self.value, self.wide);
            }
        }
        true
    }
}

fn give(handle: usize, all: &[Parameters], newest: bool) -> Outcome {
    let stream = stream::resolve(handle)?;
    let device = CONTEXTS.get(stream.context).ok_or(Code::CONTEXT_IS_DESTROYED)?.device;
    let operations = all.iter().filter_map(|one| Operation::read(one, device, newest).transpose());
    let operations = operations.collect::<Outcome<Vec<_>>>()?;
    stream.give(move |fault| {
        for operation in &operations {
            // A fault on another stream ends the wait: the value may never come.
            while fault.check().is_ok() && !operation.step(device, fault) {
                std::thread::sleep(PAUSE);
            }
        }
    });
    Ok(())
}

fn one(stream: usize, operation: u32, address: u64, value: u64, flags: u32, newest: bool) -> Outcome {
    let parameters = Parameters { operation, only_flags: 0, address, value, flags, pad: 0, reserved: [0; 2] };
    give(stream, &[parameters], newest)
}

fn batch(stream: usize, count: u32, all: In<Parameters>, flags: u32, newest: bool) -> Outcome {
    if count >= MAX_OPS || flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    give(stream, &all.list(count as usize)?, newest)
}

api! {
    cuStreamWaitValue32(stream: usize, address: u64, value: u32, flags: u32) {
        one(stream, WAIT_32, address, value.into(), flags, false)
    }

    cuStreamWaitValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        one(stream, WAIT_32, address, value.into(), flags, true)
    }

    cuStreamWaitValue64(stream: usize, address: u64, value: u64, flags: u32) {
        one(stream, WAIT_64, address, value, flags, false)
    }

    cuStreamWaitValue64_v2(stream: usize, address: u64, value: u64, flags: u32) {
        one(stream, WAIT_64, address, value, flags, true)
    }

    cuStreamWriteValue32(stream: usize, address: u64, value: u32, flags: u32) {
        one(stream, WRITE_32, address, value.into(), flags, false)
    }

    cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        one(stream, WRITE_32, address, value.into(), flags, true)
    }

    cuStreamWriteValue64(stream: usize, address: u64, value: u64, flags: u32) {
        one(stream, WRITE_64, address, value, flags, false)
    }

    cuStreamWriteValue64_v2(stream: usize, address: u64, value: u64, flags: u32) {
        one(stream, WRITE_64, address, value, flags, true)
    }

    cuStreamBatchMemOp(stream: usize, count: u32, all: In<Parameters>, flags: u32) {
        batch(stream, count, all, flags, false)
    }

    cuStreamBatchMemOp_v2(stream: usize, count: u32, all: In<Parameters>, flags: u32) {
        batch(stream, count, all, flags, true)
    }

    /// Counts the flush, and otherwise does nothing: all GPUs and the host see writes immediately.
    cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) {
        context::current()?;
        if !device::host_flushes() {
            return Err(Code::NOT_SUPPORTED);
        }
        if target != 0 || (scope != 100 && scope != 200) {
            return Err(Code::INVALID_VALUE);
        }
        FLUSHES.fetch_add(1, Ordering::SeqCst);
        REDUCED.store(0, Ordering::SeqCst);
        Ok(())
    }

    /// Returns the number of flushes by this process, and of stream reductions since the last one. NVIDIA's driver has
    /// no such function.
    cuSoftGpuFlushes(flushes: Out<u64>, reduced: Out<u64>) {
        flushes.set(FLUSHES.load(Ordering::SeqCst))?;
        reduced.set(REDUCED.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_compare_modulo_the_size_of_the_word() {
        assert!(Until::Reached.holds(2, u64::from(u32::MAX), false) && !Until::Reached.holds(1, 2, false));
        assert!(Until::Reached.holds(2, u64::MAX, true) && !Until::Reached.holds(2, u64::from(u32::MAX), true));
        assert!(Until::Equal.holds(7, 7, true) && !Until::Equal.holds(7, 8, true));
        assert!(Until::AnyBit.holds(6, 4, false) && !Until::AnyBit.holds(6, 1, false));
        assert!(Until::AnyBitClear.holds(0, 1, false) && !Until::AnyBitClear.holds(0xffff_0000, 0xffff, false));
    }
}
