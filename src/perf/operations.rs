//! How each operation is measured.

use super::error::Error;
use super::operation::Operation;
use super::report::Row;
use super::session::Session;
use super::settings::Iterations;
use super::statistics::mops;
use scenario_runner::plan::{self, Measured, Plan, Program};
use scenario_runner::timed::{VALUE_SLOTS, value, value_offset};

/// Rounds that verify a barrier.
const VERIFIED_BARRIERS: u32 = 100;

/// Collective: measures one size; rank 0 gets the figures.
///
/// # Errors
/// An operation failed, data is wrong, or a rank was lost.
pub fn measure(session: &Session, operation: Operation, bytes: u64) -> Result<Option<Row>, Error> {
    if let Some(of_pair) = operation.of_pair() {
        return pairs(session, operation, of_pair, bytes);
    }
    let samples = match operation {
        Operation::Barrier => barrier(session)?,
        _ => alltoall(session, bytes)?,
    };
    let rate = mops(samples.len() as u64, samples.iter().sum());
    Ok((session.job.rank() == 0).then(|| Row::new(operation, (bytes, session.job.ranks() - 1), 1, samples, rate)))
}

/// Measures latencies, then the rate of a stream.
fn pairs(session: &Session, operation: Operation, of_pair: plan::Operation, bytes: u64) -> Result<Option<Row>, Error> {
    let first = session.job.rank() == 0;
    let polls = operation == Operation::PutValue;
    let iterations = session.job.settings.iterations(bytes);
    let threads = session.job.settings.threads;
    let plan = |program| move |thread| session.plan_of_pair(program, of_pair, bytes, iterations, thread);
    let run = |plans: Vec<Plan>| match session.job.rank() {
        0 | 1 => session.run(operation.name(), &plans),
        _ => Ok(Vec::new()),
    };
    let mut samples = vec![0; iterations.measured as usize * threads as usize];
    let places = samples.chunks_exact_mut(iterations.measured as usize);
    let plans = (0..threads).map(plan(Program::Latency)).zip(places);
    let plans = plans.map(|(plan, place)| Plan { samples: place.as_mut_ptr(), ..plan }).collect();
    let check = |in_stream| check_pairs(session, operation, bytes, iterations.all(), in_stream);
    session.phase(polls, || run(plans), || check(false))?;
    let posts = u64::from(iterations.measured) * u64::from(threads);
    let nanoseconds = match operation {
        // The posts between flushes are not part of the operation, so its time is the sum of the flushes' own times.
        Operation::Flush => samples.iter().sum::<u64>() / u64::from(threads),
        _ => {
            let plans = (0..threads).map(plan(Program::Stream)).collect();
            let reports = session.phase(polls, || run(plans), || check(true))?;
            let begin = reports.iter().map(|report| report.began).min().unwrap_or(0);
            reports.iter().map(|report| report.began + report.measured).max().unwrap_or(0) - begin
        }
    };
    Ok(first.then(|| Row::new(operation, (bytes, 1), threads, samples, mops(posts, nanoseconds))))
}

/// Checks what ranks 0 and 1 received from each other in `rounds` round trips of each thread, or in a stream from rank
/// 0.
fn check_pairs(session: &Session, operation: Operation, bytes: u64, rounds: u32, in_stream: bool) -> Result<(), Error> {
    let rank = session.job.rank();
    let receives = match operation {
        Operation::PutSignal | Operation::PutValue | Operation::Signal if !in_stream => rank <= 1,
        Operation::Get => rank == 0,
        _ => rank == 1,
    };
    if !receives {
        return Ok(());
    }
    for thread in 0..session.job.settings.threads {
        match operation {
            Operation::Signal => {}
            Operation::PutValue => check_values(session, bytes, thread, rounds, in_stream)?,
            _ => session.check_inbox(operation, bytes, thread, 1 - rank, thread)?,
        }
        let signals = match operation {
            Operation::PutSignal | Operation::Signal => rounds,
            Operation::PutValue if in_stream => rounds,
            _ => continue,
        };
        let plan = session.plan(Program::ReadSignal, bytes, Iterations::default());
        let measured = Measured { awaited: thread, ..plan.measured };
        let reports = session.run(operation.name(), &[Plan { measured, ..plan }])?;
        let count = reports.first().map_or(0, |report| report.measured);
        if count != u64::from(signals) {
            return Err(session.job.wrong(operation, bytes, format!("signal {thread} is {count} and not {signals}")));
        }
    }
    Ok(())
}

/// Checks that each word has the value of the last round that wrote it. A stream's values arrive in any order, so there
/// it may be any round's.
fn check_values(session: &Session, bytes: u64, thread: u32, rounds: u32, in_stream: bool) -> Result<(), Error> {
    for slot in 0..rounds.min(VALUE_SLOTS) {
        let found = session.read(session.inbox(thread) + value_offset(slot), 8)?;
        let found = u64::from_le_bytes(found.try_into().unwrap_or_default());
        let last = slot + (rounds - 1 - slot) / VALUE_SLOTS * VALUE_SLOTS;
        let mut of_slot = (slot..rounds).step_by(VALUE_SLOTS as usize);
        let is_right =
            if in_stream { of_slot.any(|round| value(round, bytes) == found) } else { value(last, bytes) == found };
        if !is_right {
            return Err(session.job.wrong(Operation::PutValue, bytes, format!("value {slot} is {found:#x}")));
        }
    }
    Ok(())
}

/// Times an operation of all ranks; `check` verifies its data.
fn of_all_ranks(
    session: &Session,
    operation: Operation,
    program: Program,
    bytes: u64,
    check: impl FnOnce() -> Result<(), Error>,
) -> Result<Vec<u64>, Error> {
    let iterations = session.job.settings.iterations(bytes);
    let mut samples = vec![0; iterations.measured as usize];
    let plan = Plan { samples: samples.as_mut_ptr(), ..session.plan(program, bytes, iterations) };
    session.phase(false, || session.run(operation.name(), &[plan]), check)?;
    Ok(samples)
}

fn barrier(session: &Session) -> Result<Vec<u64>, Error> {
    let samples = of_all_ranks(session, Operation::Barrier, Program::Barrier, 0, || Ok(()))?;
    if session.job.settings.verify {
        let plan = session.plan(Program::BarrierOfValues, 0, Iterations { warmup: 0, measured: VERIFIED_BARRIERS });
        session.phase(true, || session.run(Operation::Barrier.name(), &[plan]), || Ok(()))?;
    }
    Ok(samples)
}

fn alltoall(session: &Session, bytes: u64) -> Result<Vec<u64>, Error> {
    let (rank, ranks) = (session.job.rank() as u32, session.job.ranks() as u32);
    let operation = Operation::Alltoall;
    let check = || {
        let mut sources = (0..ranks).filter(|source| *source != rank);
        sources.try_for_each(|source| session.check_inbox(operation, bytes, source, source as usize, rank))
    };
    of_all_ranks(session, operation, Program::AllToAll, bytes, check)
}

#[cfg(test)]
mod tests {
    use super::super::operation::barrier_rounds;
    use super::*;

    #[test]
    fn barrier_reaches_all_ranks() {
        assert_eq!([2, 3, 4, 5, 64].map(barrier_rounds), [1, 2, 2, 3, 6]);
    }

    #[test]
    fn names_are_those_of_reports() {
        for operation in Operation::ALL {
            assert_eq!(serde_json::to_value(operation).unwrap(), operation.name());
        }
    }
}
