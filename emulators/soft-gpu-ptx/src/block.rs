//! A running block: its threads, their barriers, and what they wait for.

use crate::bulk::Shared;
use crate::code::{ALWAYS, Op, Scope, Vote};
use crate::core::{Core, Fault};
use crate::error::TrapKind;
use crate::thread::{Place, State, Thread};

/// A block's barrier.
#[derive(Clone, Copy, Debug, Default)]
struct Barrier {
    arrived: u32,
    expected: u32,
    /// The number of true predicates, for a reduction.
    yes: u32,
    waiting: u32,
}

/// A running block.
pub struct Block {
    pub place: Place,
    pub threads: Vec<Thread>,
    pub shared: Shared,
    barriers: [Barrier; 16],
    /// The lanes of each warp that have exited.
    pub ended: Vec<u32>,
    pub live: u32,
    /// Threads that aren't waiting.
    pub ready: u32,
}

impl Block {
    /// Makes a block whose threads are all ready. With `tracks`, bulk copies see its stores late.
    pub fn new(place: Place, threads: Vec<Thread>, tracks: bool) -> Self {
        let live = threads.len() as u32;
        Self {
            ended: vec![0; live.div_ceil(32) as usize],
            threads,
            shared: Shared::new(place.shared, tracks),
            barriers: [Barrier::default(); 16],
            live,
            ready: live,
            place,
        }
    }

    /// Returns a warp's threads.
    pub fn warp(&self, warp: u32) -> &[Thread] {
        let first = warp as usize * 32;
        &self.threads[first..self.threads.len().min(first + 32)]
    }

    /// Fails if all live lanes of a warp wait for each other, with masks that don't match.
    pub fn warp_stuck(&self, warp: u32, core: &Core<'_>) -> Result<(), Fault> {
        if self.warp(warp).iter().any(|thread| !matches!(thread.state, State::Warp(_) | State::Ended)) {
            return Ok(());
        }
        let mut cause = String::from("no lane of the warp can continue:");
        for thread in self.warp(warp) {
            if let State::Warp(mask) = thread.state {
                let line = core.program.line(thread.position());
                cause += &format!(" lane {} waits in line {line} with the mask {mask:#010x};", thread.lane());
            }
        }
        cause += " all lanes of a mask must arrive with the same mask";
        Err(Fault::new(TrapKind::Convergence, cause))
    }

    /// Fails if no thread of the block can continue.
    pub fn stuck(&self, core: &Core<'_>) -> Result<(), Fault> {
        if self.ready > 0 || self.live == 0 {
            return Ok(());
        }
        let mut cause = String::from("no thread of the block can continue:");
        for (number, barrier) in self.barriers.iter().enumerate().filter(|(_, barrier)| barrier.arrived > 0) {
            cause += &format!(
                " barrier {number} waits for {} threads, and {} have arrived;",
                barrier.expected, barrier.arrived
            );
        }
        for (state, what) in [(true, "a warp instruction"), (false, "a barrier")] {
            let waits = |thread: &&Thread| match thread.state {
                State::Warp(_) => state,
                State::Barrier(_) => !state,
                _ => false,
            };
            let count = self.threads.iter().filter(waits).count();
            if let Some(thread) = self.threads.iter().find(waits) {
                let mask = if let State::Warp(mask) = thread.state {
                    format!(" with the mask {mask:#010x}")
                } else {
                    String::new()
                };
                let line = core.program.line(thread.position());
                cause += &format!(" {count} threads wait at {what}, thread {} in line {line}{mask};", thread.index);
            }
        }
        let ended = self.threads.len() as u32 - self.live;
        cause += &format!(" {ended} threads have exited. All threads of a mask or a barrier have to arrive");
        Err(Fault::new(TrapKind::Convergence, cause))
    }

    /// Handles a thread's arrival at one of the block's barriers.
    pub fn arrive(&mut self, index: usize, core: &mut Core<'_>, woken: &mut Vec<u32>) -> Result<(), Fault> {
        let thread = &self.threads[index];
        let i = thread.instruction(core.program);
        let Op::Barrier { arrive, reduce } = i.op else { return Ok(()) };
        let wrong = |cause: String| Err(Fault::new(TrapKind::Convergence, cause));
        let number = thread.slot(i.a);
        if number > 15 {
            return wrong(format!("barrier {number}; a block has the barriers 0 to 15"));
        }
        let all = self.threads.len() as u64;
        let mut expected = all;
        if i.b != ALWAYS {
            let asked = thread.slot(i.b);
            if asked == 0 || !asked.is_multiple_of(32) || asked > all.next_multiple_of(32) {
                return wrong(format!(
                    "barrier {number} for {asked} threads; a barrier is for a multiple of 32 threads, and the block has {all}"
                ));
            }
            expected = asked.min(all);
        }
        let yes = reduce.is_some() && (thread.slot(i.c) != 0) != (i.imm != 0);
        if let Some(observer) = &mut core.observer {
            observer.arrive(self.who(index as u32), number as u32, !arrive);
        }
        let barrier = &mut self.barriers[number as usize];
        if barrier.arrived > 0 && u64::from(barrier.expected) != expected {
            let other = barrier.expected;
            return wrong(format!(
                "barrier {number} for {expected} threads; other threads wait for {other} at the same barrier"
            ));
        }
        barrier.expected = expected as u32;
        barrier.arrived += 1;
        barrier.yes += u32::from(yes);
        if core.weak.is_some() {
            self.threads[index].buffer().release(core, Scope::Block)?;
        }
        if arrive {
            self.threads[index].proceed();
            woken.push(index as u32);
        } else {
            barrier.waiting += 1;
            self.threads[index].state = State::Barrier(number as u32);
        }
        let Barrier { arrived, expected, yes, waiting } = self.barriers[number as usize];
        if arrived < expected {
            return Ok(());
        }
        self.barriers[number as usize] = Barrier::default();
        self.shared.order();
        if let Some(observer) = &mut core.observer {
            observer.barrier(self.place.number(), number as u32);
        }
        if waiting == 0 {
            return Ok(());
        }
        for thread in &mut self.threads {
            if thread.state != State::Barrier(number as u32) {
                continue;
            }
            let i = thread.instruction(core.program);
            if let Op::Barrier { reduce: Some(reduce), .. } = i.op {
                let value = match reduce {
                    Vote::All => u32::from(yes == expected),
                    Vote::Any => u32::from(yes > 0),
                    _ => yes,
                };
                thread.set_slot(i.d, u64::from(value));
            }
            if let Some(buffer) = &mut thread.buffer {
                buffer.acquire(Scope::Block);
            }
            thread.proceed();
            woken.push(thread.index);
        }
        Ok(())
    }

    /// Whether all lanes of the warp are at an `activemask`, waiting, or have exited.
    pub fn all_gathered(&self, index: usize) -> bool {
        self.warp(index as u32 / 32).iter().all(|thread| thread.state != State::Running)
    }

    /// Completes an `activemask`: the active lanes are those at the same one.
    pub fn gather(&mut self, index: usize, core: &Core<'_>) {
        let at = self.threads[index].position();
        let first = index / 32 * 32;
        let last = self.threads.len().min(first + 32);
        let gathered = |thread: &Thread| matches!(thread.state, State::Gather(_)) && thread.position() == at;
        let mask = (first..last)
            .filter(|&other| gathered(&self.threads[other]))
            .fold(0u32, |mask, other| mask | 1 << (other - first));
        for thread in &mut self.threads[first..last] {
            if mask >> thread.lane() & 1 == 1 {
                let i = thread.instruction(core.program);
                thread.set_slot(i.d, u64::from(mask));
                thread.proceed();
            }
        }
    }
}
