//! Measures the device code's operations: communicator, window and context, and the phases that all ranks begin
//! together.

use super::error::Error;
use super::job::Job;
use super::operation::Operation;
use super::settings::{Iterations, Settings};
use ferrogin::{Comm, Context, ContextOptions, Memory, Options, Window};
use scenario_runner::plan::{self, Api, Measured, Pattern, Plan, Program, Report, Spoil, Threads, Turn};
use scenario_runner::timed::VALUE_SLOTS;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes after each place in the window, which must stay 0.
const GUARD: u64 = 8;
/// Bytes that are written or compared at a time.
const CHUNK: u64 = 1 << 20;

/// Measures the device code's operations on a rank.
pub struct Session<'a> {
    // Dropped in this order.
    context: Context,
    window: Window,
    _comm: Comm,
    pub job: &'a Job,
    layout: Layout,
    /// Number of the last fill of the window: each fill has different bytes.
    fill: AtomicU64,
}

/// The places in a window: an inbox for each thread, or for each rank in alltoall, then as many outboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    places: u64,
    stride: u64,
}

impl Layout {
    /// Lays out the places. Those that don't fit in any address space get the largest size.
    fn new(settings: &Settings, ranks: usize) -> Self {
        let has = |operation| settings.operations.contains(&operation);
        let of_ranks = if has(Operation::Alltoall) { ranks as u64 } else { 0 };
        let places = of_ranks.max(settings.threads.into());
        let sizes = settings.operations.iter().flat_map(|operation| settings.sizes(*operation));
        // An inbox also holds a thread's values, and two values from each rank to verify a barrier.
        let largest = sizes.max().unwrap_or(0).max(u64::from(VALUE_SLOTS) * 8).max(16 * ranks as u64);
        let stride = largest.saturating_add(GUARD).checked_next_multiple_of(4096).unwrap_or(u64::MAX);
        Self { places, stride }
    }

    fn bytes(self) -> u64 {
        self.stride.saturating_mul(2 * self.places)
    }

    fn inbox(self, place: u32) -> u64 {
        u64::from(place) * self.stride
    }

    fn outbox(self, place: u32) -> u64 {
        (self.places + u64::from(place)) * self.stride
    }
}

impl<'a> Session<'a> {
    /// Collective: opens the host API.
    ///
    /// # Errors
    /// There is too little memory; the host API fails; a rank was lost.
    pub fn open(job: &'a Job) -> Result<Self, Error> {
        let (rank, ranks) = (job.rank(), job.ranks());
        let layout = Layout::new(&job.settings, ranks);
        job.check_memory(layout.bytes())?;
        let allgather = |block: &[u8]| Ok(job.bootstrap().allgather(block)?);
        let comm = Comm::open(rank, ranks, &Options::default(), allgather)?;
        let window = comm.allocate(layout.bytes() as usize, Memory::Device)?;
        let context = comm.context(&ContextOptions {
            signals: job.settings.signals(ranks),
            depth: job.settings.depth,
            ..Default::default()
        })?;
        let session = Self { context, window, _comm: comm, job, layout, fill: AtomicU64::new(0) };
        // Pages that were never written share one page of zeros, which would be read faster than data.
        session.fill_outboxes()?;
        session.clear_inboxes()?;
        Ok(session)
    }

    /// Returns the offset, in every window, of the inbox of a thread, or of a rank in alltoall.
    pub fn inbox(&self, place: u32) -> u64 {
        self.layout.inbox(place)
    }

    /// Returns the offset, in every window, of the outbox of a thread, or of a rank in alltoall.
    pub fn outbox(&self, place: u32) -> u64 {
        self.layout.outbox(place)
    }

    /// Collective: runs one phase of a measurement. Before it, signals are 0; inboxes are 0 with `--verify` or if the
    /// phase `polls` memory; and outboxes have new bytes with `--verify`. `body` runs on all ranks at once. When all
    /// are done, `check` verifies on each rank.
    ///
    /// # Errors
    /// `body` or `check` failed; a rank was lost. A rank that failed leaves the job, which ends the other ranks.
    pub fn phase<T>(
        &self,
        polls: bool,
        body: impl FnOnce() -> Result<T, Error>,
        check: impl FnOnce() -> Result<(), Error>,
    ) -> Result<T, Error> {
        if polls || self.job.settings.verify {
            self.clear_inboxes()?;
        }
        if self.job.settings.verify {
            self.fill_outboxes()?;
        }
        let signals = Measured { signals: self.job.settings.signals(self.job.ranks()), ..Measured::default() };
        self.run(
            "reset of the signals",
            &[Plan { measured: signals, ..self.plan(Program::ResetSignals, 0, Iterations::default()) }],
        )?;
        self.job.barrier()?;
        let result = body()?;
        self.context.check()?;
        self.job.barrier()?;
        if self.job.settings.verify {
            check()?;
            self.job.barrier()?;
        }
        Ok(result)
    }

    /// Returns the plan for a program with operations of `bytes`, and repeated as often as `iterations` says.
    pub fn plan(&self, program: Program, bytes: u64, iterations: Iterations) -> Plan {
        Plan {
            program,
            turn: Turn::First,
            pattern: Pattern::Ring,
            context_id: 0,
            handle: self.context.handle(),
            window: self.window.handle(),
            memory: self.window.address().cast(),
            rank: self.job.rank() as u32,
            nranks: self.job.ranks() as u32,
            reps: iterations.all(),
            burst: self.job.settings.aggregate,
            aggregate: 0,
            sharing: 0,
            lane: 0,
            lanes: 1,
            bytes: bytes as u32,
            warmup: iterations.warmup,
            threads: Threads::One,
            api: Api::Rust,
            deadline_ns: self.job.wait_limit().as_nanos() as u64,
            samples: std::ptr::null_mut(),
            measured: Measured {
                stride: self.layout.stride,
                from: self.outbox(0),
                inbox: self.inbox(0),
                ..Measured::default()
            },
            spoil: Spoil::default(),
        }
    }

    /// Returns the same for a thread of rank 0 or 1, which uses its own place and signal.
    pub fn plan_of_pair(
        &self,
        program: Program,
        operation: plan::Operation,
        bytes: u64,
        iterations: Iterations,
        thread: u32,
    ) -> Plan {
        let plan = self.plan(program, bytes, iterations);
        let (from, to) = (self.outbox(thread), self.inbox(thread));
        let measured = Measured { operation, raised: thread, awaited: thread, from, to, inbox: to, ..plan.measured };
        Plan { lane: thread, lanes: self.job.settings.threads, measured, ..plan }
    }

    /// Runs plans at once, on threads of this process or on the GPU.
    ///
    /// # Errors
    /// A program failed.
    pub fn run(&self, operation: &'static str, plans: &[Plan]) -> Result<Vec<Report>, Error> {
        let rank = self.job.rank();
        let reports = self.job.runner.run(plans).map_err(|text| Error::Gpu { rank, operation, text })?;
        let Some(failed) = reports.iter().find(|report| !report.passed()) else { return Ok(reports) };
        let bytes = plans.first().map_or(0, |plan| plan.bytes.into());
        Err(match failed.status() {
            Some(status) => Error::Operation { rank, operation, bytes, status },
            None => Error::WrongData { rank, operation, bytes, what: failed.describe(rank) },
        })
    }

    fn fill_outboxes(&self) -> Result<(), Error> {
        let fill = self.fill.fetch_add(1, Ordering::Relaxed) + 1;
        for place in 0..self.layout.places as u32 {
            let mut bytes = pattern(fill, self.job.rank(), place);
            self.chunks(self.layout.stride, |offset, len| {
                let chunk: Vec<u8> = bytes.by_ref().take(len as usize).collect();
                Ok(self.window.write((self.outbox(place) + offset) as usize, &chunk)?)
            })?;
        }
        Ok(())
    }

    fn clear_inboxes(&self) -> Result<(), Error> {
        let zeros = vec![0; CHUNK as usize];
        self.chunks(self.layout.places * self.layout.stride, |offset, len| {
            Ok(self.window.write(offset as usize, &zeros[..len as usize])?)
        })
    }

    /// Compares the inbox `place` with rank `from`'s outbox `of_place`, and checks that the bytes after it are 0.
    ///
    /// # Errors
    /// A byte differs.
    pub fn check_inbox(
        &self,
        operation: Operation,
        bytes: u64,
        place: u32,
        from: usize,
        of_place: u32,
    ) -> Result<(), Error> {
        let mut expected =
            pattern(self.fill.load(Ordering::Relaxed), from, of_place).take(bytes as usize).chain([0; GUARD as usize]);
        self.chunks(bytes + GUARD, |offset, len| {
            let found = self.read(self.inbox(place) + offset, len as usize)?;
            let wrong =
                found.iter().zip(expected.by_ref().take(len as usize)).position(|(found, expected)| *found != expected);
            wrong.map_or(Ok(()), |at| {
                Err(self.job.wrong(operation, bytes, format!("byte {} from rank {from}", offset + at as u64)))
            })
        })
    }

    /// Reads bytes of this rank's window.
    ///
    /// # Errors
    /// The host API fails.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        self.window.read(offset as usize, &mut bytes)?;
        Ok(bytes)
    }

    fn chunks(&self, len: u64, mut each: impl FnMut(u64, u64) -> Result<(), Error>) -> Result<(), Error> {
        (0..len).step_by(CHUNK as usize).try_for_each(|offset| each(offset, CHUNK.min(len - offset)))
    }
}

/// Returns an outbox's bytes, which differ between fills, ranks and places.
fn pattern(fill: u64, rank: usize, place: u32) -> impl Iterator<Item = u8> {
    let start = fill << 40 ^ (rank as u64) << 20 ^ u64::from(place);
    (0u64..).flat_map(move |word| {
        // splitmix64's finaliser: every bit of the result depends on every bit of the input.
        let mut z = start.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_fills_ranks_and_places_differ() {
        let bytes = |fill, rank, place| pattern(fill, rank, place).take(64).collect::<Vec<_>>();
        let all = [bytes(1, 0, 0), bytes(2, 0, 0), bytes(1, 1, 0), bytes(1, 0, 1)];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                assert!(a.iter().zip(b).filter(|(a, b)| a == b).count() < 8);
            }
        }
        assert!(bytes(1, 0, 0).iter().any(|byte| *byte != 0));
    }
}
