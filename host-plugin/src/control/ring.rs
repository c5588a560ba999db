//! The ring of ranks, and its allgather.

use super::error::ControlError;
use super::frame::{Frame, FrameKind};
use super::neighbors::{Deadline, Event, Neighbors, RankAddresses, unexpected};
use super::step::Step;
use super::time_limits::allgather_limit;
use crate::trace::{self, Span};
use std::time::Duration;

/// Largest block of an allgather, far above any that set-up makes.
pub(super) const BLOCK_MAX: usize = 256 << 20;

/// The messages of an allgather that a rank sent, as many as it received, and their bytes.
#[derive(Debug, Default)]
struct Traffic {
    messages: u64,
    sent: u64,
    received: u64,
}

impl Traffic {
    fn note(&self, span: &mut Span) {
        span.note("messages", self.messages);
        span.note("bytes_sent", self.sent);
        span.note("bytes_received", self.received);
    }
}

/// One rank's place in the ring.
#[derive(Debug)]
pub struct Ring {
    pub(super) rank: usize,
    pub(super) addresses: RankAddresses,
    pub(super) timeout: Duration,
    /// `None` in a ring of one rank.
    pub(super) neighbors: Option<Neighbors>,
    /// Allgathers so far.
    pub(super) sequence: u32,
    /// The rank whose failure ended the ring, once one did.
    pub(super) failed: Option<usize>,
}

impl Ring {
    /// Ranks in the ring.
    pub fn nranks(&self) -> usize {
        self.addresses.len()
    }

    pub(super) fn next(&self) -> usize {
        (self.rank + 1) % self.nranks()
    }

    pub(super) fn prev(&self) -> usize {
        (self.rank + self.nranks() - 1) % self.nranks()
    }

    /// Each rank contributes a block of any size and receives the blocks of all ranks, by rank. `None` means that this rank
    /// could not do its part: each rank gets [`ControlError::PeerFailed`], and the ring stays usable.
    ///
    /// # Errors
    /// A rank failed, ended or made another call. The ring is unusable after any error other than `PeerFailed`.
    pub fn allgather(&mut self, step: Step, block: Option<&[u8]>) -> Result<Vec<Vec<u8>>, ControlError> {
        if let Some(failed) = self.failed {
            return Err(ControlError::AlreadyFailed { failed });
        }
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        let mut traffic = Traffic::default();
        let mut span = trace::span(step.trace_name(), self.rank);
        let exchanged = self.exchange(step, sequence, block, &mut traffic);
        traffic.note(&mut span);
        drop(span);
        match exchanged {
            Ok(blocks) => match blocks.iter().position(Option::is_none) {
                None => Ok(blocks.into_iter().flatten().collect()),
                Some(rank) => Err(ControlError::PeerFailed { rank, step }),
            },
            Err(error) => {
                let failed = error.failed_rank().unwrap_or(self.rank);
                self.failed = Some(failed);
                if let Some(neighbors) = &mut self.neighbors {
                    neighbors.send_abort(step, sequence, failed, &error);
                }
                Err(error)
            }
        }
    }

    fn exchange(
        &mut self,
        step: Step,
        sequence: u32,
        own: Option<&[u8]>,
        traffic: &mut Traffic,
    ) -> Result<Vec<Option<Vec<u8>>>, ControlError> {
        let n = self.nranks();
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; n];
        blocks[self.rank] = own.map(<[u8]>::to_vec);
        let deadline = Deadline::after(allgather_limit(n, self.timeout));
        for round in 0..n - 1 {
            let out = (self.rank + n - round) % n;
            let incoming = (self.rank + n - round - 1) % n;
            let last = round == n - 2;
            let block = blocks[out].as_deref();
            let sent = block.map_or(0, <[u8]>::len);
            blocks[incoming] = self.exchange_block(step, sequence, (out, block), (incoming, last), &deadline)?;
            let received = blocks[incoming].as_ref().map_or(0, Vec::len);
            traffic.messages += 1;
            traffic.sent += (Frame::HEAD + sent) as u64;
            traffic.received += (Frame::HEAD + received) as u64;
        }
        Ok(blocks)
    }

    /// Sends the block of rank `out` to the next rank while it receives the block of rank `incoming` from the previous one.
    fn exchange_block(
        &mut self,
        step: Step,
        sequence: u32,
        (out, block): (usize, Option<&[u8]>),
        (incoming, last): (usize, bool),
        deadline: &Deadline,
    ) -> Result<Option<Vec<u8>>, ControlError> {
        let (next, prev) = (self.next(), self.prev());
        let Some(neighbors) = self.neighbors.as_mut() else {
            return Err(ControlError::AlreadyFailed { failed: self.rank });
        };
        let kind = if block.is_some() { FrameKind::Block } else { FrameKind::Failed };
        let body = block.unwrap_or_default();
        if body.len() > BLOCK_MAX {
            return Err(ControlError::BlockTooLarge { bytes: body.len(), limit: BLOCK_MAX, step });
        }
        let head = Frame { kind, step: step as u16, sequence, origin: out as u32, len: body.len() as u32 };
        // A neighbour that failed in a later allgather has done its part of the ones before.
        if let Some((head, rank)) = neighbors.later_abort.take_if(|(head, _)| !is_later(head.sequence, sequence)) {
            return Err(unexpected(Some(head), rank, step));
        }
        if neighbors.next_refuses || neighbors.next_end.is_some() {
            return Err(neighbors.refusal((prev, next), &self.addresses, step));
        }
        neighbors.write_next(head.emit(body));
        let mut written = false;
        let mut arrived = neighbors.early.pop_front();
        while !written || arrived.is_none() {
            if let (None, Some(end)) = (&arrived, &neighbors.prev_end) {
                return Err(self.addresses.closed(prev, step, end));
            }
            // The next rank takes a block in each round. The other ranks need the report of its end from this side too, as its own next
            // rank may be late.
            if !last && neighbors.next_end.is_some() {
                return Err(neighbors.refusal((prev, next), &self.addresses, step));
            }
            let Some(event) = neighbors.wait(deadline) else {
                if let Some((head, rank)) = neighbors.later_abort.take() {
                    return Err(unexpected(Some(head), rank, step));
                }
                // Each block passes all ranks in turn, so the missing block names the rank that did not send it.
                let rank = if arrived.is_some() { next } else { incoming };
                return Err(self.addresses.timed_out(rank, step, allgather_limit(self.nranks(), self.timeout)));
            };
            match event {
                Event::Written(Ok(())) => written = true,
                // The next rank may close after the last block, before its acknowledgement arrives. If it failed instead, the
                // next allgather reports it.
                Event::Written(Err(_)) if last => {
                    neighbors.next_refuses = true;
                    written = true;
                }
                Event::Written(Err(_)) => return Err(neighbors.refusal((prev, next), &self.addresses, step)),
                Event::Received(side, Ok(bytes)) => match Frame::parse(&bytes) {
                    Some((Frame { kind: FrameKind::Block | FrameKind::Failed, .. }, _)) if side.is_prev() => {
                        if arrived.is_none() {
                            arrived = Some(bytes);
                        } else {
                            neighbors.early.push_back(bytes);
                        }
                    }
                    Some((head, _)) if head.is_abort() && is_later(head.sequence, sequence) => {
                        neighbors.keep_later_abort(head, side, if side.is_prev() { prev } else { next });
                    }
                    other => {
                        let rank = if side.is_prev() { prev } else { next };
                        return Err(unexpected(other.map(|(head, _)| head), rank, step));
                    }
                },
                // A neighbour that is done may close: only a frame that is still needed makes its end an error.
                Event::Received(side, Err(end)) => neighbors.ended(side, &end),
                Event::Connected(_) | Event::Accepted(_) => {}
            }
        }
        let bytes = arrived.unwrap_or_default();
        let (head, body) = Frame::parse(&bytes).ok_or(ControlError::InvalidFrame { rank: prev, step })?;
        if head.step != step as u16 || head.sequence != sequence {
            return Err(ControlError::DifferentCall { rank: prev, step, remote: head.step_name() });
        }
        if head.origin as usize != incoming {
            return Err(ControlError::InvalidFrame { rank: prev, step });
        }
        Ok((head.kind == FrameKind::Block).then(|| body.to_vec()))
    }

    /// Passes the deadline of this ring's next or present wait when it is called.
    #[cfg(test)]
    pub(super) fn clock(&self) -> impl FnOnce() + Send + 'static {
        self.neighbors.as_ref().expect("a ring of several ranks").clock()
    }

    /// Sends this rank's block and then blocks the reactor's thread, like a stopped process, until `others` is closed.
    #[cfg(test)]
    pub(super) fn stop_after_own_block(&self, step: Step, others: std::sync::mpsc::Receiver<()>) {
        let (sequence, origin) = (self.sequence, self.rank as u32);
        let head = Frame { kind: FrameKind::Block, step: step as u16, sequence, origin, len: 0 };
        if let Some(next) = self.neighbors.as_ref().and_then(|neighbors| neighbors.next.as_ref()) {
            next.write(head.emit(&[]), move |_| {
                let _ = others.recv();
            });
        }
    }
}

/// True if one allgather comes after another.
fn is_later(sequence: u32, than: u32) -> bool {
    sequence.wrapping_sub(than).cast_signed() > 0
}
