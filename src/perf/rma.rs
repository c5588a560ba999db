//! Puts and signals between ranks 0 and 1 through the RMA plugin, called as NCCL's threads call it.

use super::error::Error;
use super::job::Job;
use super::operation::Operation;
use super::report::Row;
use super::settings::Iterations;
use super::statistics::mops;
use ferrogin_device::platform::clock_ns;
use mini_nccl::DeviceMemory;
use mini_nccl::rma::{Request, RmaComm, RmaContext, RmaMemory, RmaPlugin, Signal, Transfer};
use scenario_runner::world::plugin_from_env;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of the signal word, which comes after the bytes that a rank sends and those that its peer writes.
const WORD: usize = 8;

/// A rank's end, with host memory.
pub struct Rma {
    context: RmaContext,
    memory: RmaMemory,
    half: usize,
    rank: usize,
    limit: Duration,
    /// The peer's signals that this rank has waited for.
    heard: u64,
    requests: VecDeque<Request>,
}

impl Rma {
    /// Collective: connects all ranks through the plugin from `perf`'s own settings.
    ///
    /// # Errors
    /// The plugin fails; a rank was lost.
    pub fn open(job: &Job) -> Result<Self, Error> {
        let (rank, limit) = (job.rank(), job.wait_limit());
        let failed = |error: mini_nccl::Error| Error::Rma { rank, text: error.to_string() };
        let list = plugin_from_env();
        let path = list.split(',').find(|entry| entry.contains('/')).unwrap_or(&list);
        let plugin = RmaPlugin::load(path).map_err(failed)?;
        let comm = RmaComm::init(&plugin, job.bootstrap(), 0).map_err(failed)?;
        let half = (job.settings.end as usize).next_multiple_of(WORD);
        job.check_memory(2 * half as u64)?;
        let memory = Arc::new(DeviceMemory::alloc(2 * half + WORD).map_err(failed)?);
        let memory = comm.register(&memory, 0).map_err(failed)?;
        let context = comm.create_context(1).map_err(failed)?;
        comm.barrier().map_err(failed)?;
        Ok(Self { context, memory, half, rank, limit, heard: 0, requests: VecDeque::new() })
    }

    /// Collective: measures puts of `bytes`, or puts with a signal, one after another and then in a stream; rank 0 gets
    /// the figures.
    ///
    /// # Errors
    /// The plugin fails, or wrong data arrives; a rank was lost.
    pub fn measure(&mut self, job: &Job, operation: Operation, bytes: u64) -> Result<Option<Row>, Error> {
        let iterations = job.settings.iterations(bytes);
        let depth = job.settings.depth as usize;
        let (size, signals) = (bytes as usize, operation == Operation::RmaPutSignal);
        let own: Vec<u8> = (0..size).map(|at| (at as u64 % 251 + bytes) as u8).collect();
        self.memory.memory().write(0, &own);
        self.memory.memory().write(self.half, &vec![0; size]);
        job.barrier()?;
        let samples = if signals { self.round_trips(size, iterations)? } else { self.one_by_one(size, iterations)? };
        job.barrier()?;
        let time = self.stream(size, iterations.measured, depth, signals)?;
        if job.settings.verify && self.rank == 1 {
            let mut found = vec![0; size];
            self.memory.memory().read(self.half, &mut found);
            if let Some(at) = found.iter().zip(&own).position(|(found, sent)| found != sent) {
                return Err(job.wrong(operation, bytes, format!("byte {at} from rank 0")));
            }
        }
        job.barrier()?;
        let rate = mops(iterations.measured.into(), time.end - time.start);
        Ok((self.rank == 0).then(|| Row::new(operation, (bytes, 1), 1, samples, rate)))
    }

    fn failed(&self, error: &mini_nccl::Error) -> Error {
        Error::Rma { rank: self.rank, text: error.to_string() }
    }

    /// Starts a put to the pair's other rank.
    fn start(&mut self, size: usize, has_signal: bool) -> Result<(), Error> {
        let (here, there) = (self.memory.at(0), self.memory.at(self.half));
        let transfer = Transfer { context: 0, peer: 1 - self.rank, here, there, size, aggregate: false };
        let signal = Signal { word: self.memory.at(2 * self.half), value: 1, strong: true };
        let request = self.context.put(transfer, has_signal.then_some(signal)).map_err(|error| self.failed(&error))?;
        self.requests.push_back(request);
        Ok(())
    }

    /// Calls the plugin until `is_over`, as NCCL's thread does.
    fn poll(&mut self, what: &str, is_over: impl Fn(&Self) -> bool) -> Result<(), Error> {
        let began = Instant::now();
        for round in 1u32.. {
            while let Some(request) = self.requests.front() {
                if !self.context.test(request).map_err(|error| self.failed(&error))? {
                    break;
                }
                self.requests.pop_front();
            }
            if is_over(self) {
                break;
            }
            self.context.progress().map_err(|error| self.failed(&error))?;
            if round.is_multiple_of(64) {
                // The ranks may share a core.
                std::thread::yield_now();
                if began.elapsed() > self.limit {
                    let text = format!("{what} did not arrive within {} s", self.limit.as_secs());
                    return Err(Error::Rma { rank: self.rank, text });
                }
            }
        }
        Ok(())
    }

    /// Waits until all requests but `left` are done.
    fn finish(&mut self, left: usize) -> Result<(), Error> {
        self.poll("a completion", |this| this.requests.len() <= left)
    }

    /// Waits for `count` signals from the peer.
    fn hear(&mut self, count: u64) -> Result<(), Error> {
        self.heard += count;
        self.poll("the peer's signal", |this| this.memory.memory().load(2 * this.half) >= this.heard)
    }

    /// Times puts, each until its request is done. Rank 1 polls until rank 0 finishes.
    fn one_by_one(&mut self, size: usize, iterations: Iterations) -> Result<Vec<u64>, Error> {
        let mut samples = Vec::new();
        match self.rank {
            0 => {
                for round in 0..iterations.all() {
                    let begin = clock_ns();
                    self.start(size, false)?;
                    self.finish(0)?;
                    if round >= iterations.warmup {
                        samples.push(clock_ns().wrapping_sub(begin));
                    }
                }
                self.start(0, true)?;
                self.finish(0)?;
            }
            1 => self.hear(1)?,
            _ => {}
        }
        Ok(samples)
    }

    /// Times round trips; returns half of each time.
    fn round_trips(&mut self, size: usize, iterations: Iterations) -> Result<Vec<u64>, Error> {
        let mut samples = Vec::new();
        for round in 0..if self.rank < 2 { iterations.all() } else { 0 } {
            let begin = clock_ns();
            if self.rank == 0 {
                self.start(size, true)?;
                self.hear(1)?;
            } else {
                self.hear(1)?;
                self.start(size, true)?;
            }
            if round >= iterations.warmup {
                samples.push(clock_ns().wrapping_sub(begin) / 2);
            }
        }
        self.finish(0)?;
        Ok(samples)
    }

    /// Returns the start and end of `count` puts with `depth` in flight.
    fn stream(&mut self, size: usize, count: u32, depth: usize, signals: bool) -> Result<Range<u64>, Error> {
        let begin = clock_ns();
        match self.rank {
            0 => {
                for _ in 0..count {
                    self.start(size, signals)?;
                    self.finish(depth - 1)?;
                }
                self.finish(0)?;
                let end = clock_ns();
                self.start(0, true)?;
                self.finish(0)?;
                return Ok(begin..end);
            }
            1 => self.hear(u64::from(count) * u64::from(signals) + 1)?,
            _ => {}
        }
        Ok(begin..begin)
    }
}
