//! Several requests with one doorbell.

use super::store::StoreWriter;
use super::{AdmittedRequest, Core, FixedFields, Flags, PostState, Rejected, RequestKind};
use crate::wire::CtrlSeg;
use crate::wqe::{Data, Op, Size, WorkRequest};
use std::mem::ManuallyDrop;

/// Requests that are in the ring and not yet rung. Dropping it takes them back.
#[derive(Debug)]
#[must_use = "requests of a batch that is not rung never happen"]
pub struct Batch<'q, T> {
    writer: StoreWriter<'q, T>,
    core: &'q mut Core,
    /// What the queue will be when the batch is rung. Until then `core` is as it was before.
    state: PostState,
    fixed: FixedFields,
    /// The first 8 bytes of the last request's control segment.
    first: u64,
    /// Some request has inline data.
    inline: bool,
}

impl<'q, T> Batch<'q, T> {
    #[inline(always)]
    pub(super) fn new(writer: StoreWriter<'q, T>, core: &'q mut Core) -> Self {
        let (state, fixed) = (core.state, core.fixed);
        Self { writer, core, state, fixed, first: 0, inline: false }
    }

    /// Adds a request. A refused one leaves the batch as it was.
    #[inline(always)]
    pub fn post(&mut self, token: T, flags: Flags, post: &WorkRequest<'_>) -> Result<(), Rejected<T>> {
        if let Some(size) = post.simple_size()
            && self.state.is_open()
        {
            let admitted = AdmittedRequest { post, size, kind: RequestKind::Plain };
            let FixedFields { head, always } = self.fixed;
            self.first = self.state.put(&mut self.writer, head, always.with(flags.0), token, &admitted);
            return Ok(());
        }
        // By value and with a copy of the state, so that they lie in memory on this path only.
        let mut state = self.state;
        self.first = self.core.place_any(&mut state, self.writer.reborrow(), token, flags, *post)?;
        self.state = state;
        self.inline |= has_inline(post);
        Ok(())
    }

    /// Blocks of all requests so far.
    #[inline(always)]
    fn blocks(&self) -> u32 {
        self.state.producer.wrapping_sub(self.core.state.producer)
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
        core.state = this.state;
        core.record.set(this.state.producer & 0xffff);
        // One request: all blocks are the last's. One of a control segment alone gains nothing from a copy.
        let size = Size { ds: CtrlSeg::ds_of(this.first) };
        if core.register.copies(blocks, this.inline) && size.ds > 1 && blocks == size.blocks() {
            core.copy_last(this.writer.reborrow(), size);
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
            self.writer.reborrow().discard(self.core.state.producer, blocks);
        }
    }
}

#[inline(always)]
fn has_inline(post: &WorkRequest<'_>) -> bool {
    match post {
        Op::Send { data, .. } | Op::Datagram { data, .. } | Op::Write { data, .. } => matches!(data, Data::Inline(_)),
        _ => false,
    }
}
