//! The send queue: requests into the ring, the doorbell, and what a completion frees.
//!
//! A [`Batch`] places requests and rings once for all; [`SendQueue::post`] is a batch of one. A request that is refused
//! changes nothing: not the index, not the fence that the next one needs, and it gives its token back. A batch that is
//! dropped without [`Batch::ring`] never happened.

mod batch;

pub use batch::Batch;

use crate::device::Handle;
use crate::mmio::{Record, Register};
use crate::ring::Ring;
use crate::wire::{BLOCK, FmCeSe, MAX_24_BITS, SEGMENT};
use crate::wqe::{BuildError, Limits, Post, Size, Transport, UmrKind};

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
pub enum Kind {
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
pub struct Done<T> {
    /// What the caller gave.
    pub token: T,
    /// What it was.
    pub kind: Kind,
}

/// What a send queue is made of; the device fills it in.
#[derive(Debug)]
pub struct SendParts {
    /// The ring, of entries of one block (64 bytes); at most 2^15 of them.
    pub ring: Ring,
    /// The word of the doorbell record that is the send queue's: its second.
    pub record: Record,
    /// The doorbell register.
    pub register: Register,
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
    pub keep: Handle,
}

#[derive(Debug)]
struct Slot<T> {
    /// Set while a request that begins in this block is outstanding.
    token: Option<T>,
    blocks: u8,
    kind: Kind,
}

/// A send queue. `T` is what the caller wants back when a request is done.
#[derive(Debug)]
pub struct SendQueue<T> {
    ring: Ring,
    slots: Box<[Slot<T>]>,
    /// Free-running index of the next request's first block; its low 16 bits go into requests.
    producer: u32,
    /// Index of the oldest outstanding request.
    consumer: u32,
    free_posts: u32,
    /// The fence that the next request needs: after a bind or invalidation.
    pending: FmCeSe,
    always: FmCeSe,
    qpn: u32,
    transport: Transport,
    limits: Limits,
    record: Record,
    register: Register,
    _keep: Handle,
}

/// What a batch restores when it is dropped.
#[derive(Debug, Clone, Copy)]
struct Mark {
    producer: u32,
    free_posts: u32,
    pending: FmCeSe,
}

impl<T> SendQueue<T> {
    /// A queue of those parts. `None` if their sizes are out of range.
    pub fn new(parts: SendParts) -> Option<Self> {
        let blocks = parts.ring.entries();
        let largest = (parts.limits.max_ds() * SEGMENT).div_ceil(BLOCK);
        let sizes = parts.ring.entry_size() == BLOCK && blocks <= 1 << 15 && parts.limits.fit() && largest <= blocks;
        if !sizes || parts.qpn > MAX_24_BITS || parts.max_posts == 0 {
            return None;
        }
        Some(Self {
            ring: parts.ring,
            slots: (0..blocks).map(|_| Slot { token: None, blocks: 0, kind: Kind::Plain }).collect(),
            producer: parts.start_index,
            consumer: parts.start_index,
            free_posts: parts.max_posts,
            pending: FmCeSe::NONE,
            always: FmCeSe::NONE.with_if(FmCeSe::CQ_UPDATE, parts.signal_all),
            qpn: parts.qpn,
            transport: parts.transport,
            limits: parts.limits,
            record: parts.record,
            register: parts.register,
            _keep: parts.keep,
        })
    }

    /// Queue pair number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// What one request may have.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Index of the next request's first block; 16 bits of it go into the request.
    pub fn producer(&self) -> u32 {
        self.producer
    }

    /// The fence that the next request will carry on its own.
    pub fn pending_fence(&self) -> FmCeSe {
        self.pending
    }

    /// Blocks that are free.
    #[inline(always)]
    pub fn free_blocks(&self) -> u32 {
        self.slots.len() as u32 - self.producer.wrapping_sub(self.consumer)
    }

    /// Requests that may still be posted, if the ring has room for them.
    pub fn free_posts(&self) -> u32 {
        self.free_posts
    }

    /// Begins a batch.
    #[inline(always)]
    pub fn batch(&mut self) -> Batch<'_, T> {
        Batch::new(self)
    }

    /// Posts one request and rings.
    #[inline(always)]
    pub fn post(&mut self, token: T, flags: Flags, post: &Post<'_>) -> Result<(), Rejected<T>> {
        let mut batch = self.batch();
        batch.post(token, flags, post)?;
        batch.ring();
        Ok(())
    }

    /// All requests that are done when the one at `wqe_counter` is: those before it, oldest first, and itself last. They
    /// are freed also if the iterator is dropped early.
    pub fn complete(&mut self, wqe_counter: u16) -> Result<Finished<'_, T>, UnknownRequest> {
        let ahead = wqe_counter.wrapping_sub(self.consumer as u16) as u32;
        let outstanding = self.producer.wrapping_sub(self.consumer);
        let slot = self.consumer.wrapping_add(ahead) as usize & (self.slots.len() - 1);
        match self.slots.get(slot) {
            Some(slot) if ahead < outstanding && slot.token.is_some() => {
                let end = self.consumer.wrapping_add(ahead + slot.blocks as u32);
                Ok(Finished { queue: self, end })
            }
            _ => Err(UnknownRequest { wqe_counter }),
        }
    }

    /// All outstanding requests, oldest first: for a queue pair that is gone.
    pub fn abandon(&mut self) -> Finished<'_, T> {
        let end = self.producer;
        Finished { queue: self, end }
    }

    /// Places a request at the producer index.
    #[inline(always)]
    fn place(&mut self, token: T, flags: Flags, post: &Post<'_>) -> Result<Size, Rejected<T>> {
        let size = match self.admit(post) {
            Ok(size) => size,
            Err(error) => return Err(Rejected { token, error }),
        };
        let fence = if flags.0.has(FmCeSe::FENCE) { FmCeSe::NONE } else { self.pending };
        let fm_ce_se = self.always.with(flags.0).with(fence);
        let (kind, pending) = match post {
            Post::Umr { kind: UmrKind::Bind, .. } => (Kind::Bind, FmCeSe::SMALL_FENCE),
            Post::Umr { kind: UmrKind::LocalInv, .. } => (Kind::LocalInv, FmCeSe::SMALL_FENCE),
            _ => (Kind::Plain, FmCeSe::NONE),
        };
        batch::write(&self.ring, self.producer, self.qpn, size, fm_ce_se, post);
        let slot = self.producer as usize & (self.slots.len() - 1);
        // The mask keeps it in range; `get_mut` says so to the compiler.
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Slot { token: Some(token), blocks: size.blocks() as u8, kind };
        }
        self.pending = pending;
        self.producer = self.producer.wrapping_add(size.blocks());
        self.free_posts -= 1;
        Ok(size)
    }

    #[inline(always)]
    fn admit(&self, post: &Post<'_>) -> Result<Size, PostError> {
        let fits = match post {
            Post::Nop => true,
            Post::Datagram { .. } => self.transport == Transport::Ud,
            _ => self.transport == Transport::Rc,
        };
        if !fits {
            return Err(BuildError::Transport.into());
        }
        let size = post.size(&self.limits)?;
        if self.free_posts == 0 || size.blocks() > self.free_blocks() {
            return Err(PostError::Full { free_blocks: self.free_blocks(), free_posts: self.free_posts });
        }
        Ok(size)
    }

    fn mark(&self) -> Mark {
        Mark { producer: self.producer, free_posts: self.free_posts, pending: self.pending }
    }

    #[cold]
    fn roll_back(&mut self, mark: Mark) {
        while self.producer != mark.producer {
            self.producer = self.producer.wrapping_sub(1);
            let slot = self.producer as usize & (self.slots.len() - 1);
            self.slots[slot].token = None;
        }
        self.free_posts = mark.free_posts;
        self.pending = mark.pending;
    }
}

/// Requests that are done, oldest first.
#[derive(Debug)]
pub struct Finished<'q, T> {
    queue: &'q mut SendQueue<T>,
    end: u32,
}

impl<T> Iterator for Finished<'_, T> {
    type Item = Done<T>;

    #[inline]
    fn next(&mut self) -> Option<Done<T>> {
        let queue = &mut *self.queue;
        if queue.consumer == self.end {
            return None;
        }
        let slot = queue.consumer as usize & (queue.slots.len() - 1);
        let slot = &mut queue.slots[slot];
        queue.consumer = queue.consumer.wrapping_add(slot.blocks as u32);
        queue.free_posts += 1;
        slot.token.take().map(|token| Done { token, kind: slot.kind })
    }
}

impl<T> Drop for Finished<'_, T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}
