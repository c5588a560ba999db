//! The requests of the short way. What one is made of is read when it has its number: until then its arguments stay where
//! they are, in registers.

use super::{Context, Route, Window};
use crate::endpoint::Endpoint;
use crate::post::combining::NoRoom;
use crate::post::{Share, Write};
use crate::status::Status;
use efa_dp_direct::wqe::words::Stamp;
use ferrogin_ffi::ext::{EndpointExt, TargetWords};

/// Context, endpoint, target and peer of an operation.
#[derive(Clone, Copy)]
pub(super) struct To<'a> {
    pub(super) context: Context<'a>,
    pub(super) route: Route,
    pub(super) peer: u32,
}

impl<'a> To<'a> {
    #[inline(always)]
    pub(super) fn poster(self) -> Endpoint<'a> {
        self.context.poster(self.route)
    }

    #[inline(always)]
    pub(super) fn stamp(self) -> Stamp {
        self.context.stamp(self.route, self.peer)
    }

    #[inline(always)]
    fn again(context: Context<'a>, poster: *const EndpointExt, row: *const TargetWords, peer: u32) -> Self {
        Self { context, route: Route { row, poster, raised_by: 0 }, peer }
    }
}

/// A request of the short way.
pub(super) trait Short: Write {
    /// Where it goes.
    fn to(&self) -> To<'_>;

    /// Posts it under the number that it has already, once there is room: a call that gets it in registers, since what is
    /// given by reference would have to lie in memory for every post.
    fn late<S: Share>(self, aggregate: bool, reserved: u64) -> Result<(), Status>;
}

/// Posts a request by the `combining` policy.
#[inline(always)]
pub(super) fn post<S: Share>(request: impl Short, aggregate: bool) -> Result<(), Status> {
    if S::ALONE || cfg!(target_arch = "nvptx64") {
        let to = request.to();
        return to.poster().combine::<S>(to.context.limits(), aggregate, request);
    }
    let at_once = request.to().poster().combine_at_once::<S>(aggregate, request);
    match at_once {
        Ok(()) => Ok(()),
        Err(NoRoom { reserved }) => request.late::<S>(aggregate, reserved),
    }
}

/// Waits for room, and posts.
fn post_late<S: Share>(request: impl Short, aggregate: bool, reserved: u64) -> Result<(), Status> {
    let to = request.to();
    to.poster().combine_late::<S>(to.context.limits(), aggregate, request, reserved)
}

/// The call that [`Short::late`] makes: takes a request apart, and puts it together again from the arguments.
macro_rules! late {
    ($request:ident { $($field:ident: $ty:ty),* }) => {
        #[inline(always)]
        fn to(&self) -> To<'_> {
            self.to
        }

        #[inline(always)]
        fn late<S: Share>(self, aggregate: bool, reserved: u64) -> Result<(), Status> {
            #[allow(clippy::too_many_arguments)]
            #[cold]
            #[inline(never)]
            fn call<S: Share>(
                context: Context<'_>,
                peer: u32,
                $($field: $ty,)*
                aggregate: bool,
                poster: *const EndpointExt,
                row: *const TargetWords,
                reserved: u64,
            ) -> Result<(), Status> {
                let to = To::again(context, poster, row, peer);
                post_late::<S>($request { to, $($field),* }, aggregate, reserved)
            }
            let $request { to, $($field),* } = self;
            call::<S>(to.context, to.peer, $($field,)* aggregate, to.route.poster, to.route.row, reserved)
        }
    };
}

/// A write of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Put<'a> {
    pub(super) to: To<'a>,
    pub(super) dst: Window,
    pub(super) dst_off: u64,
    pub(super) src: Window,
    pub(super) src_off: u64,
    pub(super) bytes: u32,
}

impl Write for Put<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let Self { to, dst, dst_off, src, src_off, bytes } = self;
        let (remote, local) = (to.context.remote(dst, dst_off, to.peer), to.context.local(src, src_off, bytes));
        to.poster().place(to.stamp().write(remote, local), idx);
    }
}

/// A read into one buffer.
#[derive(Clone, Copy)]
pub(super) struct Get<'a> {
    pub(super) to: To<'a>,
    pub(super) remote: Window,
    pub(super) remote_off: u64,
    pub(super) local: Window,
    pub(super) local_off: u64,
    pub(super) bytes: u32,
}

impl Write for Get<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let Self { to, remote, remote_off, local, local_off, bytes } = self;
        let (remote, local) =
            (to.context.remote(remote, remote_off, to.peer), to.context.local(local, local_off, bytes));
        to.poster().place(to.stamp().read(remote, local), idx);
    }
}

/// A write of nothing.
#[derive(Clone, Copy)]
pub(super) struct Empty<'a> {
    pub(super) to: To<'a>,
}

impl Write for Empty<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let Self { to } = self;
        let (remote, local) = (to.context.scratch_remote(to.peer), to.context.scratch_local());
        to.poster().place(to.stamp().write(remote, local), idx);
    }
}

/// A write of a value that travels in its request, of 128 bytes.
#[derive(Clone, Copy)]
pub(super) struct InlineValue<'a> {
    pub(super) to: To<'a>,
    pub(super) dst: Window,
    pub(super) dst_off: u64,
    /// Without the bytes that are not sent.
    pub(super) value: u64,
    pub(super) bytes: u32,
}

impl Write for InlineValue<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let Self { to, dst, dst_off, value, bytes } = self;
        let remote = to.context.remote(dst, dst_off, to.peer);
        to.poster().place_wide(to.stamp().write_value(remote, value, bytes), idx);
    }
}

/// A write of a value through its slot of the pool, in a request of 64 bytes.
#[derive(Clone, Copy)]
pub(super) struct PooledValue<'a> {
    pub(super) to: To<'a>,
    pub(super) dst: Window,
    pub(super) dst_off: u64,
    pub(super) value: u64,
    pub(super) bytes: u32,
}

impl Write for PooledValue<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let Self { to, dst, dst_off, value, bytes } = self;
        let (remote, local) = (to.context.remote(dst, dst_off, to.peer), to.poster().pool(idx, value, bytes));
        to.poster().place_narrow(to.stamp().write(remote, local), idx);
    }
}

impl Short for Put<'_> {
    late!(Put { dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u32 });
}

impl Short for Get<'_> {
    late!(Get { remote: Window, remote_off: u64, local: Window, local_off: u64, bytes: u32 });
}

impl Short for Empty<'_> {
    late!(Empty {});
}

impl Short for InlineValue<'_> {
    late!(InlineValue { dst: Window, dst_off: u64, value: u64, bytes: u32 });
}

impl Short for PooledValue<'_> {
    late!(PooledValue { dst: Window, dst_off: u64, value: u64, bytes: u32 });
}
