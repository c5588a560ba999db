//! NCCL's data calls: checks their arguments before the data path takes over.

use super::context::Context;
use super::engine::{Signal, Transfer};
use super::lane::Access;
use super::memory::Peer;
use super::requests::Request;
use super::stream::StreamId;
use super::words::Word;
use crate::error::{DataResult, Error};
use ferrogin_ffi::rma::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_int;
use std::fmt::Display;

/// The context and rank a call names.
type Target = (c_int, u32);

/// A byte of memory.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The memory's handle.
    pub memory: usize,
    /// The offset in it.
    pub offset: u64,
}

/// A put's or get's arguments. If the size is 0, the handles may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct TransferCall {
    /// Where the bytes come from.
    pub from: Place,
    /// Where they go.
    pub to: Place,
    /// Number of bytes.
    pub size: u64,
    /// NCCL has another operation for this peer right behind this one.
    pub more_follows: bool,
}

/// A signal's arguments.
#[derive(Debug, Clone, Copy)]
pub struct SignalCall {
    /// The word.
    pub word: Place,
    /// `signalValue`.
    pub value: u64,
    /// `signalOp`.
    pub operation: u32,
    /// `isStrongSignal`.
    pub strong: bool,
}

impl Context {
    /// Implements `iput`, and `iputSignal` if there is a signal.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed.
    #[inline(always)]
    pub fn put(&mut self, target: Target, put: TransferCall, signal: Option<SignalCall>) -> DataResult<Request> {
        let stream = self.stream(target)?;
        let signal = match signal {
            Some(signal) => Some(self.check_signal(stream.peer, signal)?),
            None => None,
        };
        self.transfer(stream, Access::Write, put, signal)
    }

    /// Implements `iget`.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed.
    #[inline(always)]
    pub fn get(&mut self, target: Target, get: TransferCall) -> DataResult<Request> {
        let stream = self.stream(target)?;
        self.transfer(stream, Access::Read, get, None)
    }

    /// Implements `iflush`: makes the bytes of completed gets visible to the GPU before it returns a request that's
    /// done.
    ///
    /// # Errors
    /// An argument is invalid; the driver fails; an operation of this context has failed.
    pub fn flush(&mut self, target: Target, memory: usize) -> DataResult<Request> {
        let StreamId { peer, .. } = self.stream(target)?;
        // NCCL passes its signal memory's handle, or NULL if it has no signals.
        if memory != 0 {
            self.know(memory)?;
        }
        self.engine.ranks.device.flush_writes().map_err(Error::from)?;
        self.engine.done(peer)
    }

    #[cold]
    fn know(&mut self, handle: usize) -> DataResult<()> {
        match self.memories.get(handle) {
            Some(_) => Ok(()),
            None => self.memories.learn(handle, self.engine.ranks.number),
        }
    }

    #[inline(always)]
    fn stream(&self, (context, rank): Target) -> DataResult<StreamId> {
        let (contexts, nranks) = (self.engine.contexts, self.engine.nranks);
        let stream = StreamId { peer: rank as usize, context: context as u32 as usize };
        if stream.context >= contexts {
            return Err(missing("context", context, "this handle", contexts));
        }
        if stream.peer >= nranks {
            return Err(missing("rank", rank, "the job", nranks));
        }
        Ok(stream)
    }

    /// Starts a transfer if its bytes are inside the memory, on this rank and on the peer.
    #[inline(always)]
    fn transfer(
        &mut self,
        stream: StreamId,
        access: Access,
        call: TransferCall,
        signal: Option<Signal>,
    ) -> DataResult<Request> {
        let TransferCall { from, to, size, more_follows } = call;
        let (near, far) = if access == Access::Read { (to, from) } else { (from, to) };
        let ends = if size == 0 {
            None
        } else {
            let (here, there) = loop {
                if let Some(here) = self.memories.get(near.memory)
                    && let Some(there) = self.memories.get(far.memory)
                {
                    break (here, there);
                }
                self.know(near.memory)?;
                self.know(far.memory)?;
            };
            let (of_here, of_there) = (here.own(), there.peer(stream.peer));
            if !of_here.has(near.offset, size) {
                return Err(outside("memory", self.engine.ranks.rank, of_here, near.offset, size));
            }
            if !of_there.has(far.offset, size) {
                return Err(outside("memory", stream.peer, of_there, far.offset, size));
            }
            Some((here, there, of_there))
        };
        let transfer = Transfer { ends, offsets: [near.offset, far.offset], size, more_follows };
        self.engine.transfer(stream, access, transfer, signal)
    }

    #[inline(always)]
    fn check_signal(&mut self, peer: usize, call: SignalCall) -> DataResult<Signal> {
        let Place { memory, offset } = call.word;
        let memory = loop {
            match self.memories.get(memory) {
                Some(memory) => break memory,
                None => self.know(memory)?,
            }
        };
        let value = match call.operation {
            SIGNAL_OP_INC => 1,
            SIGNAL_OP_ADD => call.value,
            other => {
                return Err(refused(format!(
                    "signalOp {other} is not known: use NCCL_NET_SIGNAL_OP_INC ({SIGNAL_OP_INC}) or _ADD ({SIGNAL_OP_ADD})"
                )));
            }
        };
        let there = memory.peer(peer);
        if there.word(offset).is_none() {
            return Err(if there.has(offset, 8) {
                refused(format!("the signal at offset {offset} is not aligned to 8 bytes"))
            } else {
                outside("signal in memory", peer, there, offset, 8)
            });
        }
        Ok(Signal { word: Word { memory: memory.number, offset, strong: call.strong }, value })
    }
}

#[cold]
fn refused(what: String) -> Box<Error> {
    Error::Argument(what).into()
}

#[cold]
fn missing(what: &str, number: impl Display, of: &str, count: usize) -> Box<Error> {
    refused(format!("{what} {number} does not exist: {of} has {count}"))
}

#[cold]
fn outside(what: &str, rank: usize, memory: &Peer, offset: u64, size: u64) -> Box<Error> {
    let all = memory.size();
    refused(format!(
        "{what} of rank {rank}: {size} bytes at offset {offset} are outside of a registration of {all} bytes"
    ))
}
