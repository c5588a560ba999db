//! The operations, and how each is measured.

use super::error::Error;
use super::operation::{Operation, barrier_rounds};
use super::report::Row;
use super::session::Session;
use super::statistics::mops;
use ferrogin_device::platform::clock_ns;
use ferrogin_device::{Action, Flags, Status};
use gpu_scenarios::timed::{self, VALUE_SLOTS, value, value_offset};

/// The signals of alltoall: blocks that arrived, and ranks that have read theirs.
const ARRIVED: u16 = 0;
const READ: u16 = 1;
/// Rounds in which a barrier is verified.
const VERIFIED_BARRIERS: u32 = 100;

/// Collective: measures one size; rank 0 gets the figures.
///
/// # Errors
/// An operation failed, data are wrong, or a rank was lost.
pub fn measure(session: &Session, operation: Operation, bytes: u64) -> Result<Option<Row>, Error> {
    if let Some(of_pair) = operation.of_pair() {
        return pairs(session, operation, of_pair, bytes);
    }
    let (warmup, iterations) = session.settings.iterations(bytes);
    let samples = match operation {
        Operation::Barrier => barrier(session, warmup, iterations)?,
        _ => alltoall(session, bytes, warmup, iterations)?,
    };
    let rate = mops(samples.len() as u64, samples.iter().sum());
    Ok((session.rank() == 0).then(|| Row::new(operation, (bytes, session.ranks() - 1), 1, samples, rate)))
}

/// Latencies, then the rate of a stream.
fn pairs(session: &Session, operation: Operation, of_pair: timed::Operation, bytes: u64) -> Result<Option<Row>, Error> {
    let first = session.rank() == 0;
    let polls = operation == Operation::PutValue;
    let counts @ (warmup, iterations) = session.settings.iterations(bytes);
    let samples = session.phase(
        polls,
        || {
            session.pairs(operation, bytes, |lane| {
                let mut samples = Vec::with_capacity(iterations as usize);
                lane.latencies(of_pair, first, counts, |latency| samples.push(latency))?;
                Ok(samples)
            })
        },
        || check_pairs(session, operation, bytes, warmup + iterations, false),
    )?;
    let samples = samples.concat();
    let threads = session.settings.threads;
    let posts = u64::from(iterations) * u64::from(threads);
    let nanoseconds = match operation {
        // The posts between flushes are no part of the operation, and so the threads' own times are its time.
        Operation::Flush => samples.iter().sum::<u64>() / u64::from(threads),
        _ => {
            let burst = session.settings.aggregate;
            let times = session.phase(
                polls,
                || session.pairs(operation, bytes, |lane| lane.stream(of_pair, first, counts, burst)),
                || check_pairs(session, operation, bytes, warmup + iterations, true),
            )?;
            let begin = times.iter().map(|time| time.start).min().unwrap_or(0);
            times.iter().map(|time| time.end).max().unwrap_or(0) - begin
        }
    };
    Ok(first.then(|| Row::new(operation, (bytes, 1), threads, samples, mops(posts, nanoseconds))))
}

/// Checks what ranks 0 and 1 received from each other in `rounds` round trips of each thread, or in a stream from rank 0.
fn check_pairs(session: &Session, operation: Operation, bytes: u64, rounds: u32, in_stream: bool) -> Result<(), Error> {
    let rank = session.rank();
    let receives = match operation {
        Operation::PutSignal | Operation::PutValue | Operation::Signal if !in_stream => rank <= 1,
        Operation::Get => rank == 0,
        _ => rank == 1,
    };
    if !receives {
        return Ok(());
    }
    for thread in 0..session.settings.threads {
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
        let count =
            session.device()?.read_signal(thread).map_err(|status| session.failed(operation.name(), bytes, status))?;
        if count != u64::from(signals) {
            return Err(session.wrong(operation, bytes, format!("signal {thread} is {count} and not {signals}")));
        }
    }
    Ok(())
}

/// Each word has the value of the last round that wrote it. The values of a stream arrive in any order, so it may be that of any.
fn check_values(session: &Session, bytes: u64, thread: u32, rounds: u32, in_stream: bool) -> Result<(), Error> {
    for slot in 0..rounds.min(VALUE_SLOTS) {
        let found = session.read(session.inbox(thread) + value_offset(slot), 8)?;
        let found = u64::from_le_bytes(found.try_into().unwrap_or_default());
        let last = slot + (rounds - 1 - slot) / VALUE_SLOTS * VALUE_SLOTS;
        let mut of_slot = (slot..rounds).step_by(VALUE_SLOTS as usize);
        let is_right =
            if in_stream { of_slot.any(|round| value(round, bytes) == found) } else { value(last, bytes) == found };
        if !is_right {
            return Err(session.wrong(Operation::PutValue, bytes, format!("value {slot} is {found:#x}")));
        }
    }
    Ok(())
}

/// A barrier of device code: in round r a rank signals the rank 2^r further and waits for the one 2^r before it.
/// `number` counts the barriers, from 1, because no signal is reset.
fn one_barrier(context: &ferrogin_device::Context<'_>, number: u64) -> Result<(), Status> {
    let (rank, ranks) = (context.rank(), context.nranks());
    for round in 0..barrier_rounds(ranks) {
        context.signal((rank + (1 << round)) % ranks, Action::signal_inc(round as u16), Flags::NONE)?;
        context.wait_signal(round, number)?;
    }
    Ok(())
}

fn barrier(session: &Session, warmup: u32, iterations: u32) -> Result<Vec<u64>, Error> {
    let failed = |status| session.failed(Operation::Barrier.name(), 0, status);
    let all = || {
        let context = session.device()?;
        let mut samples = Vec::with_capacity(iterations as usize);
        for number in 1..=warmup + iterations {
            let begin = clock_ns();
            one_barrier(&context, number.into()).map_err(failed)?;
            if number > warmup {
                samples.push(clock_ns().wrapping_sub(begin));
            }
        }
        context.flush().map_err(failed)?;
        Ok(samples)
    };
    let samples = session.phase(false, all, || Ok(()))?;
    if session.settings.verify {
        session.phase(true, || verified_barriers(session), || Ok(()))?;
    }
    Ok(samples)
}

/// Barriers after each of which the values that all ranks wrote before it must be there.
fn verified_barriers(session: &Session) -> Result<(), Error> {
    let failed = |status| session.failed(Operation::Barrier.name(), 0, status);
    let (context, ranks) = (session.device()?, session.ranks() as u64);
    for number in 1..=VERIFIED_BARRIERS {
        // Two places in turn, since a fast rank writes its next value while a slow rank still reads.
        let place = |rank: u64| session.inbox(0) + (u64::from(number % 2) * ranks + rank) * 8;
        for peer in 0..ranks {
            let to = session.window().at(place(session.rank() as u64));
            context.put_value(peer as u32, to, number.into(), 8, Action::NONE, Flags::NONE).map_err(failed)?;
        }
        context.flush().map_err(failed)?;
        one_barrier(&context, number.into()).map_err(failed)?;
        for rank in 0..ranks {
            let found = session.read(place(rank), 8)?;
            if found != u64::from(number).to_le_bytes() {
                let what = format!("the value of rank {rank} was late in barrier {number}");
                return Err(session.wrong(Operation::Barrier, 0, what));
            }
        }
    }
    context.flush().map_err(failed)
}

/// Each rank puts a block to each other rank. One signal counts the blocks that arrived, in any order, and another one the ranks that
/// have read theirs, so that no rank overwrites a block that is not read.
fn alltoall(session: &Session, bytes: u64, warmup: u32, iterations: u32) -> Result<Vec<u64>, Error> {
    let operation = Operation::Alltoall;
    let failed = |status| session.failed(operation.name(), bytes, status);
    let (rank, ranks) = (session.rank() as u32, session.ranks() as u32);
    let others = u64::from(ranks - 1);
    let all = || {
        let (context, window) = (session.device()?, session.window());
        let mut samples = Vec::with_capacity(iterations as usize);
        for round in 0..warmup + iterations {
            let begin = clock_ns();
            // Every rank begins with another peer, so that not all put to one rank at a time.
            let peers = (1..ranks).map(|distance| (rank + distance) % ranks);
            let exchange = || {
                context.wait_signal(READ.into(), u64::from(round) * others)?;
                for peer in peers.clone() {
                    let (to, from) = (window.at(session.inbox(rank)), window.at(session.outbox(peer)));
                    context.put(peer, to, from, bytes, Action::signal_inc(ARRIVED), Flags::NONE)?;
                }
                context.wait_signal(ARRIVED.into(), (u64::from(round) + 1) * others)?;
                peers.clone().try_for_each(|peer| context.signal(peer, Action::signal_inc(READ), Flags::NONE))?;
                context.flush()
            };
            exchange().map_err(failed)?;
            if round >= warmup {
                samples.push(clock_ns().wrapping_sub(begin));
            }
        }
        Ok(samples)
    };
    let check = || {
        let sources = (0..ranks).filter(|source| *source != rank);
        sources.into_iter().try_for_each(|source| session.check_inbox(operation, bytes, source, source as usize, rank))
    };
    session.phase(false, all, check)
}

#[cfg(test)]
mod tests {
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
