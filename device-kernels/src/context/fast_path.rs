//! The fast path: operations of one work request by the `combining` policy. On a CPU a request reads its parts when it has its number;
//! until then the arguments of the operation stand for it.

use super::tables::{LocalSpan, ON_GPU, RemoteSpan, Target, context_of, limits_of};
use crate::constant::{Constant, read};
use crate::endpoint::{Endpoint, Poster, Remote, Sge, Slot};
use crate::post::combining::{self, AfterMark, Next, NoRoom};
use crate::post::{EncodeWqe, Share};
use crate::status::Status;
use efa_dp_direct::wqe::words::{ValueSize, WqeTemplate, local_words, remote_words};
use ferrogin_ffi::ext::{VALUE_INLINE, ValueConfig};

/// Words of a request where its remote and its local side begin.
const REMOTE: usize = 4;
const LOCAL: usize = 6;

/// The local endpoint, and the peer's endpoint, which exists.
#[derive(Clone, Copy)]
pub(super) struct Path<'a, const LOAD_FIRST: bool> {
    pub(super) poster: Poster<'a>,
    pub(super) target: Target<'a, LOAD_FIRST>,
}

impl<const LOAD_FIRST: bool> Path<'_, LOAD_FIRST> {
    /// Writes the first half of request `idx`.
    #[inline(always)]
    fn begin(self, idx: u32, meta: impl Fn(WqeTemplate) -> [u64; 4]) -> Slot {
        let (slot, phase) = self.poster.slot(idx);
        let words = self.target.words();
        // Each part is read where it is used.
        let [head, ..] = meta(WqeTemplate { head: read(&words.head), ..WqeTemplate::default() });
        slot.put(0, [head | phase]);
        let [_, second, ..] = meta(WqeTemplate { second: read(&words.second), ..WqeTemplate::default() });
        slot.put(1, [second]);
        let [.., third, fourth] = meta(WqeTemplate { third: read(&words.third), ..WqeTemplate::default() });
        slot.put(2, [third, fourth]);
        slot
    }
}

/// A request of the fast path.
pub(super) trait FastPathRequest<'a>: EncodeWqe {
    /// The local endpoint.
    fn poster(&self) -> Poster<'a>;
}

/// The step that is left of an operation. It is rare, and a call with the arguments of the operation, because a request that is
/// passed by reference would have to lie in memory for every post.
pub(crate) enum Rest<'a> {
    /// None: the request is rung, or another poster rings it.
    Done,
    /// The step after the mark.
    Finish(Endpoint<'a>, AfterMark),
    /// There was no room at once: post under this reservation. In the exclusive mode nothing is reserved.
    Wait(u64),
    /// The whole operation, which takes the slow path or has an argument out of range.
    Slow,
}

/// Posts a request by the `combining` policy.
#[inline(always)]
pub(super) fn post<'a, S: Share>(request: impl FastPathRequest<'a>, aggregate: bool) -> Rest<'a> {
    let poster = request.poster();
    if S::EXCLUSIVE {
        return match combining::try_post_exclusive(poster, aggregate, request) {
            Ok(()) => Rest::Done,
            Err(NoRoom { reserved }) => Rest::Wait(reserved),
        };
    }
    match combining::try_post::<S, _>(poster, aggregate, request) {
        Ok(AfterMark { next: Next::Nothing, .. }) => Rest::Done,
        Ok(after) => Rest::Finish(poster.endpoint(), after),
        Err(NoRoom { reserved }) => Rest::Wait(reserved),
    }
}

/// Posts `place` under a reservation, or in the exclusive mode, waiting for room. Without a reservation, the lanes of a warp that make
/// this call at the same time post together.
#[inline(always)]
pub(super) fn post_waiting<S: Share>(
    endpoint: Endpoint<'_>,
    aggregate: bool,
    place: impl EncodeWqe,
    reserved: Option<u64>,
) -> Result<(), Status> {
    let Some(mut reserved) = reserved else {
        #[cfg(target_arch = "nvptx64")]
        return super::warp::join(endpoint, aggregate, place);
        #[cfg(not(target_arch = "nvptx64"))]
        return Err(Status::InvalidArgument);
    };
    if S::EXCLUSIVE {
        loop {
            combining::wait_exclusive(endpoint, limits_of(endpoint), reserved)?;
            match combining::try_post_exclusive(endpoint, aggregate, place) {
                Ok(()) => return Ok(()),
                Err(none) => reserved = none.reserved,
            }
        }
    }
    combining::post_reserved::<S, _>(endpoint, limits_of(endpoint), reserved, aggregate, place)
}

/// A write of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Put<'a, const LOAD_FIRST: bool> {
    pub(super) path: Path<'a, LOAD_FIRST>,
    pub(super) remote: RemoteSpan<'a, LOAD_FIRST>,
    pub(super) local: LocalSpan<'a, LOAD_FIRST>,
    pub(super) bytes: u32,
}

impl<const LOAD_FIRST: bool> Put<'_, LOAD_FIRST> {
    #[inline(always)]
    fn encode_as(self, idx: u32, meta: impl Fn(WqeTemplate) -> [u64; 4]) {
        let slot = self.path.begin(idx, meta);
        slot.put(REMOTE, remote_words(self.remote.memory(), self.bytes));
        slot.put(LOCAL, local_words(self.local.sge(self.bytes)));
        // A request of 64 bytes in a queue of wide requests.
        if self.path.poster.is_wide() {
            slot.pad();
        }
    }
}

impl<const LOAD_FIRST: bool> EncodeWqe for Put<'_, LOAD_FIRST> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.encode_as(idx, WqeTemplate::write_meta);
    }
}

/// A read into one buffer.
#[derive(Clone, Copy)]
pub(super) struct Get<'a, const LOAD_FIRST: bool>(pub(super) Put<'a, LOAD_FIRST>);

impl<const LOAD_FIRST: bool> EncodeWqe for Get<'_, LOAD_FIRST> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.0.encode_as(idx, WqeTemplate::read_meta);
    }
}

/// Posts a put, or a get, under a reservation. `local` is address, key and length.
#[inline(always)]
pub(super) fn put_waiting<S: Share>(
    (endpoint, target): (Endpoint<'_>, u32),
    remote: Remote,
    local: Sge,
    is_get: bool,
    aggregate: bool,
    reserved: Option<u64>,
) -> Result<(), Status> {
    let template = context_of(endpoint).tables::<ON_GPU>().target_at(target).template();
    let request = if is_get { template.read(remote, local) } else { template.write(remote, local) };
    post_waiting::<S>(endpoint, aggregate, |idx| endpoint.place(request, idx), reserved)
}

/// A value, inline in its request or through the pool. One type for both keeps one copy of the code.
#[derive(Clone, Copy)]
pub(super) struct Value<'a, const LOAD_FIRST: bool> {
    pub(super) path: Path<'a, LOAD_FIRST>,
    pub(super) remote: RemoteSpan<'a, LOAD_FIRST>,
    pub(super) value: u64,
    pub(super) size: ValueSize,
    pub(super) config: Constant<'a, ValueConfig>,
}

impl<const LOAD_FIRST: bool> Value<'_, LOAD_FIRST> {
    // On a GPU a constant is a value, on a CPU a reference.
    #[allow(clippy::needless_borrow)]
    #[inline(always)]
    fn encode_as(self, idx: u32, is_inline: bool) {
        let Self { path, remote, value, size, config } = self;
        let slot =
            path.begin(idx, |template| if is_inline { template.value_meta(size) } else { template.write_meta() });
        slot.put(REMOTE, remote_words(remote.memory(), size.bytes()));
        let local =
            if is_inline { [value, 0] } else { local_words(path.poster.pool(&config, idx, value, size.bytes())) };
        slot.put(LOCAL, local);
        if is_inline {
            slot.pad();
        }
    }
}

impl<const LOAD_FIRST: bool> EncodeWqe for Value<'_, LOAD_FIRST> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.encode_as(idx, self.config.path == VALUE_INLINE);
    }
}

/// A value that travels in its request, of 128 bytes.
#[derive(Clone, Copy)]
pub(super) struct InlineValue<'a, const LOAD_FIRST: bool>(pub(super) Value<'a, LOAD_FIRST>);

impl<const LOAD_FIRST: bool> EncodeWqe for InlineValue<'_, LOAD_FIRST> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.0.encode_as(idx, true);
    }
}

/// A value that travels through its slot of the pool, in a request of 64 bytes.
#[derive(Clone, Copy)]
pub(super) struct PooledValue<'a, const LOAD_FIRST: bool>(pub(super) Value<'a, LOAD_FIRST>);

impl<const LOAD_FIRST: bool> EncodeWqe for PooledValue<'_, LOAD_FIRST> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.0.encode_as(idx, false);
    }
}

macro_rules! requests {
    ($($request:ident: |$this:ident| $poster:expr;)*) => {
        $(impl<'a, const LOAD_FIRST: bool> FastPathRequest<'a> for $request<'a, LOAD_FIRST> {
            #[inline(always)]
            fn poster(&self) -> Poster<'a> {
                let $this = self;
                $poster
            }
        })*
    };
}

requests! {
    Put: |put| put.path.poster;
    Get: |get| get.0.path.poster;
    Value: |value| value.path.poster;
    InlineValue: |value| value.0.path.poster;
    PooledValue: |value| value.0.path.poster;
}

/// Posts a value under a reservation.
#[inline(always)]
pub(super) fn value_waiting<S: Share>(
    (endpoint, target): (Endpoint<'_>, u32),
    remote: Remote,
    (value, bytes): (u64, u32),
    aggregate: bool,
    reserved: Option<u64>,
) -> Result<(), Status> {
    let template = context_of(endpoint).tables::<ON_GPU>().target_at(target).template();
    let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
    let is_inline = endpoint.value_path() == VALUE_INLINE;
    let place = |idx| {
        let request = if is_inline {
            template.write_value(remote, value, size)
        } else {
            template.write(remote, endpoint.pool_value(idx, value, bytes))
        };
        endpoint.place(request, idx);
    };
    post_waiting::<S>(endpoint, aggregate, place, reserved)
}
