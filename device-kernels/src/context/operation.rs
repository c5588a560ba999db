//! An operation: what is requested, where it goes, its work request, and how it's posted if it doesn't take the fast path.

use super::emulated::Word;
use super::tables::{Name, Named, Tables, Target};
use super::{Context, DATA, Span, VALUE, Window};
use crate::action::{Action, Flags, Sharing};
use crate::endpoint::{Endpoint, Poster, Remote, Sge, Wqe};
use crate::lanes::Lanes;
use crate::post::EncodeWqe;
use crate::status::Status;
use core::ptr;
use efa_dp_direct::wqe::words::{ValueSize, WqeTemplate};
use ferrogin_ffi::ext::{POLICY_COMBINING, VALUE_NONE, ValueConfig};

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Put,
    Get,
    Value,
    Signal,
}

impl Kind {
    /// Returns the endpoint for operations that name neither a signal nor a counter.
    #[inline(always)]
    pub(super) fn plain_endpoint(self) -> u32 {
        if self == Kind::Value { VALUE } else { DATA }
    }
}

/// An operation and its arguments.
#[derive(Clone, Copy)]
pub struct Arguments {
    pub(super) kind: Kind,
    pub(super) peer: u32,
    pub(super) named: Named,
    /// The place on the peer.
    pub(super) remote: Span,
    /// The place on this rank. For a value, the offset is the value.
    pub(super) local: Span,
    pub(super) bytes: u64,
    pub(super) flags: Flags,
}

impl Arguments {
    /// Returns the arguments of [`Context::put`](super::Context::put).
    #[inline(always)]
    pub fn put(peer: u32, dst: Span, src: Span, bytes: u64, action: Action, flags: Flags) -> Self {
        Arguments { kind: Kind::Put, peer, named: action.into(), remote: dst, local: src, bytes, flags }
    }

    /// Returns the arguments of [`Context::get`](super::Context::get).
    #[inline(always)]
    pub fn get(peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Self {
        Arguments { kind: Kind::Get, peer, named: Action::NONE.into(), remote, local, bytes, flags }
    }

    /// Returns the arguments of [`Context::put_value`](super::Context::put_value).
    #[inline(always)]
    pub fn value(peer: u32, dst: Span, value: u64, bytes: u32, action: Action, flags: Flags) -> Self {
        let local = NOWHERE.window.at(value);
        Arguments { kind: Kind::Value, peer, named: action.into(), remote: dst, local, bytes: bytes.into(), flags }
    }

    /// Returns the arguments of [`Context::signal`](super::Context::signal).
    #[inline(always)]
    pub fn signal(peer: u32, action: Action, flags: Flags) -> Self {
        Arguments { kind: Kind::Signal, peer, named: action.into(), remote: NOWHERE, local: NOWHERE, bytes: 0, flags }
    }
}

/// No place.
pub(super) const NOWHERE: Span = Window(ptr::null_mut()).at(0);

/// An operation whose arguments have been looked up in the tables.
#[derive(Clone, Copy)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    pub(super) peer: u32,
    pub(super) named: Named,
    pub(super) flags: Flags,
    pub(super) remote: Remote,
    /// For a value, the address is the value. The length has no meaning.
    pub(super) local: Sge,
    pub(super) bytes: u64,
}

impl Operation {
    /// Returns the same operation, with a put without bytes turned into a signal.
    pub(super) fn normalized(self, tables: Tables<'_>) -> Self {
        if self.kind != Kind::Put || self.bytes != 0 {
            return self;
        }
        let (remote, local) = tables.nothing(self.peer, true);
        Operation { kind: Kind::Signal, remote, local, ..self }
    }

    /// Splits the operation into its first `bytes` and the rest.
    fn split(self, bytes: u64) -> (Self, Self) {
        let remote = Remote { addr: self.remote.addr.wrapping_add(bytes), ..self.remote };
        let local = Sge { addr: self.local.addr.wrapping_add(bytes), ..self.local };
        (Operation { bytes, ..self }, Operation { remote, local, bytes: self.bytes - bytes, ..self })
    }

    /// Returns its work request. It must fit in one; a value has a valid size and travels as `values` says.
    #[inline(always)]
    fn wqe(&self, template: WqeTemplate, values: ValueConfig) -> Wqe {
        let local = Sge { length: self.bytes as u32, ..self.local };
        match self.kind {
            Kind::Put | Kind::Signal => Wqe::new(template.write(self.remote, local)),
            Kind::Get => Wqe::new(template.read(self.remote, local)),
            Kind::Value => {
                let size = ValueSize::new(local.length).unwrap_or_default();
                Wqe::value(template, self.remote, local.addr, size, values)
            }
        }
    }

    /// Returns its work request for `endpoint`, under either policy.
    pub(super) fn wqe_for(&self, endpoint: Endpoint<'_>, template: WqeTemplate) -> Result<Wqe, Status> {
        let values = match self.kind {
            Kind::Value => endpoint.values().ok_or(Status::Unsupported)?,
            _ => NO_VALUES,
        };
        Ok(self.wqe(template, values))
    }
}

/// For operations other than values.
const NO_VALUES: ValueConfig = ValueConfig { mask: 0, lkey: 0, path: VALUE_NONE, slots: 0 };

/// An operation, where it's posted, and where it goes.
#[derive(Clone, Copy)]
pub(super) struct Resolved<'a> {
    pub(super) operation: Operation,
    pub(super) poster: Poster<'a>,
    target: Target,
    /// The target's index.
    pub(super) target_index: u32,
    values: ValueConfig,
    /// Whether it takes the fast path.
    pub(super) is_fast: bool,
    /// Whether peer, counter, size or a window is out of range. The slow path carries out everything else that isn't fast.
    pub(super) is_invalid: bool,
}

impl EncodeWqe for Resolved<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self.poster.place(self.operation.wqe(self.target.template(), self.values), idx);
    }
}

impl<'a> Tables<'a> {
    /// Loads everything that the operation needs, then checks it.
    #[inline(always)]
    pub(super) fn resolve(self, arguments: Arguments) -> Resolved<'a> {
        let Arguments { kind, peer, named, remote, local, bytes, flags } = arguments;
        let route = self.try_route(peer, named, kind.plain_endpoint());
        let (poster, target) = (self.endpoint(route).poster(), self.target(route.target));
        let mut values = NO_VALUES;
        let (remote, local, fits, is_invalid) = match kind {
            Kind::Signal => {
                let (remote, local) = self.nothing(peer, route.peer_and_counter_valid);
                (remote, local, self.0.fast_put_limit != 0, false)
            }
            Kind::Value => {
                let has_window = route.peer_and_counter_valid & !remote.is_null();
                let remote = self.remote(remote, peer, has_window);
                values = poster.fast_values();
                let is_invalid = !has_window | ValueSize::new(bytes as u32).is_none() | named.counter.exists;
                (remote, Sge { addr: local.offset, lkey: 0, length: 0 }, values.path != VALUE_NONE, is_invalid)
            }
            Kind::Put | Kind::Get => {
                let has_windows = route.peer_and_counter_valid & !remote.is_null() & !local.is_null();
                let (remote, local) = (self.remote(remote, peer, has_windows), self.local(local, has_windows));
                let fits = bytes.wrapping_sub(1) < self.0.fast_put_limit;
                (remote, local, fits, !has_windows & ((bytes != 0) | (kind == Kind::Get)))
            }
        };
        let is_invalid = is_invalid | !route.peer_and_counter_valid;
        let is_plain = (route.raised_by <= 1) & !flags.has(Flags::STRONG);
        Resolved {
            operation: Operation { kind, peer, named, flags, remote, local, bytes },
            poster,
            target,
            target_index: route.target,
            values,
            is_fast: route.signal_valid & fits & is_plain & target.exists() & !is_invalid,
            is_invalid,
        }
    }
}

/// The slow path: the `locked` policy, transfers of no bytes or of more than one work request, signals raised by more than one, and
/// emulated signals.
impl Context<'_> {
    /// Carries out a whole operation that [is not invalid](Resolved::is_invalid): peer and counter exist.
    #[cold]
    #[inline(never)]
    pub(super) fn carry_out(self, operation: Operation) -> Result<(), Status> {
        let Operation { named, flags, .. } = operation;
        let tables = self.tables();
        let operation = operation.normalized(tables);
        match (named.signal_id(), self.emulated()) {
            (Some(id), Ok(emulated)) => self.raise(emulated, tables, operation, Word::Indexed(id), named.amount.into()),
            (Some(_), Err(unsupported)) if flags.has(Flags::STRONG) => Err(unsupported),
            _ => self.post_counted(tables, operation),
        }
    }

    /// Posts an operation whose signal the card counts. The counter ticks once per write, so a signal raised by `n` takes `n - 1` extra
    /// empty writes. They share a doorbell, and the write's endpoint unless that endpoint is a counter's.
    pub(super) fn post_counted(self, tables: Tables<'_>, operation: Operation) -> Result<(), Status> {
        let Operation { kind, peer, named, flags, .. } = operation;
        let route = tables.route(peer, named, kind.plain_endpoint())?;
        let template = tables.target(route.target).existing()?;
        let operation = self.post_first_parts(tables, operation)?;

        let mut more = route.raised_by.saturating_sub(1);
        let extra = if named.counter.exists {
            tables.route(peer, Named { counter: Name::NONE, ..named }, DATA)?.poster
        } else {
            route.poster
        };
        let is_last = more == 0 || extra != route.poster;
        let poster = tables.endpoint(route);
        self.post(poster, flags, flags.is_aggregate() || !is_last, operation.wqe_for(poster, template)?)?;
        let (remote, local) = tables.nothing(peer, true);
        while more != 0 {
            more -= 1;
            let empty = Wqe::new(template.write(remote, local));
            self.post(self.endpoint(extra), flags, flags.is_aggregate() || more != 0, empty)?;
        }
        Ok(())
    }

    /// Posts what doesn't fit in one work request on the data endpoint, without the action, and returns the last part, which carries the
    /// action once the first parts have completed.
    fn post_first_parts(self, tables: Tables<'_>, mut operation: Operation) -> Result<Operation, Status> {
        let largest = self.ext.max_rdma_size.into();
        if operation.bytes <= largest {
            return Ok(operation);
        }
        let data = tables.route(operation.peer, Named::NONE, DATA)?;
        let (poster, template) = (tables.endpoint(data), tables.target(data.target).existing()?);
        while operation.bytes > largest {
            let (first, rest) = operation.split(largest);
            // Rung by the last part, or by the flush.
            self.post(poster, operation.flags, true, first.wqe_for(poster, template)?)?;
            operation = rest;
        }
        if !operation.named.is_none() {
            self.flush_endpoint(DATA, None)?;
        }
        Ok(operation)
    }

    /// Posts a request, together with those of the other lanes of the warp that are here at the same time.
    pub(super) fn post(self, poster: Endpoint<'_>, flags: Flags, aggregate: bool, wqe: Wqe) -> Result<(), Status> {
        let may_join = self.ext.policy == POLICY_COMBINING && flags.mode() != Sharing::Thread;
        if may_join && Lanes::active().count() > 1 {
            return super::warp::join(poster, aggregate, wqe);
        }
        poster.post(self.ext.policy, flags, self, aggregate, wqe)
    }
}
