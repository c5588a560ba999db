//! NCCL's data calls: checks their arguments before the data path takes over.

use super::engine::{Ends, Engine, Signal, Transfer};
use super::memory::Memory;
use super::requests::Request;
use super::stream::StreamId;
use super::words::Word;
use crate::error::Error;
use crate::registry::{self, Kind};
use ferrogin_ffi::rma::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::collections::btree_map::Entry;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The context and rank a call names.
type Target = (c_int, u32);

/// A put's or get's arguments. If the size is 0, the handles may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct TransferCall {
    /// Where the bytes come from: memory's handle and offset.
    pub from: (usize, u64),
    /// Where they go.
    pub to: (usize, u64),
    /// Number of bytes.
    pub size: u64,
    /// NCCL has another operation for this peer right behind this one.
    pub more_follows: bool,
}

/// A signal's arguments.
#[derive(Debug, Clone, Copy)]
pub struct SignalCall {
    /// The handle of the word's memory.
    pub memory: usize,
    /// The word's offset in it.
    pub offset: u64,
    /// `signalValue`.
    pub value: u64,
    /// `signalOp`.
    pub operation: u32,
    /// `isStrongSignal`.
    pub strong: bool,
}

impl Engine {
    /// Implements `iput`, and `iputSignal` if there is a signal.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed.
    pub fn put(&mut self, target: Target, put: TransferCall, signal: Option<SignalCall>) -> Result<Request, Error> {
        let stream = self.stream(target)?;
        let put = self.check_transfer(stream.peer, (put.from, put.to), put)?;
        let signal = signal.map(|signal| self.check_signal(stream.peer, signal)).transpose()?;
        self.start_put(stream, put, signal)
    }

    /// Implements `iget`.
    ///
    /// # Errors
    /// An argument is invalid; an operation of this context has failed.
    pub fn get(&mut self, target: Target, get: TransferCall) -> Result<Request, Error> {
        let stream = self.stream(target)?;
        let get = self.check_transfer(stream.peer, (get.to, get.from), get)?;
        self.start_get(stream, get)
    }

    /// Implements `iflush`: makes the bytes of completed gets visible to the GPU before it returns a request that's done.
    ///
    /// # Errors
    /// An argument is invalid; the driver fails; an operation of this context has failed.
    pub fn flush(&mut self, target: Target, memory: usize) -> Result<Request, Error> {
        self.stream(target)?;
        // NCCL passes its signal memory's handle, or NULL if it has no signals.
        if memory != 0 {
            self.memory(memory)?;
        }
        self.ranks.device.flush_writes()?;
        self.done()
    }

    /// Forgets memory whose handle has been closed.
    pub fn forget(&mut self, handle: usize) {
        self.memories.remove(&handle);
    }

    /// Returns the memory behind a handle, and caches it because threads share the registry's locks.
    fn memory(&mut self, handle: usize) -> Result<&Arc<Memory>, Error> {
        match self.memories.entry(handle) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let memory = registry::get::<Memory>(handle as *const c_void, Kind::RmaMemory)?;
                if memory.comm != self.ranks.number {
                    return Err(Error::Argument("the memory handle belongs to another communicator".to_owned()));
                }
                Ok(place.insert(memory))
            }
        }
    }

    fn stream(&self, (context, rank): Target) -> Result<StreamId, Error> {
        let contexts = self.contexts;
        let context = usize::try_from(context)
            .ok()
            .filter(|context| *context < contexts)
            .ok_or_else(|| Error::Argument(format!("context {context} does not exist: this handle has {contexts}")))?;
        match rank as usize {
            peer if peer < self.ranks.nranks => Ok(StreamId { peer, context }),
            _ => Err(Error::Argument(format!("rank {rank} does not exist: the job has {}", self.ranks.nranks))),
        }
    }

    /// Finds the memory, and checks that the bytes are inside it on this rank and on rank `peer`.
    fn check_transfer(
        &mut self,
        peer: usize,
        (near, far): ((usize, u64), (usize, u64)),
        TransferCall { size, more_follows, .. }: TransferCall,
    ) -> Result<Transfer, Error> {
        if size == 0 {
            return Ok(Transfer { ends: None, size, more_follows });
        }
        let (near, far) = ((self.memory(near.0)?.clone(), near.1), (self.memory(far.0)?.clone(), far.1));
        near.0.own().check("memory of this rank", near.1, size)?;
        far.0.peer(peer).check(format_args!("memory of rank {peer}"), far.1, size)?;
        Ok(Transfer { ends: Some(Ends { near, far }), size, more_follows })
    }

    fn check_signal(&mut self, peer: usize, call: SignalCall) -> Result<Signal, Error> {
        let (offset, memory) = (call.offset, self.memory(call.memory)?);
        let value = match call.operation {
            SIGNAL_OP_INC => 1,
            SIGNAL_OP_ADD => call.value,
            other => {
                return Err(Error::Argument(format!(
                    "signalOp {other} is not known: use NCCL_NET_SIGNAL_OP_INC ({SIGNAL_OP_INC}) or _ADD ({SIGNAL_OP_ADD})"
                )));
            }
        };
        memory.peer(peer).check(format_args!("signal in memory of rank {peer}"), offset, 8)?;
        if memory.peer(peer).word(offset).is_none() {
            return Err(Error::Argument(format!("the signal at offset {offset} is not aligned to 8 bytes")));
        }
        Ok(Signal { word: Word { memory: memory.number, offset, strong: call.strong }, value })
    }
}
