//! Several work requests with one doorbell.

use super::store::StoreWriter;
use super::{AdmittedRequest, Core, FixedFields, Flags, PostState, Rejected, RequestKind};
use crate::wire::CtrlSeg;
use crate::wqe::{Data, Op, Size, WorkRequest};
use std::mem::ManuallyDrop;

/// Work requests that are in the ring but haven't been rung. Dropping the batch removes them.
#[derive(Debug)]
#[must_use = "a batch that is not rung posts nothing"]
pub struct Batch<'q, T> {
    writer: StoreWriter<'q, T>,
    core: &'q mut Core,
    /// The state of the queue after the batch is rung. Until then `core` is unchanged.
    state: PostState,
    fixed: FixedFields,
    /// The first 8 bytes of the last work request's control segment.
    first: u64,
    /// Whether any work request has inline data.
    inline: bool,
}

impl<'q, T> Batch<'q, T> {
    #[inline(always)]
    pub(super) fn new(writer: StoreWriter<'q, T>, core: &'q mut Core) -> Self {
        let (state, fixed) = (core.state, core.fixed);
        Self { writer, core, state, fixed, first: 0, inline: false }
    }

    /// Adds a work request. A refused work request leaves the batch unchanged.
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
        // Pass the work request by value, and a copy of the state, so that both are in memory only on this path.
        let mut state = self.state;
        self.first = self.core.place_any(&mut state, self.writer.reborrow(), token, flags, *post)?;
        self.state = state;
        self.inline |= has_inline(post);
        Ok(())
    }

    /// Returns the blocks of all work requests so far.
    #[inline(always)]
    fn blocks(&self) -> u32 {
        self.state.producer.wrapping_sub(self.core.state.producer)
    }

    /// Returns whether the batch has no work request.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.blocks() == 0
    }

    /// Rings the doorbell for all work requests.
    #[inline(always)]
    pub fn ring(self) {
        // Skip the drop, which would remove the work requests.
        let this = &mut *ManuallyDrop::new(self);
        let blocks = this.blocks();
        if blocks == 0 {
            return;
        }
        let core = &mut *this.core;
        core.state = this.state;
        core.record.set(this.state.producer & 0xffff);
        // Only a batch of one work request can be copied; that request has all the blocks. Copying a control segment
        // alone gains nothing.
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
