//! The requests of the short way. What one is made of is read when it has its number: until then a few pointers stand for
//! it, in registers.

use super::Context;
use super::tables::{Far, limits_of, local, remote, stamp};
use crate::action::Flags;
use crate::endpoint::{Endpoint, Slot};
use crate::post::combining::NoRoom;
use crate::post::{Share, Write};
use crate::status::Status;
use efa_dp_direct::wqe::words::{Stamp, ValueSize, local_words, remote_words};
use ferrogin_ffi::device::MrHandle;
use ferrogin_ffi::ext::TargetWords;

/// Words of a request where its remote and its local side begin.
pub(super) const REMOTE: usize = 4;
pub(super) const LOCAL: usize = 6;

/// Where an operation goes: who posts it, and to what.
#[derive(Clone, Copy)]
pub(super) struct To<'a> {
    pub(super) poster: Endpoint<'a>,
    /// Its address and peer; the peer has it.
    pub(super) target: *const TargetWords,
}

impl To<'_> {
    /// What the requests to the target have in common.
    #[inline(always)]
    pub(super) fn stamp(self) -> Stamp {
        stamp(self.target)
    }

    /// Writes the first half of request `idx`.
    #[inline(always)]
    fn begin(self, idx: u32, meta: impl Fn(Stamp) -> [u64; 4]) -> Slot {
        let (slot, phase) = self.poster.slot(idx);
        // The stamp is read again for what follows its first word: one register less.
        let [head, ..] = meta(self.stamp());
        slot.put(0, [head | phase]);
        let [_, second, ..] = meta(self.stamp());
        slot.put(1, [second]);
        let [.., third, fourth] = meta(self.stamp());
        slot.put(2, [third, fourth]);
        slot
    }

    /// Writes what follows a request of 64 bytes.
    #[inline(always)]
    fn end(self, slot: Slot) {
        if self.poster.is_wide() {
            slot.pad();
        }
    }
}

/// A request of the short way.
pub(super) trait Short: Write {
    /// Where it goes.
    fn poster(&self) -> Endpoint<'_>;

    /// Posts it under the number that it has already, once there is room: a call that gets it in registers, since what is
    /// given by reference would have to lie in memory for every post.
    fn late<S: Share>(self, flags: Flags, reserved: u64) -> Result<(), Status>;
}

/// Posts a request by the `combining` policy.
#[inline(always)]
pub(super) fn post<S: Share>(request: impl Short, flags: Flags) -> Result<(), Status> {
    if S::ALONE || cfg!(target_arch = "nvptx64") {
        let poster = request.poster();
        return poster.combine::<S>(limits_of(poster), flags.is_aggregate(), request);
    }
    let at_once = request.poster().combine_at_once::<S>(flags.is_aggregate(), request);
    match at_once {
        Ok(()) => Ok(()),
        Err(NoRoom { reserved }) => request.late::<S>(flags, reserved),
    }
}

/// The call that [`Short::late`] makes: takes a request apart, and puts it together again from the arguments.
macro_rules! late {
    ($request:ident { $($field:ident: $ty:ty),* }) => {
        #[inline(always)]
        fn poster(&self) -> Endpoint<'_> {
            self.to.poster
        }

        #[inline(always)]
        fn late<S: Share>(self, flags: Flags, reserved: u64) -> Result<(), Status> {
            #[allow(clippy::too_many_arguments)]
            #[cold]
            #[inline(never)]
            fn call<S: Share>(
                poster: Endpoint<'_>,
                target: *const TargetWords,
                $($field: $ty,)*
                flags: Flags,
                reserved: u64,
            ) -> Result<(), Status> {
                let request = $request { to: To { poster, target }, $($field),* };
                poster.combine_late::<S>(limits_of(poster), flags.is_aggregate(), request, reserved)
            }
            let $request { to, $($field),* } = self;
            call::<S>(to.poster, to.target, $($field,)* flags, reserved)
        }
    };
}

/// A write of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Put<'a> {
    pub(super) to: To<'a>,
    pub(super) far: Far,
    pub(super) dst_off: u64,
    pub(super) near: *const MrHandle,
    pub(super) src_off: u64,
    pub(super) bytes: u32,
}

impl Write for Put<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let slot = self.to.begin(idx, Stamp::write_meta);
        slot.put(REMOTE, remote_words(remote(self.far, self.dst_off), self.bytes));
        slot.put(LOCAL, local_words(local(self.near, self.src_off, self.bytes)));
        self.to.end(slot);
    }
}

impl Short for Put<'_> {
    late!(Put { far: Far, dst_off: u64, near: *const MrHandle, src_off: u64, bytes: u32 });
}

/// A read into one buffer.
#[derive(Clone, Copy)]
pub(super) struct Get<'a> {
    pub(super) to: To<'a>,
    pub(super) far: Far,
    pub(super) far_off: u64,
    pub(super) near: *const MrHandle,
    pub(super) near_off: u64,
    pub(super) bytes: u32,
}

impl Write for Get<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let slot = self.to.begin(idx, Stamp::read_meta);
        slot.put(REMOTE, remote_words(remote(self.far, self.far_off), self.bytes));
        slot.put(LOCAL, local_words(local(self.near, self.near_off, self.bytes)));
        self.to.end(slot);
    }
}

impl Short for Get<'_> {
    late!(Get { far: Far, far_off: u64, near: *const MrHandle, near_off: u64, bytes: u32 });
}

/// A write of nothing.
#[derive(Clone, Copy)]
pub(super) struct Empty<'a> {
    pub(super) to: To<'a>,
    pub(super) context: Context<'a>,
    pub(super) peer: u32,
}

impl Write for Empty<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let slot = self.to.begin(idx, Stamp::write_meta);
        slot.put(REMOTE, remote_words(self.context.scratch_remote(self.peer), 0));
        slot.put(LOCAL, local_words(self.context.scratch_local()));
        self.to.end(slot);
    }
}

impl Short for Empty<'_> {
    late!(Empty { context: Context<'_>, peer: u32 });
}

/// A write of a value that travels in its request, of 128 bytes.
#[derive(Clone, Copy)]
pub(super) struct InlineValue<'a> {
    pub(super) to: To<'a>,
    pub(super) far: Far,
    pub(super) dst_off: u64,
    pub(super) value: u64,
    pub(super) size: ValueSize,
}

impl Write for InlineValue<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let slot = self.to.begin(idx, |stamp| stamp.value_meta(self.size));
        slot.put(REMOTE, remote_words(remote(self.far, self.dst_off), self.size.bytes()));
        slot.put(LOCAL, [self.value, 0]);
        slot.pad();
    }
}

impl Short for InlineValue<'_> {
    late!(InlineValue { far: Far, dst_off: u64, value: u64, size: ValueSize });
}

/// A write of a value through its slot of the pool, in a request of 64 bytes.
#[derive(Clone, Copy)]
pub(super) struct PooledValue<'a> {
    pub(super) to: To<'a>,
    pub(super) far: Far,
    pub(super) dst_off: u64,
    pub(super) value: u64,
    pub(super) bytes: u32,
}

impl Write for PooledValue<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let slot = self.to.begin(idx, Stamp::write_meta);
        slot.put(REMOTE, remote_words(remote(self.far, self.dst_off), self.bytes));
        slot.put(LOCAL, local_words(self.to.poster.pool(idx, self.value, self.bytes)));
    }
}

impl Short for PooledValue<'_> {
    late!(PooledValue { far: Far, dst_off: u64, value: u64, bytes: u32 });
}
