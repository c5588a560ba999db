//! The fast path: operations of one work request by the `combining` policy.

use super::tables::{Target, context_of, limits_of};
use crate::action::Flags;
use crate::constant::{Constant, read};
use crate::endpoint::{Endpoint, Poster, Remote, Sge, Slot};
use crate::platform::in_register;
use crate::post::combining::{self, AfterMark, Next, NoRoom};
use crate::post::{EncodeWqe, Share};
use crate::status::{Code, Status};
use core::ffi::c_int;
use efa_dp_direct::wqe::words::{ValueSize, WqeTemplate, local_words, remote_words, with_imm};
use ferrogin_ffi::ext::{EndpointExt, MAX_TARGETS, VALUE_INLINE, ValueConfig};

/// Words of a request where its remote and its local side begin.
const REMOTE: usize = 4;
const LOCAL: usize = 6;

/// The local endpoint, and the peer's endpoint, which exists.
#[derive(Clone, Copy)]
pub(super) struct Path<'a> {
    pub(super) poster: Poster<'a>,
    pub(super) target: Target<'a>,
}

impl Path<'_> {
    /// The slot of request `idx`, and the template's first word in its phase.
    #[inline(always)]
    fn slot(self, idx: u32) -> (Slot, u64) {
        let (slot, phase) = self.poster.slot(idx);
        (slot, read(&self.target.words.head) | phase)
    }

    /// Writes the first half of a request into its slot.
    #[inline(always)]
    fn begin(self, (slot, head): (Slot, u64), imm: impl Imm, meta: impl Fn(WqeTemplate) -> [u64; 4]) -> Slot {
        let words = self.target.words;
        // Each part is read where it is used.
        let [head, ..] = imm.with(meta(WqeTemplate { head, ..WqeTemplate::default() }));
        slot.put(0, [head]);
        let [_, second, ..] = imm.with(meta(WqeTemplate { second: read(&words.second), ..WqeTemplate::default() }));
        slot.put(1, [second]);
        let [.., third, fourth] = meta(WqeTemplate { third: read(&words.third), ..WqeTemplate::default() });
        slot.put(2, [third, fourth]);
        slot
    }
}

/// A request of the fast path.
pub(super) trait FastPathRequest<'a>: EncodeWqe {
    /// Its endpoints.
    fn path(&self) -> Path<'a>;
    /// Does what [`post`] left.
    fn finish<S: Share>(self, rest: Rest, word: u64) -> Code;
}

/// The remaining step of an operation, in one word: the kind (2 bits), `how` it is posted (2 bits), and the index of the target (28 bits), or
/// where nothing was posted the peer. Without a kind, the number of the step after the mark, a [`Next`], to which the state belongs.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Rest(pub(super) u32);

const HOW_SHIFT: u32 = 28;
const _: () = assert!(MAX_TARGETS == 1 << HOW_SHIFT && AGGREGATE + TOGETHER < 1 << (KIND_SHIFT - HOW_SHIFT));
/// Where the kind begins.
pub const KIND_SHIFT: u32 = 30;

/// Kind: the whole operation, by the slow path. Nothing was posted.
pub(super) const SLOW_PATH: u32 = 1;
/// Kind: wait for room for the reservation that the word is, then post. In the exclusive mode nothing is reserved. Nor is it with
/// [`TOGETHER`]: post together with the other lanes that are here at the same time.
pub(super) const POST: u32 = 2;
/// Kind: return an error. An argument is out of range, and nothing was posted.
pub const INVALID: u32 = 3;

/// `how`: the aggregate flag.
pub const AGGREGATE: u32 = Flags::AGGREGATE.bits();
/// `how`: several lanes of a warp are in the call, and post together. On a CPU it has no meaning.
pub const TOGETHER: u32 = 1;

impl Rest {
    #[inline(always)]
    pub(super) fn new(kind: u32, target: u32, how: u32) -> Self {
        Rest(kind << KIND_SHIFT | how << HOW_SHIFT | target)
    }

    /// With the number of bytes above it: one parameter less, so that a CPU calls `finish_*` in tail position.
    #[inline(always)]
    pub(super) fn with_length(self, length: u32) -> u64 {
        u64::from(self.0) | u64::from(length) << 32
    }

    fn and_length(word: u64) -> (Rest, u32) {
        (Rest(word as u32), (word >> 32) as u32)
    }

    pub(super) fn kind(self) -> u32 {
        self.0 >> KIND_SHIFT
    }

    /// Returns whether nothing was posted, and the fast path does not post it.
    pub(super) fn is_undone(self) -> bool {
        matches!(self.kind(), SLOW_PATH | INVALID)
    }

    /// Returns whether several lanes of a warp are in the call.
    pub(super) fn is_together(self) -> bool {
        self.0 & TOGETHER << HOW_SHIFT != 0
    }

    pub(super) fn target(self) -> u32 {
        self.0 & (MAX_TARGETS as u32 - 1)
    }

    pub(super) fn is_aggregate(self) -> bool {
        self.0 & AGGREGATE << HOW_SHIFT != 0
    }

    /// The reservation under which the request is posted; none where lanes post together.
    fn reserved(self, word: u64) -> Option<u64> {
        (!self.is_together()).then_some(word)
    }
}

/// Posts a request by the `combining` policy, in a straight line. Returns the rare step that is left, and its word.
#[inline(always)]
pub(super) fn post<'a, S: Share>(request: impl FastPathRequest<'a>, aggregate: bool) -> (Rest, u64) {
    match try_post::<S>(request, aggregate) {
        Ok(AfterMark { next, state }) => (Rest(next as u32), state),
        Err(NoRoom { reserved }) => (no_room(request.path(), aggregate), reserved),
    }
}

/// Posts a request, and carries out the rare step that is left.
#[inline(always)]
pub(super) fn post_and_finish<'a, S: Share>(request: impl FastPathRequest<'a>, aggregate: bool) -> Code {
    match try_post::<S>(request, aggregate) {
        Ok(AfterMark { next: Next::Nothing, .. }) => Code::OK,
        Ok(AfterMark { next, state }) => {
            finish_mark::<S>(request.path().poster.endpoint().as_ptr(), next as u32, state)
        }
        Err(NoRoom { reserved }) => request.finish::<S>(no_room(request.path(), aggregate), reserved),
    }
}

#[inline(always)]
fn try_post<'a, S: Share>(request: impl FastPathRequest<'a>, aggregate: bool) -> Result<AfterMark, NoRoom> {
    let poster = request.path().poster;
    if S::EXCLUSIVE {
        combining::try_post_exclusive(poster, aggregate, request).map(|()| AfterMark { next: Next::Nothing, state: 0 })
    } else {
        combining::try_post::<S, _>(poster, aggregate, request)
    }
}

#[inline(always)]
fn no_room(Path { poster, target }: Path<'_>, aggregate: bool) -> Rest {
    Rest::new(POST, target.index(poster.endpoint()), if aggregate { AGGREGATE } else { 0 })
}

/// Carries out the step that follows a mark.
#[cold]
#[inline(never)]
extern "C" fn finish_mark<S: Share>(poster: *const EndpointExt, next: u32, state: u64) -> Code {
    // SAFETY: the endpoint of a post, which the plugin keeps as long as the context.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    combining::finish::<S, _>(endpoint, AfterMark { next: Next::from_number(next), state });
    // The compiler would make no call in tail position of a function that it knows to return 0.
    Code(in_register(0) as c_int)
}

/// Takes the step after the mark, or posts `place` under a reservation, or in the exclusive mode, waiting for room. Without a
/// reservation, the lanes of a warp that make this call at the same time post together.
#[inline(always)]
fn finish<S: Share>(endpoint: Endpoint<'_>, place: impl EncodeWqe, rest: Rest, word: u64) -> Result<(), Status> {
    if rest.kind() != POST && !S::EXCLUSIVE {
        combining::finish::<S, _>(endpoint, AfterMark { next: Next::from_number(rest.0), state: word });
        return Ok(());
    }
    let aggregate = rest.is_aggregate();
    let Some(mut reserved) = rest.reserved(word) else {
        #[cfg(target_arch = "nvptx64")]
        return super::group::join(endpoint, aggregate, place);
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

/// The immediate data of a request, in which an emulated signal travels: none, or a word.
pub(super) trait Imm: Copy {
    /// The request, or its first half, with the data.
    fn with<const N: usize>(self, words: [u64; N]) -> [u64; N];
}

impl Imm for () {
    #[inline(always)]
    fn with<const N: usize>(self, words: [u64; N]) -> [u64; N] {
        words
    }
}

impl Imm for u32 {
    #[inline(always)]
    fn with<const N: usize>(self, words: [u64; N]) -> [u64; N] {
        with_imm(words, self)
    }
}

/// A write of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Put<'a, I = ()> {
    pub(super) path: Path<'a>,
    pub(super) sides: Sides,
    pub(super) imm: I,
}

impl<'a> Put<'a> {
    #[inline(always)]
    pub(super) fn with_imm(self, imm: u32) -> Put<'a, u32> {
        Put { path: self.path, sides: self.sides, imm }
    }
}

/// The remote and the local side of a request, as it has them.
#[derive(Clone, Copy)]
pub(super) struct Sides {
    remote: [u64; 2],
    local: [u64; 2],
}

impl Sides {
    #[inline(always)]
    pub(super) fn new(remote: Remote, local: Sge) -> Self {
        let [remote_keys, local_keys] = [remote_words(remote, local.length), local_words(local)];
        Sides { remote: remote_keys.map(in_register), local: local_keys.map(in_register) }
    }

    /// Address on the peer.
    #[inline(always)]
    pub(super) fn remote_addr(self) -> u64 {
        self.remote[1]
    }

    /// Address on this rank.
    #[inline(always)]
    pub(super) fn local_addr(self) -> u64 {
        self.local[1]
    }

    /// The remote key, and above it the local key.
    #[inline(always)]
    pub(super) fn keys(self) -> u64 {
        self.remote[0] >> 32 | self.local[0] >> 32 << 32
    }
}

impl<I: Imm> Put<'_, I> {
    #[inline(always)]
    fn encode_as(self, idx: u32, meta: impl Fn(WqeTemplate) -> [u64; 4]) {
        let slot = self.path.begin(self.path.slot(idx), self.imm, meta);
        slot.put(REMOTE, self.sides.remote);
        slot.put(LOCAL, self.sides.local);
        // A request of 64 bytes in a queue of wide requests.
        if self.path.poster.is_wide() {
            slot.pad();
        }
    }

    #[inline(always)]
    fn finish_as<S: Share, const GET: bool>(self, rest: Rest, word: u64) -> Code {
        let Put { path, sides, imm } = self;
        let (poster, length) = (path.poster.endpoint().as_ptr(), sides.remote[0] as u32);
        let rest = rest.with_length(length);
        finish_put::<S, I, GET>(poster, word, sides.remote_addr(), sides.local_addr(), sides.keys(), rest, imm)
    }
}

/// Does what [`post`] left of a put, or of a get.
#[cold]
#[inline(never)]
pub(super) extern "C" fn finish_put<S: Share, I: Imm, const GET: bool>(
    poster: *const EndpointExt,
    word: u64,
    remote: u64,
    local: u64,
    keys: u64,
    rest: u64,
    imm: I,
) -> Code {
    let (rest, length) = Rest::and_length(rest);
    // SAFETY: the endpoint of a post, which the plugin keeps as long as the context.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let (remote, local) =
        (Remote { addr: remote, rkey: keys as u32 }, Sge { addr: local, lkey: (keys >> 32) as u32, length });
    let template = context_of(endpoint).template_at(rest.target());
    let request = imm.with(if GET { template.read(remote, local) } else { template.write(remote, local) });
    finish::<S>(endpoint, |idx| endpoint.place(request, idx), rest, word).into()
}

impl<I: Imm> EncodeWqe for Put<'_, I> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.encode_as(idx, WqeTemplate::write_meta);
    }
}

impl<'a, I: Imm> FastPathRequest<'a> for Put<'a, I> {
    #[inline(always)]
    fn path(&self) -> Path<'a> {
        self.path
    }

    #[inline(always)]
    fn finish<S: Share>(self, rest: Rest, word: u64) -> Code {
        self.finish_as::<S, false>(rest, word)
    }
}

/// A read into one buffer.
#[derive(Clone, Copy)]
pub(super) struct Get<'a>(pub(super) Put<'a>);

impl EncodeWqe for Get<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.0.encode_as(idx, WqeTemplate::read_meta);
    }
}

impl<'a> FastPathRequest<'a> for Get<'a> {
    #[inline(always)]
    fn path(&self) -> Path<'a> {
        self.0.path
    }

    #[inline(always)]
    fn finish<S: Share>(self, rest: Rest, word: u64) -> Code {
        self.0.finish_as::<S, true>(rest, word)
    }
}

/// A value, inline in its request of 128 bytes, or through its slot of the pool. One type for both keeps one copy of the code.
#[derive(Clone, Copy)]
pub(super) struct Value<'a, I = ()> {
    pub(super) path: Path<'a>,
    pub(super) imm: I,
    pub(super) remote: [u64; 2],
    pub(super) value: u64,
    pub(super) config: Constant<'a, ValueConfig>,
}

impl<'a> Value<'a> {
    #[inline(always)]
    pub(super) fn with_imm(self, imm: u32) -> Value<'a, u32> {
        let Self { path, remote, value, config, .. } = self;
        Value { path, imm, remote, value, config }
    }
}

impl<I: Imm> Value<'_, I> {
    // On a GPU a constant is a value, on a CPU a reference.
    #[allow(clippy::needless_borrow)]
    #[inline(always)]
    fn encode_as(self, idx: u32, slot: (Slot, u64), is_inline: bool) {
        let Self { path, imm, remote, value, config } = self;
        let size = ValueSize::of(remote);
        let slot =
            path.begin(slot, imm, |template| if is_inline { template.value_meta(size) } else { template.write_meta() });
        slot.put(REMOTE, remote);
        let local =
            if is_inline { [value, 0] } else { local_words(path.poster.pool(&config, idx, value, size.bytes())) };
        slot.put(LOCAL, local);
        if is_inline {
            slot.pad();
        }
    }
}

impl<I: Imm> EncodeWqe for Value<'_, I> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let slot = self.path.slot(idx);
        match self.config.path == VALUE_INLINE {
            // A CPU branches once.
            is_inline if cfg!(target_arch = "nvptx64") => self.encode_as(idx, slot, is_inline),
            true => self.encode_as(idx, slot, true),
            false => self.encode_as(idx, slot, false),
        }
    }
}

impl<'a, I: Imm> FastPathRequest<'a> for Value<'a, I> {
    #[inline(always)]
    fn path(&self) -> Path<'a> {
        self.path
    }

    #[inline(always)]
    fn finish<S: Share>(self, rest: Rest, word: u64) -> Code {
        let Value { path, imm, remote, value, .. } = self;
        let (poster, rest) = (path.poster.endpoint().as_ptr(), rest.with_length(ValueSize::of(remote).bytes()));
        finish_value::<S, I>(poster, word, remote[1], value, (remote[0] >> 32) as u32, rest, imm)
    }
}

/// Does what [`post`] left of a value.
#[cold]
#[inline(never)]
pub(super) extern "C" fn finish_value<S: Share, I: Imm>(
    poster: *const EndpointExt,
    word: u64,
    remote: u64,
    value: u64,
    rkey: u32,
    rest: u64,
    imm: I,
) -> Code {
    let (rest, bytes) = Rest::and_length(rest);
    // SAFETY: the endpoint of a post, which the plugin keeps as long as the context.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let remote = Remote { addr: remote, rkey };
    let size = ValueSize::of(remote_words(remote, bytes));
    let is_inline = endpoint.value_path() == VALUE_INLINE;
    let template = context_of(endpoint).template_at(rest.target());
    let place = |idx| {
        let request = if is_inline {
            template.write_value(remote, value, size)
        } else {
            template.write(remote, endpoint.pool_value(idx, value, bytes))
        };
        endpoint.place(imm.with(request), idx);
    };
    finish::<S>(endpoint, place, rest, word).into()
}
