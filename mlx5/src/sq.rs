//! The send queue: requests into the ring, the doorbell, and what a completion frees.
//!
//! A [`Batch`] block_ring requests and rings once for all; [`SendQueue::post`] is a batch of one. A request that is refused
//! changes nothing: not the index, not the fence that the next one needs, and it gives its token back. A batch that is
//! dropped without [`Batch::ring`] never happened.

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

/// How a request is to be treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(FmCeSe);

impl Flags {
    /// No completion wanted: a later one tells.
    pub const NONE: Self = Self(FmCeSe::NONE);
    /// A completion is wanted.
    pub const SIGNALED: Self = Self(FmCeSe::CQ_UPDATE);
    /// The peer's completion raises an event.
    pub const SOLICITED: Self = Self(FmCeSe::SOLICITED);
    /// Begins after all earlier requests, reads and atomics included.
    pub const FENCE: Self = Self(FmCeSe::FENCE);

    /// Both.
    #[must_use]
    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0.with(other.0))
    }
}

/// What a request was, as far as its completion does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// The completion's code tells.
    Plain,
    /// A bind of a window.
    Bind,
    /// An invalidation of a window by key.
    LocalInv,
}

/// Why a request was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// No room in the ring, or as many requests as the queue takes.
    #[error(
        "the send queue is full: {free_blocks} blocks and {free_posts} requests are free; poll for completions first"
    )]
    Full {
        /// Blocks that are free.
        free_blocks: u32,
        /// Requests that may still be posted.
        free_posts: u32,
    },
    /// It cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// A request that was not posted: nothing changed, and here is its token.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<T> {
    /// What the caller gave.
    pub token: T,
    /// Why.
    #[source]
    pub error: PostError,
}

/// A completion that names no outstanding request: the queues are out of step, or the card wrote nonsense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a completion names request {wqe_counter:#06x}, which is not outstanding; close this queue pair")]
pub struct UnknownRequest {
    /// Index that it names.
    pub wqe_counter: u16,
}

/// A request that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedRequest<T> {
    /// What the caller gave.
    pub token: T,
    /// What it was.
    pub kind: RequestKind,
}

/// What a send queue is made of; the device fills it in.
#[derive(Debug)]
pub struct SendParts {
    /// The ring, of entries of one block (64 bytes); at most 2^15 of them.
    pub ring: Ring,
    /// The word of the doorbell record that is the send queue's: its second.
    pub record: DoorbellRecord,
    /// The doorbell register.
    pub register: DoorbellRegister,
    /// Queue pair number.
    pub qpn: u32,
    /// Kind of queue pair.
    pub transport: Transport,
    /// What one request may have.
    pub limits: Limits,
    /// Requests that may be outstanding; the blocks of the ring bound them too.
    pub max_posts: u32,
    /// Every request gets a completion, as the queue pair was created.
    pub signal_all: bool,
    /// Index of the first request: 0 on a new queue pair.
    pub start_index: u32,
    /// Keeps the memory of the queue alive.
    pub keep_alive: Handle,
}

/// A send queue. `T` is what the caller wants back when a request is done.
#[derive(Debug)]
pub struct SendQueue<T> {
    store: Store<T>,
    core: Core,
}

/// All of a queue but its memory.
#[derive(Debug)]
struct Core {
    state: PostState,
    /// Index of the oldest outstanding request.
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

/// What posting changes. A batch works on a copy, which becomes the queue's when it is rung.
#[derive(Debug, Clone, Copy)]
struct PostState {
    /// Free-running index of the next request's first block; its low 16 bits go into requests.
    producer: u32,
    /// Up to this index one-block requests may be posted without a closer look, as blocks and posts are free for them and
    /// no fence is due: `producer` itself while one is, and on queue pairs that are not connected.
    limit: u32,
    /// Blocks of outstanding requests beside one for each: so many fewer posts than blocks are outstanding.
    surplus: u32,
    /// The next request begins after the one before has had its effect, unless it has a full fence of its own.
    fence: bool,
}

/// What posting needs and does not change.
#[derive(Debug, Clone, Copy)]
struct FixedFields {
    head: CtrlHead,
    /// Flags of every request.
    always: CtrlTail,
}

impl PostState {
    /// Whether a request of the common kind may be posted without a closer look: [`WorkRequest::simple_size`] gave its size.
    #[inline(always)]
    fn is_open(&self) -> bool {
        self.producer != self.limit
    }

    /// Writes a request that was admitted, and remembers it; gives the first 8 bytes of its control segment.
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
        let mut place = writer.at(self.producer);
        admitted.post.put(&mut place);
        // The control segment last, so that what follows it is there when it is.
        let ctrl = CtrlSeg::words(head, tail, opcode.code(), self.producer as u16, admitted.size.ds, imm);
        place.put(0, ctrl);
        let blocks = admitted.size.blocks();
        writer.record_outstanding(self.producer, token, blocks as u8, admitted.kind);
        self.producer = self.producer.wrapping_add(blocks);
        ctrl[0]
    }
}

/// A request, its size, and what its completion is to say.
struct AdmittedRequest<'p, 'l> {
    post: &'p WorkRequest<'l>,
    size: Size,
    kind: RequestKind,
}

impl Core {
    fn free_blocks(&self, state: &PostState) -> u32 {
        self.blocks - state.producer.wrapping_sub(self.consumer)
    }

    /// Requests that may still be posted, if the ring has room for them.
    fn free_posts(&self, state: &PostState) -> u32 {
        self.max_posts - (state.producer.wrapping_sub(self.consumer) - state.surplus)
    }

    /// Counts the limit anew.
    fn set_limit(&self, state: &mut PostState) {
        let room = match self.transport {
            Transport::Rc if !state.fence => self.free_posts(state).min(self.free_blocks(state)),
            Transport::Rc | Transport::Ud => 0,
        };
        state.limit = state.producer.wrapping_add(room);
    }

    /// Places any request; gives the first 8 bytes of its control segment.
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
        // A full fence takes the place of the small one, and either uses up what was due.
        let small = state.fence && !flags.0.has(FmCeSe::FENCE);
        let tail = self.fixed.always.with(flags.0).with(FmCeSe::NONE.with_if(FmCeSe::SMALL_FENCE, small));
        let first = state.put(&mut writer, self.fixed.head, tail, token, &AdmittedRequest { post: &post, size, kind });
        state.fence = kind != RequestKind::Plain;
        state.surplus += size.blocks() - 1;
        self.set_limit(state);
        Ok(first)
    }

    /// Copies the last request, which has this size, into the doorbell register.
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
    /// A queue of those parts. `None` if their sizes are out of range.
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

    /// Queue pair number.
    pub fn qpn(&self) -> u32 {
        self.core.fixed.head.qpn()
    }

    /// What one request may have.
    pub fn limits(&self) -> Limits {
        self.core.limits
    }

    /// Index of the next request's first block; 16 bits of it go into the request.
    pub fn producer(&self) -> u32 {
        self.core.state.producer
    }

    /// The fence that the next request will carry on its own.
    pub fn pending_fence(&self) -> Fence {
        if self.core.state.fence { Fence::Small } else { Fence::None }
    }

    /// Blocks that are free.
    pub fn free_blocks(&self) -> u32 {
        self.core.free_blocks(&self.core.state)
    }

    /// Requests that may still be posted, if the ring has room for them.
    pub fn free_posts(&self) -> u32 {
        self.core.free_posts(&self.core.state)
    }

    /// Begins a batch.
    #[inline(always)]
    pub fn batch(&mut self) -> Batch<'_, T> {
        Batch::new(self.store.writer(), &mut self.core)
    }

    /// Posts one request and rings.
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

    /// All requests that are done when the one at `wqe_counter` is: those before it, oldest first, and itself last. They
    /// are freed also if the iterator is dropped early.
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

    /// All outstanding requests, oldest first: for a queue pair that is gone.
    pub fn take_outstanding(&mut self) -> CompletedRequests<'_, T> {
        let end = self.core.state.producer;
        CompletedRequests { queue: self, end }
    }
}

/// Requests that are done, oldest first.
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
