//! The fast path: operations of one work request by the `combining` policy. A request reads its parts when it has its number;
//! until then a few pointers in registers stand for it.

use super::Context;
use super::tables::{LocalSpan, RemoteSpan, limits_of, template};
use crate::action::Flags;
use crate::endpoint::{Endpoint, Slot};
use crate::post::combining::NoRoom;
use crate::post::{EncodeWqe, Share};
use crate::status::Status;
use efa_dp_direct::wqe::words::{ValueSize, WqeTemplate, local_words, remote_words};
use ferrogin_ffi::ext::TargetWords;

/// Words of a request where its remote and its local side begin.
pub(super) const REMOTE: usize = 4;
pub(super) const LOCAL: usize = 6;

/// The local endpoint, and the peer's endpoint, which exists.
#[derive(Clone, Copy)]
pub(super) struct Path<'a> {
    pub(super) poster: Endpoint<'a>,
    pub(super) target: *const TargetWords,
}

impl Path<'_> {
    /// What the requests to the target have in common.
    #[inline(always)]
    pub(super) fn template(self) -> WqeTemplate {
        template(self.target)
    }

    /// Writes the first half of request `idx`.
    #[inline(always)]
    fn begin(self, idx: u32, meta: impl Fn(WqeTemplate) -> [u64; 4]) -> Slot {
        let (slot, phase) = self.poster.slot(idx);
        // The template is read again for each part of it, which saves a register.
        let [head, ..] = meta(self.template());
        slot.put(0, [head | phase]);
        let [_, second, ..] = meta(self.template());
        slot.put(1, [second]);
        let [.., third, fourth] = meta(self.template());
        slot.put(2, [third, fourth]);
        slot
    }

    /// Pads a request of 64 bytes in a queue of wide requests.
    #[inline(always)]
    fn end(self, slot: Slot) {
        if self.poster.is_wide() {
            slot.pad();
        }
    }
}

/// A request of the fast path.
pub(super) trait FastPathRequest: EncodeWqe {
    /// The endpoint that posts it.
    fn poster(&self) -> Endpoint<'_>;

    /// Posts it under a reservation that had no room at once. This is a call that takes the request apart, in registers,
    /// because a request that is passed by reference would have to lie in memory for every post.
    fn post_reserved<S: Share>(self, flags: Flags, reserved: u64) -> Result<(), Status>;
}

/// Posts a request by the `combining` policy.
#[inline(always)]
pub(super) fn post<S: Share>(request: impl FastPathRequest, flags: Flags) -> Result<(), Status> {
    if S::EXCLUSIVE || cfg!(target_arch = "nvptx64") {
        let poster = request.poster();
        return poster.post_combining::<S>(limits_of(poster), flags.is_aggregate(), request);
    }
    let posted = request.poster().try_post_combining::<S>(flags.is_aggregate(), request);
    match posted {
        Ok(()) => Ok(()),
        Err(NoRoom { reserved }) => request.post_reserved::<S>(flags, reserved),
    }
}

/// The methods of [`FastPathRequest`]: `post_reserved` passes the request's fields one by one to a call.
macro_rules! fast_path_request {
    ($request:ident { $($field:ident: $ty:ty),* }) => {
        impl FastPathRequest for $request<'_> {
            #[inline(always)]
            fn poster(&self) -> Endpoint<'_> {
                self.path.poster
            }

            #[inline(always)]
            fn post_reserved<S: Share>(self, flags: Flags, reserved: u64) -> Result<(), Status> {
                #[cold]
                #[inline(never)]
                fn call<S: Share>(
                    path: Path<'_>,
                    $($field: $ty,)*
                    flags: Flags,
                    reserved: u64,
                ) -> Result<(), Status> {
                    let poster = path.poster;
                    let request = $request { path, $($field),* };
                    poster.post_reserved::<S>(limits_of(poster), flags.is_aggregate(), request, reserved)
                }
                let $request { path, $($field),* } = self;
                call::<S>(path, $($field,)* flags, reserved)
            }
        }
    };
}

/// A write of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Put<'a> {
    pub(super) path: Path<'a>,
    pub(super) remote: RemoteSpan,
    pub(super) local: LocalSpan,
    pub(super) bytes: u32,
}

impl EncodeWqe for Put<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let slot = self.path.begin(idx, WqeTemplate::write_meta);
        slot.put(REMOTE, remote_words(self.remote.memory(), self.bytes));
        slot.put(LOCAL, local_words(self.local.sge(self.bytes)));
        self.path.end(slot);
    }
}

fast_path_request!(Put { remote: RemoteSpan, local: LocalSpan, bytes: u32 });

/// A read into one buffer.
#[derive(Clone, Copy)]
pub(super) struct Get<'a> {
    pub(super) path: Path<'a>,
    pub(super) remote: RemoteSpan,
    pub(super) local: LocalSpan,
    pub(super) bytes: u32,
}

impl EncodeWqe for Get<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let slot = self.path.begin(idx, WqeTemplate::read_meta);
        slot.put(REMOTE, remote_words(self.remote.memory(), self.bytes));
        slot.put(LOCAL, local_words(self.local.sge(self.bytes)));
        self.path.end(slot);
    }
}

fast_path_request!(Get { remote: RemoteSpan, local: LocalSpan, bytes: u32 });

/// A write without bytes.
#[derive(Clone, Copy)]
pub(super) struct Empty<'a> {
    pub(super) path: Path<'a>,
    pub(super) context: Context<'a>,
    pub(super) peer: u32,
}

impl EncodeWqe for Empty<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let slot = self.path.begin(idx, WqeTemplate::write_meta);
        slot.put(REMOTE, remote_words(self.context.scratch_remote(self.peer), 0));
        slot.put(LOCAL, local_words(self.context.scratch_local()));
        self.path.end(slot);
    }
}

fast_path_request!(Empty { context: Context<'_>, peer: u32 });

/// A write of a value that travels in its request, of 128 bytes.
#[derive(Clone, Copy)]
pub(super) struct InlineValue<'a> {
    pub(super) path: Path<'a>,
    pub(super) remote: RemoteSpan,
    pub(super) value: u64,
    pub(super) size: ValueSize,
}

impl EncodeWqe for InlineValue<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let slot = self.path.begin(idx, |template| template.value_meta(self.size));
        slot.put(REMOTE, remote_words(self.remote.memory(), self.size.bytes()));
        slot.put(LOCAL, [self.value, 0]);
        slot.pad();
    }
}

fast_path_request!(InlineValue { remote: RemoteSpan, value: u64, size: ValueSize });

/// A write of a value through its slot of the pool, in a request of 64 bytes.
#[derive(Clone, Copy)]
pub(super) struct PooledValue<'a> {
    pub(super) path: Path<'a>,
    pub(super) remote: RemoteSpan,
    pub(super) value: u64,
    pub(super) bytes: u32,
}

impl EncodeWqe for PooledValue<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let slot = self.path.begin(idx, WqeTemplate::write_meta);
        slot.put(REMOTE, remote_words(self.remote.memory(), self.bytes));
        slot.put(LOCAL, local_words(self.path.poster.pool(idx, self.value, self.bytes)));
    }
}

fast_path_request!(PooledValue { remote: RemoteSpan, value: u64, bytes: u32 });
