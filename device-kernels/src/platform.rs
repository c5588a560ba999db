//! What depends on the processor: a clock, and the pause in a wait.

/// Rounds of a wait for which a CPU thread keeps the processor.
#[cfg(all(feature = "host", not(loom)))]
const SPINS: u32 = 32;
/// The same, while each round makes progress for a software card, which takes much longer.
#[cfg(all(feature = "host", not(loom)))]
const PROGRESS_SPINS: u32 = 8;
/// Rounds after which a CPU thread sleeps.
#[cfg(all(feature = "host", not(loom)))]
const YIELDS: u32 = 2_000;

/// Returns nanoseconds from a clock that never goes back.
#[cfg(feature = "host")]
pub fn clock_ns() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Returns nanoseconds from a clock that never goes back.
#[cfg(all(not(feature = "host"), target_arch = "nvptx64"))]
pub fn clock_ns() -> u64 {
    let now: u64;
    // SAFETY: reads a special register and touches no memory.
    unsafe { core::arch::asm!("mov.u64 {0}, %globaltimer;", out(reg64) now, options(nomem, nostack)) };
    now
}

/// Returns cycles of the clock that NCCL's device API measures time with; nanoseconds on a CPU.
#[cfg(feature = "host")]
pub use clock_ns as clock_cycles;

/// Returns cycles of the clock that NCCL's device API measures time with.
#[cfg(all(not(feature = "host"), target_arch = "nvptx64"))]
pub fn clock_cycles() -> u64 {
    let now: u64;
    // SAFETY: reads a special register and touches no memory.
    unsafe { core::arch::asm!("mov.u64 {0}, %clock64;", out(reg64) now, options(nomem, nostack)) };
    now
}

/// Pauses briefly. `round` counts the calls in one wait; `progress` lets a software card work in this thread, and
/// returns false if no card needs it.
///
/// The card's engine and the peers may need the processor that this thread spins on. So a CPU thread spins briefly,
/// then yields, and sleeps when neither has helped: yielding alone collapses when neighbours are busy. After that,
/// progress is left to the card's engine.
#[cfg(all(feature = "host", not(loom)))]
#[inline]
pub fn relax(round: u32, progress: impl FnOnce() -> bool) {
    match pause(round, progress) {
        Pause::Spin => core::hint::spin_loop(),
        Pause::Yield => std::thread::yield_now(),
        Pause::Sleep => std::thread::sleep(std::time::Duration::from_micros(20)),
    }
}

/// What a CPU thread does in a round of a wait.
#[cfg(all(feature = "host", not(loom)))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    Spin,
    Yield,
    Sleep,
}

/// Makes progress, unless it's time to sleep, and chooses the pause.
#[cfg(all(feature = "host", not(loom)))]
#[inline]
fn pause(round: u32, progress: impl FnOnce() -> bool) -> Pause {
    if round >= YIELDS {
        Pause::Sleep
    } else if round < if progress() { PROGRESS_SPINS } else { SPINS } {
        Pause::Spin
    } else {
        Pause::Yield
    }
}

/// Pauses briefly. A GPU has no software card to drive.
#[cfg(all(not(feature = "host"), target_arch = "nvptx64"))]
#[inline(always)]
pub fn relax(_round: u32, _progress: impl FnOnce() -> bool) {
    // SAFETY: suspends this thread for up to 64 ns and touches no memory.
    unsafe { core::arch::asm!("nanosleep.u32 32;", options(nomem, nostack)) };
}

/// Lets another thread of the model run.
#[cfg(loom)]
pub fn relax(_round: u32, _progress: impl FnOnce() -> bool) {
    loom::thread::yield_now();
}

/// Returns the word, in a form that a GPU compiler keeps in a register instead of computing it again.
#[inline(always)]
pub fn kept(word: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    let word = {
        let kept: u32;
        // SAFETY: copies a register.
        unsafe { core::arch::asm!("mov.b32 {0}, {1};", out(reg32) kept, in(reg32) word, options(nomem, nostack)) };
        kept
    };
    word
}

/// Returns the number, in a form that the assembler doesn't take for uniform across the warp.
///
/// To add one constant to one word, ptxas makes a warp elect a leader that adds for all lanes: 17 instructions and two
/// shuffles that are useless to a post by one thread. And what depends only on a kernel's arguments, ptxas computes in
/// the warp's uniform registers and moves to the thread's for each load: 40 instructions a post.
#[inline(always)]
pub fn thread_value(number: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    let number = {
        let lanes_before: u32;
        // SAFETY: reads a special register and touches no memory.
        unsafe {
            core::arch::asm!("mov.u32 {0}, %lanemask_lt;", out(reg32) lanes_before, options(pure, nomem, nostack))
        };
        // Adds 0, as no lane comes after lane 31.
        number + (lanes_before >> 31)
    };
    number
}

#[cfg(all(test, feature = "host", not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn wait_makes_progress_until_it_sleeps() {
        for useful in [false, true] {
            let spins = if useful { PROGRESS_SPINS } else { SPINS };
            for (round, expected) in
                [(0, Pause::Spin), (spins - 1, Pause::Spin), (spins, Pause::Yield), (YIELDS - 1, Pause::Yield)]
            {
                let mut calls = 0;
                let pause = pause(round, || {
                    calls += 1;
                    useful
                });
                assert_eq!((pause, calls), (expected, 1), "round {round}");
            }
            assert_eq!(pause(YIELDS, || panic!("the engine makes progress")), Pause::Sleep);
        }
    }
}
