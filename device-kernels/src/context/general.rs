//! What has no short way: the `locked` policy, transfers of no bytes or of more than one work request, and signals that
//! are raised by more than one.

use super::{Context, DATA, Route, VALUE, Window, value_mask};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Request, Sge};
use crate::post::Sharing;
use crate::status::Status;
use efa_dp_direct::wqe::words::Stamp;
use ferrogin_ffi::ext::{VALUE_GENERAL, VALUE_INLINE};

/// Bits of an action that name a counter.
const COUNTER: u64 = 0xffff_0000;

impl Context<'_> {
    /// [`Context::put`] in whatever mode, for the C functions, which inline the plainest alone.
    #[allow(clippy::too_many_arguments)]
    #[inline(never)]
    pub(crate) fn put_of_any_kind(
        self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        src: Window,
        src_off: u64,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        self.put(peer, dst, dst_off, src, src_off, bytes, action, flags)
    }

    /// [`Context::put_value`] in whatever mode.
    #[allow(clippy::too_many_arguments)]
    #[inline(never)]
    pub(crate) fn put_value_of_any_kind(
        self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        self.put_value(peer, dst, dst_off, value, bytes, action, flags)
    }

    /// [`Context::get`] in whatever mode.
    #[allow(clippy::too_many_arguments)]
    #[inline(never)]
    pub(crate) fn get_of_any_kind(
        self,
        peer: u32,
        remote: Window,
        remote_off: u64,
        local: Window,
        local_off: u64,
        bytes: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        self.get(peer, remote, remote_off, local, local_off, bytes, flags)
    }

    /// [`Context::signal`] in whatever mode.
    #[inline(never)]
    pub(crate) fn signal_of_any_kind(self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        self.signal(peer, action, flags)
    }

    #[allow(clippy::too_many_arguments)]
    #[cold]
    #[inline(never)]
    pub(super) fn put_general(
        self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        src: Window,
        src_off: u64,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        if bytes == 0 {
            return self.signal_general(peer, action, flags);
        }
        let route = self.route(peer, action, DATA)?;
        if dst.is_null() || src.is_null() {
            return Err(Status::InvalidArgument);
        }
        let largest = u64::from(self.ext.max_rdma_size);
        let (mut dst_off, mut src_off, mut left) = (dst_off, src_off, bytes);
        if left > largest {
            // Leading parts go unannounced through the data endpoint; the last carries the action, once they have
            // completed. The target of the action must exist before anything is posted.
            self.to(peer, route)?;
            let data = self.to(peer, self.plain_route(DATA))?;
            while left > largest {
                let (remote, local) = (self.remote(dst, dst_off, peer), self.local(src, src_off, largest as u32));
                let part = data.stamp().write(remote, local);
                self.post(data.poster(), flags, flags.is_aggregate(), part, None)?;
                dst_off = dst_off.wrapping_add(largest);
                src_off = src_off.wrapping_add(largest);
                left -= largest;
            }
            if !action.is_none() {
                // It rings what was aggregated.
                self.flush_endpoint(DATA)?;
            }
        }
        let (remote, local) = (self.remote(dst, dst_off, peer), self.local(src, src_off, left as u32));
        let request = self.to(peer, route)?.stamp().write(remote, local);
        self.write(route, peer, action, flags, (request, None))
    }

    #[allow(clippy::too_many_arguments)]
    #[cold]
    #[inline(never)]
    pub(super) fn put_value_general(
        self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let route = self.route(peer, action, VALUE)?;
        if dst.is_null() || action.local_counter().is_some() {
            return Err(Status::InvalidArgument);
        }
        let (remote, mask) = (self.remote(dst, dst_off, peer), value_mask(bytes)?);
        let endpoint = self.poster(route);
        let stamp = self.to(peer, route)?.stamp();
        let request = match endpoint.takes_values() {
            VALUE_GENERAL => return Err(Status::Unsupported),
            VALUE_INLINE => (stamp.write_value(remote, value & mask, bytes), None),
            // The slot follows with the number.
            _ => (stamp.write(remote, Sge { addr: 0, length: bytes, lkey: 0 }), Some((value, bytes))),
        };
        self.write(route, peer, action, flags, request)
    }

    #[allow(clippy::too_many_arguments)]
    #[cold]
    #[inline(never)]
    pub(super) fn get_general(
        self,
        peer: u32,
        remote: Window,
        remote_off: u64,
        local: Window,
        local_off: u64,
        bytes: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        let route = self.route(peer, Action::NONE, DATA)?;
        if remote.is_null() || local.is_null() {
            return Err(Status::InvalidArgument);
        }
        let to = self.to(peer, route)?;
        let (mut done, mut left) = (0u64, bytes);
        loop {
            let part = left.min(u64::from(self.ext.max_rdma_size));
            let far = self.remote(remote, remote_off.wrapping_add(done), peer);
            let near = self.local(local, local_off.wrapping_add(done), part as u32);
            let request = to.stamp().read(far, near);
            self.post(to.poster(), flags, flags.is_aggregate() || part < left, request, None)?;
            done = done.wrapping_add(part);
            left -= part;
            if left == 0 {
                return Ok(());
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn signal_general(self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        let route = self.route(peer, action, DATA)?;
        let request = self.empty(self.to(peer, route)?.stamp(), peer);
        self.write(route, peer, action, flags, (request, None))
    }

    /// Posts a write, with the value for a slot of the pool if there is one, and raises the signal.
    ///
    /// The card's counter ticks once for each write, so raising by `n` takes `n - 1` empty writes more. They never go
    /// through a counter's endpoint, and share a doorbell.
    #[inline(never)]
    fn write(
        self,
        route: Route,
        peer: u32,
        action: Action,
        flags: Flags,
        (request, pooled): (Request, Option<(u64, u32)>),
    ) -> Result<(), Status> {
        let mut left = route.raised_by.saturating_sub(1);
        let extra = self.route_of(Action::from_bits(action.bits() & !COUNTER), DATA)?;
        let more = left != 0 && extra.poster == route.poster;
        self.post(self.poster(route), flags, flags.is_aggregate() || more, request, pooled)?;
        let empty = self.empty(self.stamp(route, peer), peer);
        while left != 0 {
            left -= 1;
            self.post(self.poster(extra), flags, flags.is_aggregate() || left != 0, empty, None)?;
        }
        Ok(())
    }

    fn empty(self, stamp: Stamp, peer: u32) -> Request {
        stamp.write(self.scratch_remote(peer), self.scratch_local())
    }

    fn post(
        self,
        poster: Endpoint<'_>,
        flags: Flags,
        aggregate: bool,
        request: Request,
        pooled: Option<(u64, u32)>,
    ) -> Result<(), Status> {
        let alone = flags.mode() == Sharing::Thread;
        poster.post(self.ext.policy, alone, self.limits(), aggregate, request, pooled)
    }

    pub(super) fn flush_endpoint(self, i: u32) -> Result<(), Status> {
        let endpoint = self.endpoint(i);
        match endpoint.begin_flush(self.ext.policy, self.limits())? {
            Some(at) => endpoint.wait_flushed(self.ext.policy, self.limits(), at),
            None => Ok(()),
        }
    }
}
