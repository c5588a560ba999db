//! Several requests with one doorbell.

use super::store::Pen;
use super::{Constant, Core, Flags, Hand, Kind, Rejected, What};
use crate::wire::CtrlSeg;
use crate::wqe::{Data, Op, Post, Size};
use std::mem::ManuallyDrop;

/// Requests that are in the ring and not yet rung. Dropping it takes them back.
#[derive(Debug)]
#[must_use = "requests of a batch that is not rung never happen"]
pub struct Batch<'q, T> {
    pen: Pen<'q, T>,
    core: &'q mut Core,
    /// What the queue will be when the batch is rung. Until then `core` is as it was before.
    hand: Hand,
    constant: Constant,
    /// The first 8 bytes of the last request's control segment.
    first: u64,
    /// Some request has inline data.
    inline: bool,
}

impl<'q, T> Batch<'q, T> {
    #[inline(always)]
    pub(super) fn new(pen: Pen<'q, T>, core: &'q mut Core) -> Self {
        let (hand, constant) = (core.hand, core.constant);
        Self { pen, core, hand, constant, first: 0, inline: false }
    }

    /// Adds a request. A refused one leaves the batch as it was.
    #[inline(always)]
    pub fn post(&mut self, token: T, flags: Flags, post: &Post<'_>) -> Result<(), Rejected<T>> {
        if let Some(size) = post.simple_size()
            && self.hand.is_open()
        {
            let what = What { post, size, kind: Kind::Plain };
            let Constant { head, always } = self.constant;
            self.first = self.hand.put(&mut self.pen, head, always.with(flags.0), token, &what);
            return Ok(());
        }
        // By value and with a copy of the state, so that they lie in memory on this path only.
        let mut hand = self.hand;
        self.first = self.core.place_any(&mut hand, self.pen.lend(), token, flags, *post)?;
        self.hand = hand;
        self.inline |= has_inline(post);
        Ok(())
    }

    /// Blocks of all requests so far.
    #[inline(always)]
    fn blocks(&self) -> u32 {
        self.hand.producer.wrapping_sub(self.core.hand.producer)
    }

    /// No request so far.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.blocks() == 0
    }

    /// Hands all requests to the card.
    #[inline(always)]
    pub fn ring(self) {
        // Not dropped, so that nothing is taken back.
        let this = &mut *ManuallyDrop::new(self);
        let blocks = this.blocks();
        if blocks == 0 {
            return;
        }
        let core = &mut *this.core;
        core.hand = this.hand;
        core.record.set(this.hand.producer & 0xffff);
        // One request: all blocks are the last's. One of a control segment alone gains nothing from a copy.
        let size = Size { ds: CtrlSeg::ds_of(this.first) };
        if core.register.copies(blocks, this.inline) && size.ds > 1 && blocks == size.blocks() {
            core.copy_last(this.pen.lend(), size);
        } else {
            core.register.ring(this.first);
        }
    }
}

impl<T> Drop for Batch<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        let blocks = self.blocks();
        if blocks != 0 {
            self.pen.lend().forget(self.core.hand.producer, blocks);
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
