//! The slow path: the `locked` policy, transfers without bytes or of more than one work request, signals that are raised by more
//! than one, and emulated signals.

use super::payload::Payload;
use super::tables::{Name, Named, ON_GPU, Route, Tables};
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
    pub(crate) fn put_slow(
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        match self.put_with_imm(peer, dst, src, bytes, action, flags) {
            Some(code) => code.into(),
            None => self.put_slower(peer, dst, src, bytes, action, flags),
        }
    }

    /// A put that [`Context::put_with_imm`] does not post.
    pub(crate) fn put_slower(
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let operation = Operation { peer, action, flags };
        let payload = Payload::put(self.known(operation)?, peer, dst, src, bytes)?;
        self.carry_out(operation, action.named_signal(), payload)
    }

    /// An operation, with that signal if there is one. Peer and counter exist.
    #[inline(never)]
    pub(super) fn carry_out(self, operation: Operation, signal: Option<u32>, payload: Payload) -> Result<(), Status> {
        match (signal, self.emulated()) {
            (Some(id), Ok(emulated)) => self.raise_indexed(emulated, operation, payload, id),
            (Some(_), Err(unsupported)) if operation.flags.is_strong() => Err(unsupported),
            _ => match payload {
                Payload::None => self.signal_counted(operation),
                Payload::Put { remote, local, bytes } => self.put_long(operation, remote, local, bytes),
                Payload::Value { remote, value, bytes } => self.put_value_at(operation, remote, value, bytes),
            },
        }
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
    pub(crate) fn put_value_slow(
        self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        match self.put_value_with_imm(peer, dst, value, bytes, action, flags) {
            Some(code) => code.into(),
            None => self.put_value_slower(peer, dst, value, bytes, action, flags),
        }
    }

    /// A value that [`Context::put_value_with_imm`] does not post.
    pub(crate) fn put_value_slower(
        self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let operation = Operation { peer, action, flags };
        let payload = Payload::value(self.known(operation)?, peer, dst, value, bytes)?;
        self.carry_out(operation, action.named_signal(), payload)
    }

    /// A value to that place.
    fn put_value_at(self, operation: Operation, remote: Remote, value: u64, bytes: u32) -> Result<(), Status> {
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(operation.peer, operation.action.into(), VALUE)?;
        if operation.action.counter_slot() != 0 {
            return Err(Status::InvalidArgument);
        }
        self.write(tables, route, operation, value_request(tables, route, remote, value, bytes)?)
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn get_slow(self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(peer, Action::NONE.into(), DATA)?;
        if remote.is_null() || local.is_null() {
            return Err(Status::InvalidArgument);
        }
        let template = tables.target(route).existing()?;
        let (from, into) = (tables.remote(remote, peer, true), tables.local(local, true, 0));
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
    pub(crate) fn signal_slow(self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        if let Some(code) = self.signal_with_imm(peer, action, flags) {
            return code.into();
        }
        let operation = Operation { peer, action, flags };
        self.known(operation)?;
        self.carry_out(operation, action.named_signal(), Payload::None)
    }

    /// A signal that the peer's card counts, or none.
    fn signal_counted(self, operation: Operation) -> Result<(), Status> {
        let Operation { peer, action, .. } = operation;
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(peer, action.into(), DATA)?;
        let request = empty(tables, route, peer)?;
        self.write(tables, route, operation, (request, None))
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
            _ => tables.route(peer, Named { counter: Name::NONE, ..action.into() }, DATA)?.poster,
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

    pub(super) fn post(
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

/// A write of a value, and the value where it travels through a slot of the pool.
pub(super) fn value_request(
    tables: Tables<'_>,
    route: Route,
    remote: Remote,
    value: u64,
    bytes: u32,
) -> Result<(Request, Option<(u64, u32)>), Status> {
    let template = tables.target(route).existing()?;
    let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
    match tables.endpoint(route).takes_values() {
        VALUE_NONE => Err(Status::Unsupported),
        VALUE_INLINE => Ok((template.write_value(remote, value, size), None)),
        // The policy chooses the number, and with it the slot.
        _ => Ok((template.write(remote, Sge { addr: 0, length: bytes, lkey: 0 }), Some((value, bytes)))),
    }
}

/// A write without bytes.
pub(super) fn empty(tables: Tables<'_>, route: Route, peer: u32) -> Result<Request, Status> {
    let template = tables.target(route).existing()?;
    let scratch = tables.scratch();
    Ok(template.write(tables.remote(scratch, peer, true), tables.local(scratch, true, 0)))
}
