//! What has no short way: the `locked` policy, transfers of no bytes or of more than one work request, and signals that
//! are raised by more than one.

use super::tables::{local as near_sge, remote as far_side, stamp};
use super::{Context, DATA, Route, VALUE, Window};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Request, Sge};
use crate::post::Sharing;
use crate::status::Status;
use efa_dp_direct::wqe::words::{Stamp, ValueSize};
use ferrogin_ffi::ext::{VALUE_GENERAL, VALUE_INLINE};

/// Bits of an action that name a counter.
const COUNTER: u64 = 0xffff_0000;

impl Context<'_> {
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
            self.target(peer, route)?;
            let data = self.plain_route(DATA);
            let data_stamp = stamp(self.target(peer, data)?);
            while left > largest {
                let (far, near) =
                    (far_side(self.far(dst, peer), dst_off), near_sge(self.near(src), src_off, largest as u32));
                let part = data_stamp.write(far, near);
                self.post(self.poster(data), flags, flags.is_aggregate(), part, None)?;
                dst_off = dst_off.wrapping_add(largest);
                src_off = src_off.wrapping_add(largest);
                left -= largest;
            }
            if !action.is_none() {
                // It rings what was aggregated.
                self.flush_endpoint(DATA)?;
            }
        }
        let (far, near) = (far_side(self.far(dst, peer), dst_off), near_sge(self.near(src), src_off, left as u32));
        let request = stamp(self.target(peer, route)?).write(far, near);
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
        let far = far_side(self.far(dst, peer), dst_off);
        let endpoint = self.poster(route);
        let stamp = stamp(self.target(peer, route)?);
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        let request = match endpoint.takes_values() {
            VALUE_GENERAL => return Err(Status::Unsupported),
            VALUE_INLINE => (stamp.write_value(far, value, size), None),
            // The slot follows with the number.
            _ => (stamp.write(far, Sge { addr: 0, length: bytes, lkey: 0 }), Some((value, bytes))),
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
        let stamp = stamp(self.target(peer, route)?);
        let (mut done, mut left) = (0u64, bytes);
        loop {
            let part = left.min(u64::from(self.ext.max_rdma_size));
            let far = far_side(self.far(remote, peer), remote_off.wrapping_add(done));
            let near = near_sge(self.near(local), local_off.wrapping_add(done), part as u32);
            let request = stamp.read(far, near);
            self.post(self.poster(route), flags, flags.is_aggregate() || part < left, request, None)?;
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
        let request = self.empty(stamp(self.target(peer, route)?), peer);
        self.write(route, peer, action, flags, (request, None))
    }

    /// Posts a write, with the value for a slot of the pool if there is one, and raises the signal.
    ///
    /// The card's counter ticks once for each write, so raising by `n` takes `n - 1` empty writes more. They share the
    /// write's endpoint, unless that is a counter's, and a doorbell.
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
        let extra = match action.local_counter() {
            Some(_) => self.route_of(Action::from_bits(action.bits() & !COUNTER), DATA)?,
            None => route,
        };
        let more = left != 0 && extra.poster == route.poster;
        self.post(self.poster(route), flags, flags.is_aggregate() || more, request, pooled)?;
        let empty = self.empty(stamp(self.target(peer, route)?), peer);
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
