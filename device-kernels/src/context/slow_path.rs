//! The slow path: the `locked` policy, transfers without bytes or of more than one work request, and signals that are raised
//! by more than one.

use super::tables::{Named, ON_GPU, Route, Tables};
use super::{Context, DATA, Span, VALUE};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Remote, Request, Sge};
use crate::post::Sharing;
use crate::status::Status;
use efa_dp_direct::wqe::words::ValueSize;
use ferrogin_ffi::ext::{VALUE_INLINE, VALUE_NONE};

/// An operation's peer, action and flags.
#[derive(Clone, Copy)]
pub(super) struct Operation {
    pub(super) peer: u32,
    pub(super) action: Action,
    pub(super) flags: Flags,
}

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
        let tables = self.tables::<ON_GPU>();
        tables.route(peer, action.into(), DATA)?;
        if dst.is_null() || src.is_null() {
            return Err(Status::InvalidArgument);
        }
        let (remote, local) = (tables.remote_span(dst, peer, true).memory(), tables.local_span(src, true).sge(0));
        self.put_long(Operation { peer, action, flags }, remote, local, bytes)
    }

    /// A put of at least one byte.
    pub(super) fn put_long(self, operation: Operation, remote: Remote, local: Sge, bytes: u64) -> Result<(), Status> {
        let Operation { peer, action, flags } = operation;
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(peer, action.into(), DATA)?;
        let template = tables.target(route).existing()?;
        let largest = u64::from(self.ext.max_rdma_size);
        let mut done = 0;
        if bytes > largest {
            // The first parts go through the data endpoint without the action. The last part carries the action, after they
            // have completed. The target of the action must exist before any part is posted.
            let data = tables.route(peer, Action::NONE.into(), DATA)?;
            let data_template = tables.target(data).existing()?;
            while bytes - done > largest {
                let (to, from) = part_of(remote, local, done, largest as u32);
                let request = data_template.write(to, from);
                self.post(tables.endpoint(data), flags, flags.is_aggregate(), request, None)?;
                done += largest;
            }
            if !action.is_none() {
                // The flush rings what was aggregated.
                self.flush_endpoint(DATA)?;
            }
        }
        let (remote, local) = part_of(remote, local, done, (bytes - done) as u32);
        self.write(tables, route, operation, (template.write(remote, local), None))
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
        let tables = self.tables::<ON_GPU>();
        tables.route(peer, action.into(), VALUE)?;
        if dst.is_null() {
            return Err(Status::InvalidArgument);
        }
        let remote = tables.remote_span(dst, peer, true).memory();
        self.put_value_at(Operation { peer, action, flags }, remote, value, bytes)
    }

    /// A value to that place.
    pub(super) fn put_value_at(
        self,
        operation: Operation,
        remote: Remote,
        value: u64,
        bytes: u32,
    ) -> Result<(), Status> {
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(operation.peer, operation.action.into(), VALUE)?;
        let template = tables.target(route).existing()?;
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        if operation.action.counter_slot() != 0 {
            return Err(Status::InvalidArgument);
        }
        let request = match tables.endpoint(route).takes_values() {
            VALUE_NONE => return Err(Status::Unsupported),
            VALUE_INLINE => (template.write_value(remote, value, size), None),
            // The policy chooses the number, and with it the slot.
            _ => (template.write(remote, Sge { addr: 0, length: bytes, lkey: 0 }), Some((value, bytes))),
        };
        self.write(tables, route, operation, request)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn get_slow(self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(peer, Action::NONE.into(), DATA)?;
        if remote.is_null() || local.is_null() {
            return Err(Status::InvalidArgument);
        }
        let template = tables.target(route).existing()?;
        let (from, into) = (tables.remote_span(remote, peer, true).memory(), tables.local_span(local, true).sge(0));
        let largest = u64::from(self.ext.max_rdma_size);
        let mut done = 0;
        loop {
            let length = (bytes - done).min(largest);
            let (from, into) = part_of(from, into, done, length as u32);
            done += length;
            let is_last = done == bytes;
            let request = template.read(from, into);
            self.post(tables.endpoint(route), flags, flags.is_aggregate() || !is_last, request, None)?;
            if is_last {
                return Ok(());
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn signal_slow(self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(peer, action.into(), DATA)?;
        let request = empty(tables, route, peer)?;
        self.write(tables, route, Operation { peer, action, flags }, (request, None))
    }

    /// Posts a write, with the value for a slot of the pool if there is one, and raises the signal.
    ///
    /// The card's counter ticks once for each write, so a signal that is raised by `n` takes `n - 1` empty writes more. They
    /// share the write's endpoint, unless that endpoint is a counter's, and a doorbell.
    #[inline(never)]
    fn write(
        self,
        tables: Tables<'_>,
        route: Route,
        Operation { peer, action, flags }: Operation,
        (request, pooled): (Request, Option<(u64, u32)>),
    ) -> Result<(), Status> {
        let mut left = route.raised_by.saturating_sub(1);
        let extra = match action.counter_slot() {
            0 => route.poster,
            _ => tables.route(peer, Named { counter: 0, ..action.into() }, DATA)?.poster,
        };
        let more = left != 0 && extra == route.poster;
        self.post(tables.endpoint(route), flags, flags.is_aggregate() || more, request, pooled)?;
        let empty = empty(tables, route, peer)?;
        while left != 0 {
            left -= 1;
            self.post(self.endpoint(extra), flags, flags.is_aggregate() || left != 0, empty, None)?;
        }
        Ok(())
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

/// `length` bytes of both sides, `done` bytes behind their beginning.
fn part_of(remote: Remote, local: Sge, done: u64, length: u32) -> (Remote, Sge) {
    let remote = Remote { addr: remote.addr.wrapping_add(done), ..remote };
    (remote, Sge { addr: local.addr.wrapping_add(done), length, ..local })
}

/// A write without bytes.
fn empty(tables: Tables<'_>, route: Route, peer: u32) -> Result<Request, Status> {
    let template = tables.target(route).existing()?;
    let scratch = tables.scratch();
    Ok(template.write(tables.remote_span(scratch, peer, true).memory(), tables.local_span(scratch, true).sge(0)))
}
