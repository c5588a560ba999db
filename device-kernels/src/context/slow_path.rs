//! The slow path: the `locked` policy, transfers without bytes or of more than one work request, and signals that are raised
//! by more than one.

use super::tables::template;
use super::{Context, DATA, Route, Span, VALUE};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Request, Sge};
use crate::post::Sharing;
use crate::status::Status;
use efa_dp_direct::wqe::words::{ValueSize, WqeTemplate};
use ferrogin_ffi::ext::{VALUE_INLINE, VALUE_NONE};

/// Bits of an action that name a counter.
const COUNTER: u64 = 0xffff_0000;

impl Context<'_> {
    #[cold]
    #[inline(never)]
    pub(super) fn put_slow(
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        if bytes == 0 {
            return self.signal_slow(peer, action, flags);
        }
        let route = self.route(peer, action, DATA)?;
        if dst.is_null() || src.is_null() {
            return Err(Status::InvalidArgument);
        }
        let largest = u64::from(self.ext.max_rdma_size);
        let (mut dst, mut src, mut left) = (dst, src, bytes);
        if left > largest {
            // The first parts go through the data endpoint without the action. The last part carries the action, after they
            // have completed. The target of the action must exist before any part is posted.
            self.target(peer, route)?;
            let data = self.plain_route(DATA);
            let data_template = template(self.target(peer, data)?);
            while left > largest {
                let (remote, local) = (self.remote_span(dst, peer).memory(), self.local_span(src).sge(largest as u32));
                let part = data_template.write(remote, local);
                self.post(self.poster(data), flags, flags.is_aggregate(), part, None)?;
                dst = dst.skip(largest);
                src = src.skip(largest);
                left -= largest;
            }
            if !action.is_none() {
                // The flush rings what was aggregated.
                self.flush_endpoint(DATA)?;
            }
        }
        let (remote, local) = (self.remote_span(dst, peer).memory(), self.local_span(src).sge(left as u32));
        let request = template(self.target(peer, route)?).write(remote, local);
        self.write(route, peer, action, flags, (request, None))
    }

    #[cold]
    #[inline(never)]
    pub(super) fn put_value_slow(
        self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let route = self.route(peer, action, VALUE)?;
        if dst.is_null() || action.local_counter().is_some() {
            return Err(Status::InvalidArgument);
        }
        let remote = self.remote_span(dst, peer).memory();
        let endpoint = self.poster(route);
        let template = template(self.target(peer, route)?);
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        let request = match endpoint.takes_values() {
            VALUE_NONE => return Err(Status::Unsupported),
            VALUE_INLINE => (template.write_value(remote, value, size), None),
            // The policy chooses the number, and with it the slot.
            _ => (template.write(remote, Sge { addr: 0, length: bytes, lkey: 0 }), Some((value, bytes))),
        };
        self.write(route, peer, action, flags, request)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn get_slow(self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
        let route = self.route(peer, Action::NONE, DATA)?;
        if remote.is_null() || local.is_null() {
            return Err(Status::InvalidArgument);
        }
        let template = template(self.target(peer, route)?);
        let (mut done, mut left) = (0u64, bytes);
        loop {
            let part = left.min(u64::from(self.ext.max_rdma_size));
            let from = self.remote_span(remote.skip(done), peer).memory();
            let into = self.local_span(local.skip(done)).sge(part as u32);
            let request = template.read(from, into);
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
    pub(super) fn signal_slow(self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        let route = self.route(peer, action, DATA)?;
        let request = self.empty(template(self.target(peer, route)?), peer);
        self.write(route, peer, action, flags, (request, None))
    }

    /// Posts a write, with the value for a slot of the pool if there is one, and raises the signal.
    ///
    /// The card's counter ticks once for each write, so a signal that is raised by `n` takes `n - 1` empty writes more. They
    /// share the write's endpoint, unless that endpoint is a counter's, and a doorbell.
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
        let empty = self.empty(template(self.target(peer, route)?), peer);
        while left != 0 {
            left -= 1;
            self.post(self.poster(extra), flags, flags.is_aggregate() || left != 0, empty, None)?;
        }
        Ok(())
    }

    fn empty(self, template: WqeTemplate, peer: u32) -> Request {
        template.write(self.scratch_remote(peer), self.scratch_local())
    }

    fn post(
        self,
        poster: Endpoint<'_>,
        flags: Flags,
        aggregate: bool,
        request: Request,
        pooled: Option<(u64, u32)>,
    ) -> Result<(), Status> {
        let exclusive = flags.mode() == Sharing::Thread;
        poster.post(self.ext.policy, exclusive, self.limits(), aggregate, request, pooled)
    }
}
