//! An operation: what is requested, where it goes, and its work request.

use super::tables::{Named, Tables, Target};
use super::{DATA, Span, VALUE, Window};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Poster, Remote, Sge, Wqe};
use crate::post::EncodeWqe;
use crate::status::Status;
use core::ptr;
use efa_dp_direct::wqe::words::{ValueSize, WqeTemplate};
use ferrogin_ffi::ext::{VALUE_NONE, ValueConfig};

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
    pub(super) fn split(self, bytes: u64) -> (Self, Self) {
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
    /// Whether peer, counter, size or a window is out of range. The slow path carries out everything else that isn't
    /// fast.
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
