//! The send queue: writes work requests into the ring, rings the doorbell, and frees the work requests that have
//! completed.
//!
//! A [`Batch`] writes several work requests and rings once; [`SendQueue::post`] is a batch of one. A refused work
//! request returns its token and changes nothing, not even the index or fence of the next work request. Dropping a
//! batch without [`Batch::ring`] removes its work requests.

mod batch;
#[allow(unsafe_code)]
mod store;

pub use batch::Batch;

use crate::handle::Handle;
use crate::mmio::{DoorbellRecord, DoorbellRegister};
use crate::ring::Ring;
use crate::wire::{BLOCK, CtrlHead, CtrlSeg, CtrlTail, Fence, FmCeSe, MAX_24_BITS, SEGMENT};
use crate::wqe::{BuildError, Limits, SegmentWriter, Size, Transport, UmrKind, WorkRequest};
use store::{Store, StoreWriter};

/// Flags of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(FmCeSe);

impl Flags {
    /// No completion: the completion of a later work request covers this one.
    pub const NONE: Self = Self(FmCeSe::NONE);
    /// The work request gets a completion.
    pub const SIGNALED: Self = Self(FmCeSe::CQ_UPDATE);
    /// The peer's completion raises an event.
    pub const SOLICITED: Self = Self(FmCeSe::SOLICITED);
    /// Starts after all earlier work requests have completed, reads and atomics included.
    pub const FENCE: Self = Self(FmCeSe::FENCE);

    /// Returns the union of both.
    #[must_use]
    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0.with(other.0))
    }
}

/// The part of a work request's kind that its completion's operation code doesn't tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// The completion's operation code tells the kind.
    Plain,
    /// A bind of a window.
    Bind,
    /// An invalidation of a window by key.
    LocalInv,
}

/// Why a work request was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The ring or the queue is full.
    #[error(
        "the send queue is full: {free_blocks} blocks and {free_posts} work requests are free; poll for completions first"
    )]
    Full {
        /// Free blocks.
        free_blocks: u32,
        /// Work requests that may still be posted.
        free_posts: u32,
    },
    /// The work request cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// A work request that was not posted, with its token. Nothing changed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<T> {
    /// The caller's token.
    pub token: T,
    /// The reason.
    #[source]
    pub error: PostError,
}

/// A completion names no outstanding work request: the queues do not match, or the card wrote an impossible completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a completion names work request {wqe_counter:#06x}, which is not outstanding; close this queue pair")]
pub struct UnknownRequest {
    /// The index in the completion.
    pub wqe_counter: u16,
}

/// A completed work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedRequest<T> {
    /// The caller's token.
    pub token: T,
    /// The kind of the work request.
    pub kind: RequestKind,
}

/// The parts of a send queue, provided by the device.
#[derive(Debug)]
pub struct SendParts {
    /// The ring, whose entries are blocks (64 bytes); at most 2^15 of them.
    pub ring: Ring,
    /// The send queue's word of the doorbell record: the second.
    pub record: DoorbellRecord,
    /// The doorbell register.
    pub register: DoorbellRegister,
    /// Queue pair number.
    pub qpn: u32,
    /// The transport of the queue pair.
    pub transport: Transport,
    /// Limits of one work request.
    pub limits: Limits,
    /// How many work requests may be outstanding; the ring's blocks limit them too.
    pub max_posts: u32,
    /// Whether every work request gets a completion, as set when the queue pair was created.
    pub signal_all: bool,
    /// Index of the first work request: 0 on a new queue pair.
    pub start_index: u32,
    /// Keeps the queue's memory alive.
    pub keep_alive: Handle,
}

/// A send queue. `T` is the token that the caller attaches to a work request.
#[derive(Debug)]
pub struct SendQueue<T> {
    store: Store<T>,
    core: Core,
}

/// The state of a queue without its memory.
#[derive(Debug)]
struct Core {
    state: PostState,
    /// Index of the oldest outstanding work request.
    consumer: u32,
    blocks: u32,
    max_posts: u32,
    transport: Transport,
    limits: Limits,
    fixed: FixedFields,
    record: DoorbellRecord,
    register: DoorbellRegister,
    _keep_alive: Handle,
}

/// The state that posting changes. A batch works on a copy, which becomes the queue's state when the batch is rung.
#[derive(Debug, Clone, Copy)]
struct PostState {
    /// Index of the next work request's first block. It does not wrap at the end of the ring; work requests carry its
    /// low 16 bits.
    producer: u32,
    /// Up to this index the fast path may post work requests of one block: there is room for them, and no fence is
    /// pending. Equals `producer` while a fence is pending, and on datagram queue pairs.
    limit: u32,
    /// The number of outstanding blocks minus the number of outstanding work requests.
    surplus: u32,
    /// Whether a fence is pending: the next work request gets a small fence, unless it has a full one.
    fence: bool,
}

/// Fields that posting reads but doesn't change.
#[derive(Debug, Clone, Copy)]
struct FixedFields {
    head: CtrlHead,
    /// The flags of every work request.
    always: CtrlTail,
}

impl PostState {
    /// Returns whether the fast path may post a work request whose size came from [`WorkRequest::simple_size`].
    #[inline(always)]
    fn is_open(&self) -> bool {
        self.producer != self.limit
    }

    /// Writes an admitted work request and records it as outstanding. Returns the first 8 bytes of its control segment.
    #[inline(always)]
    fn put<T>(
        &mut self,
        writer: &mut StoreWriter<'_, T>,
        head: CtrlHead,
        tail: CtrlTail,
        token: T,
        admitted: &AdmittedRequest<'_, '_>,
    ) -> u64 {
        let (opcode, imm) = admitted.post.code();
        let mut position = writer.at(self.producer);
        admitted.post.put(&mut position);
        // The control segment goes last, so that the card never sees it before the segments that follow it.
        let ctrl = CtrlSeg::words(head, tail, opcode.code(), self.producer as u16, admitted.size.ds, imm);
        position.put(0, ctrl);
        let blocks = admitted.size.blocks();
        writer.record_outstanding(self.producer, token, blocks as u8, admitted.kind);
        self.producer = self.producer.wrapping_add(blocks);
        ctrl[0]
    }
}

/// A work request that fits the queue, with its size and kind.
struct AdmittedRequest<'p, 'l> {
    post: &'p WorkRequest<'l>,
    size: Size,
    kind: RequestKind,
}

impl Core {
    fn free_blocks(&self, state: &PostState) -> u32 {
        self.blocks - state.producer.wrapping_sub(self.consumer)
    }

    /// Returns the number of work requests that may still be posted, if the ring has room.
    fn free_posts(&self, state: &PostState) -> u32 {
        self.max_posts - (state.producer.wrapping_sub(self.consumer) - state.surplus)
    }

    /// Recomputes `limit`.
    fn set_limit(&self, state: &mut PostState) {
        let room = match self.transport {
            Transport::Rc if !state.fence => self.free_posts(state).min(self.free_blocks(state)),
            Transport::Rc | Transport::Ud => 0,
        };
        state.limit = state.producer.wrapping_add(room);
    }

    /// Writes any work request. Returns the first 8 bytes of its control segment.
    #[inline(never)]
    fn place_any<T>(
        &self,
        state: &mut PostState,
        mut writer: StoreWriter<'_, T>,
        token: T,
        flags: Flags,
        post: WorkRequest<'_>,
    ) -> Result<u64, Rejected<T>> {
        let size = match self.admit(state, &post) {
            Ok(size) => size,
            Err(error) => return Err(Rejected { token, error }),
        };
        let kind = match post {
            WorkRequest::Umr { kind: UmrKind::Bind, .. } => RequestKind::Bind,
            WorkRequest::Umr { kind: UmrKind::LocalInv, .. } => RequestKind::LocalInv,
            _ => RequestKind::Plain,
        };
        // A full fence replaces the small one. After either, no fence is pending.
        let small = state.fence && !flags.0.has(FmCeSe::FENCE);
        let tail = self.fixed.always.with(flags.0).with(FmCeSe::NONE.with_if(FmCeSe::SMALL_FENCE, small));
        let first = state.put(&mut writer, self.fixed.head, tail, token, &AdmittedRequest { post: &post, size, kind });
        state.fence = kind != RequestKind::Plain;
        state.surplus += size.blocks() - 1;
        self.set_limit(state);
        Ok(first)
    }

    /// Copies the last work request, which has this size, into the doorbell register.
    #[inline(never)]
    fn copy_last<T>(&mut self, writer: StoreWriter<'_, T>, size: Size) {
        let blocks = size.blocks();
        self.register.copy(writer.at(self.state.producer.wrapping_sub(blocks)).blocks(blocks));
    }

    fn admit(&self, state: &PostState, post: &WorkRequest<'_>) -> Result<Size, PostError> {
        let fits = match post {
            WorkRequest::Nop => true,
            WorkRequest::Datagram { .. } => self.transport == Transport::Ud,
            _ => self.transport == Transport::Rc,
        };
        if !fits {
            return Err(BuildError::Transport.into());
        }
        let size = post.size(&self.limits)?;
        let (free_blocks, free_posts) = (self.free_blocks(state), self.free_posts(state));
        if free_posts == 0 || size.blocks() > free_blocks {
            return Err(PostError::Full { free_blocks, free_posts });
        }
        Ok(size)
    }
}

impl<T> SendQueue<T> {
    /// Creates a queue from `parts`; `None` if their sizes are out of range.
    pub fn new(parts: SendParts) -> Option<Self> {
        let blocks = parts.ring.entries();
        let largest = (parts.limits.max_ds() * SEGMENT).div_ceil(BLOCK);
        let ring = blocks <= 1 << 15 && largest <= blocks;
        let limits = parts.limits.fit() && parts.limits.max_sge != 0 && parts.max_posts != 0;
        if !ring || !limits || parts.qpn > MAX_24_BITS {
            return None;
        }
        let always = CtrlTail::new(FmCeSe::NONE.with_if(FmCeSe::CQ_UPDATE, parts.signal_all));
        let start = parts.start_index;
        let mut state = PostState { producer: start, limit: start, surplus: 0, fence: false };
        let store = Store::new(parts.ring)?;
        let mut core = Core {
            state,
            consumer: start,
            blocks: store.blocks(),
            max_posts: parts.max_posts,
            transport: parts.transport,
            limits: parts.limits,
            fixed: FixedFields { head: CtrlHead::new(parts.qpn), always },
            record: parts.record,
            register: parts.register,
            _keep_alive: parts.keep_alive,
        };
        core.set_limit(&mut state);
        core.state = state;
        Some(Self { store, core })
    }

    /// Returns the queue pair number.
    pub fn qpn(&self) -> u32 {
        self.core.fixed.head.qpn()
    }

    /// Returns the limits of one work request.
    pub fn limits(&self) -> Limits {
        self.core.limits
    }

    /// Returns the index of the next work request's first block; the work request carries the low 16 bits.
    pub fn producer(&self) -> u32 {
        self.core.state.producer
    }

    /// Returns the fence that the queue will add to the next work request.
    pub fn pending_fence(&self) -> Fence {
        if self.core.state.fence { Fence::Small } else { Fence::None }
    }

    /// Returns the number of free blocks.
    pub fn free_blocks(&self) -> u32 {
        self.core.free_blocks(&self.core.state)
    }

    /// Returns the number of work requests that may still be posted, if the ring has room.
    pub fn free_posts(&self) -> u32 {
        self.core.free_posts(&self.core.state)
    }

    /// Starts a batch.
    #[inline(always)]
    pub fn batch(&mut self) -> Batch<'_, T> {
        Batch::new(self.store.writer(), &mut self.core)
    }

    /// Posts one work request and rings.
    #[inline(always)]
    pub fn post(&mut self, token: T, flags: Flags, post: &WorkRequest<'_>) -> Result<(), Rejected<T>> {
        let Some(size) = post.simple_size() else { return self.post_any(token, flags, *post) };
        let core = &mut self.core;
        if !core.state.is_open() {
            return self.post_any(token, flags, *post);
        }
        let admitted = AdmittedRequest { post, size, kind: RequestKind::Plain };
        let FixedFields { head, always } = core.fixed;
        let first = core.state.put(&mut self.store.writer(), head, always.with(flags.0), token, &admitted);
        core.record.set(core.state.producer & 0xffff);
        if core.register.copies(size.blocks(), false) {
            self.copy_last(size);
        } else {
            core.register.ring(first);
        }
        Ok(())
    }

    #[cold]
    fn copy_last(&mut self, size: Size) {
        self.core.copy_last(self.store.writer(), size);
    }

    #[cold]
    fn post_any(&mut self, token: T, flags: Flags, post: WorkRequest<'_>) -> Result<(), Rejected<T>> {
        let mut batch = self.batch();
        batch.post(token, flags, &post)?;
        batch.ring();
        Ok(())
    }

    /// Frees the work requests that the completion of `wqe_counter` covers: the earlier ones, oldest first, then the
    /// named one. Dropping the iterator early frees the rest too.
    pub fn complete(&mut self, wqe_counter: u16) -> Result<CompletedRequests<'_, T>, UnknownRequest> {
        let core = &self.core;
        let ahead = wqe_counter.wrapping_sub(core.consumer as u16) as u32;
        let outstanding = core.state.producer.wrapping_sub(core.consumer);
        match self.store.outstanding(core.consumer.wrapping_add(ahead)) {
            Some((blocks, _)) if ahead < outstanding => {
                let end = core.consumer.wrapping_add(ahead + blocks);
                Ok(CompletedRequests { queue: self, end })
            }
            _ => Err(UnknownRequest { wqe_counter }),
        }
    }

    /// Frees all outstanding work requests, oldest first, for a queue pair that no longer exists.
    pub fn take_outstanding(&mut self) -> CompletedRequests<'_, T> {
        let end = self.core.state.producer;
        CompletedRequests { queue: self, end }
    }
}

/// Completed work requests, oldest first.
#[derive(Debug)]
pub struct CompletedRequests<'q, T> {
    queue: &'q mut SendQueue<T>,
    end: u32,
}

impl<T> Iterator for CompletedRequests<'_, T> {
    type Item = CompletedRequest<T>;

    #[inline]
    fn next(&mut self) -> Option<CompletedRequest<T>> {
        let core = &mut self.queue.core;
        let consumer = &mut core.consumer;
        if *consumer == self.end {
            return None;
        }
        let (blocks, kind) = self.queue.store.outstanding(*consumer)?;
        let token = self.queue.store.take(*consumer)?;
        *consumer = consumer.wrapping_add(blocks);
        core.state.surplus -= blocks - 1;
        Some(CompletedRequest { token, kind })
    }
}

impl<T> Drop for CompletedRequests<'_, T> {
    fn drop(&mut self) {
        self.by_ref().for_each(drop);
        let core = &mut self.queue.core;
        let mut state = core.state;
        core.set_limit(&mut state);
        core.state = state;
    }
}
