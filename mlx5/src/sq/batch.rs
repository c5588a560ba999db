//! Several requests with one doorbell.

use super::{Flags, Mark, Rejected, SendQueue};
use crate::ring::Ring;
use crate::wire::{CtrlSeg, FmCeSe};
use crate::wqe::{Data, Op, Post, Sink, Size};

/// Requests that are in the ring and not yet rung. Dropping it takes them back.
#[derive(Debug)]
#[must_use = "requests of a batch that is not rung never happen"]
pub struct Batch<'q, T> {
    queue: &'q mut SendQueue<T>,
    mark: Mark,
    posts: u32,
    /// Of the last request: its index, size, and whether any request of the batch has inline data.
    last: u32,
    size: Size,
    inline: bool,
}

impl<'q, T> Batch<'q, T> {
    #[inline(always)]
    pub(super) fn new(queue: &'q mut SendQueue<T>) -> Self {
        let mark = queue.mark();
        Self { queue, mark, posts: 0, last: 0, size: Size { ds: 0 }, inline: false }
    }

    /// Adds a request. A refused one leaves the batch as it was.
    #[inline(always)]
    pub fn post(&mut self, token: T, flags: Flags, post: &Post<'_>) -> Result<(), Rejected<T>> {
        let at = self.queue.producer;
        self.size = self.queue.place(token, flags, post)?;
        self.last = at;
        self.posts += 1;
        self.inline |= has_inline(post);
        Ok(())
    }

    /// Requests so far.
    pub fn len(&self) -> u32 {
        self.posts
    }

    /// No request so far.
    pub fn is_empty(&self) -> bool {
        self.posts == 0
    }

    /// Hands all requests to the card.
    #[inline(always)]
    pub fn ring(self) {
        let mut this = std::mem::ManuallyDrop::new(self);
        let this = &mut *this;
        if this.posts == 0 {
            return;
        }
        let (size, inline) = (this.size, this.inline);
        let queue = &mut *this.queue;
        queue.record.set(queue.producer & 0xffff);
        let place = queue.ring.at(this.last);
        if this.posts == 1 && queue.register.copies(size.ds, inline) {
            queue.register.copy(place.blocks(size.blocks()));
        } else {
            queue.register.ring(place.first_word());
        }
    }
}

impl<T> Drop for Batch<'_, T> {
    fn drop(&mut self) {
        if self.posts != 0 {
            self.queue.roll_back(self.mark);
        }
    }
}

#[inline(always)]
fn has_inline(post: &Post<'_>) -> bool {
    match post {
        Op::Send { data, .. } | Op::Datagram { data, .. } | Op::Write { data, .. } => matches!(data, Data::Inline(_)),
        _ => false,
    }
}

/// Writes all segments; the control segment last, so that what follows it is there when it is.
#[inline(always)]
pub(super) fn write(ring: &Ring, index: u32, qpn: u32, size: Size, fm_ce_se: FmCeSe, post: &Post<'_>) {
    let mut place = ring.at(index);
    let (opcode, imm) = post.code();
    post.put(&mut place);
    place.put(0, CtrlSeg::new(opcode.code(), index as u16, qpn, size.ds, fm_ce_se, imm));
}
