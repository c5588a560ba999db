//! Signals that are words of the peer's memory, to which the peer's agent adds. [`ferrogin_ffi::signals`] has the protocol.
//!
//! All of them go to the peer's inbox, a queue pair that only receives. A weak signal that an immediate can hold travels with its own put, and
//! the call behind the fast path posts both as one request. Any other is a request of its own on this rank's data endpoint, posted when all has
//! completed that the signal covers: its own put, or with [`Flags::STRONG`] every earlier operation of the context.

use super::payload::Payload;
use super::slow_path::{Operation, empty, value_request};
use super::tables::{ON_GPU, Route, Tables};
use super::{Context, DATA, Span, VALUE, post};
use crate::action::{Action, Flags};
use crate::endpoint::Sge;
use crate::platform::in_register;
use crate::status::{Code, Status};
use crate::sync::{AtomicU64, LoadExternal, Ordering};
use crate::wait::Spin;
use efa_dp_direct::wqe::words::with_imm;
use ferrogin_ffi::ext::EmulatedSignals;
use ferrogin_ffi::signals::{Generation, Immediate, Route as Way, Sender, Signal, Strength, Target, Vehicle};

/// The word that a signal is added to.
#[derive(Clone, Copy)]
enum Word {
    /// A signal of the peer's context.
    Indexed(u32),
    /// 8 bytes in the peer's part of a window.
    At(Span),
}

/// An operation's signal.
#[derive(Clone, Copy)]
struct Raise {
    word: Word,
    amount: u64,
}

impl<'a> Context<'a> {
    /// [`Context::put`] with a signal in a window's memory: adds `amount` to the 8 bytes at `word` on `peer`. `counter` has a counter or
    /// nothing.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]. [`Status::InvalidArgument`] also where `word` is no multiple of 8 or `counter` names a signal, and
    /// [`Status::Unsupported`] where the card counts the context's signals.
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    pub fn put_signal_at(
        &self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        word: Span,
        amount: u64,
        counter: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let operation = Operation { peer, action: counter, flags };
        self.raise_at(operation, word, amount, |tables| Payload::put(tables, peer, dst, src, bytes))
    }

    /// [`Context::put_value`] with a signal in a window's memory, as [`Context::put_signal_at`] has.
    ///
    /// # Errors
    ///
    /// As for [`Context::put_value`] and [`Context::put_signal_at`].
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    pub fn put_value_signal_at(
        &self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        word: Span,
        amount: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        let operation = Operation { peer, action: Action::NONE, flags };
        self.raise_at(operation, word, amount, |tables| Payload::value(tables, peer, dst, value, bytes))
    }

    /// [`Context::signal`] with a signal in a window's memory, as [`Context::put_signal_at`] has.
    ///
    /// # Errors
    ///
    /// As for [`Context::put_signal_at`].
    #[inline(never)]
    pub fn signal_at(&self, peer: u32, word: Span, amount: u64, flags: Flags) -> Result<(), Status> {
        let operation = Operation { peer, action: Action::NONE, flags };
        self.raise_at(operation, word, amount, |_| Ok(Payload::None))
    }

    fn raise_at(
        self,
        operation: Operation,
        word: Span,
        amount: u64,
        payload: impl FnOnce(Tables<'a>) -> Result<Payload, Status>,
    ) -> Result<(), Status> {
        let emulated = self.emulated()?;
        if operation.action.named_signal().is_some() {
            return Err(Status::InvalidArgument);
        }
        let tables = self.known(operation)?;
        self.raise(emulated, operation, payload(tables)?, Raise { word: Word::At(word), amount })
    }

    /// The tables, if peer and counter exist.
    pub(super) fn known(self, Operation { peer, action, .. }: Operation) -> Result<Tables<'a>, Status> {
        let tables = self.tables::<ON_GPU>();
        tables.route(peer, action.without_signal().into(), DATA)?;
        Ok(tables)
    }

    pub(super) fn emulated(&self) -> Result<&'a EmulatedSignals, Status> {
        if self.ext.emulated.is_null() {
            return Err(Status::Unsupported);
        }
        // SAFETY: the plugin filled the struct and keeps it constant as long as the context.
        Ok(unsafe { &*self.ext.emulated })
    }

    /// The immediate data that raises a peer's signal, if there is any.
    #[inline(always)]
    pub(super) fn immediate(self, peer: u32, id: u32, amount: u32) -> Option<u32> {
        let emulated = self.emulated().ok()?;
        if peer >= self.ext.routes.nranks {
            return None;
        }
        let Sender { generation, n_signals, .. } = sender(emulated, peer);
        if id >= n_signals {
            return None;
        }
        let word = Immediate::new(Signal { target: Target::Indexed(id), add: amount.into() }, generation)?;
        // Computed before the keys, which need its registers.
        Some(in_register(word.bits().into()) as u32)
    }

    /// The immediate data of an action with a signal and nothing else.
    #[inline(always)]
    fn immediate_of(self, peer: u32, action: Action) -> Option<u32> {
        if action.counter_slot() != 0 {
            return None;
        }
        self.immediate(peer, action.named_signal()?, action.amount())
    }

    /// Posts a put of one request whose weak signal is emulated; `None` for any other operation.
    #[inline(always)]
    pub(crate) fn put_with_imm(
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Option<Code> {
        let imm = self.immediate_of(peer, action)?;
        let checked = self.tables::<ON_GPU>().put(peer, Action::NONE.into(), dst, src, bytes)?;
        post(Some(checked.map(|request| request.with_imm(imm))), flags)
    }

    /// Posts a value whose weak signal is emulated; `None` for any other operation.
    #[inline(always)]
    pub(crate) fn put_value_with_imm(
        self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Option<Code> {
        let imm = self.immediate_of(peer, action)?;
        let checked = self.tables::<ON_GPU>().value(peer, Action::NONE.into(), dst, value, bytes)?;
        post(Some(checked.map(|request| request.with_imm(imm))), flags)
    }

    /// Raises a weak emulated signal; `None` for any other operation.
    #[inline(always)]
    pub(crate) fn signal_with_imm(self, peer: u32, action: Action, flags: Flags) -> Option<Code> {
        let imm = self.immediate_of(peer, action)?;
        let checked = self.tables::<ON_GPU>().signal(peer, Action::NONE.into())?;
        post(Some(checked.map(|request| request.with_imm(imm))), flags)
    }

    /// Carries out an operation whose signal is emulated. Peer and counter exist.
    pub(super) fn raise_indexed(
        self,
        emulated: &EmulatedSignals,
        operation: Operation,
        payload: Payload,
        id: u32,
    ) -> Result<(), Status> {
        let Operation { action, .. } = operation;
        let raise = Raise { word: Word::Indexed(id), amount: action.amount().into() };
        self.raise(emulated, Operation { action: action.without_signal(), ..operation }, payload, raise)
    }

    /// Posts the payload and raises the signal. The action of `operation` has a counter or nothing; it and the peer exist.
    #[inline(never)]
    fn raise(
        self,
        emulated: &EmulatedSignals,
        operation: Operation,
        payload: Payload,
        raise: Raise,
    ) -> Result<(), Status> {
        let Operation { peer, action, flags } = operation;
        let plain = if matches!(payload, Payload::Value { .. }) { VALUE } else { DATA };
        let tables = self.tables::<ON_GPU>();
        let route = tables.route(peer, action.into(), plain)?;
        let signal = Signal { target: target(tables, peer, raise.word)?, add: raise.amount };
        let (has_put, is_strong) = (!matches!(payload, Payload::None), flags.is_strong());
        let strength = if is_strong { Strength::Strong } else { Strength::Weak };
        let way = sender(emulated, peer).route(signal, strength, has_put).map_err(|_| Status::InvalidArgument)?;
        let operation = Operation { flags: flags.weak(), ..operation };
        let vehicle = match way {
            None => return self.post_payload(tables, route, operation, payload, None),
            Some(Way::WithPut(word)) if !self.is_long(payload) => {
                return self.post_payload(tables, route, operation, payload, Some(word));
            }
            // The last request of a long put may land before the others.
            Some(Way::WithPut(word)) => Vehicle::Write(word),
            Some(Way::Alone(vehicle) | Way::AfterCompletion(vehicle)) => vehicle,
        };
        if has_put {
            // The wait rings it.
            let deferred = Operation { flags: operation.flags.aggregated(), ..operation };
            self.post_payload(tables, route, deferred, payload, None)?;
        }
        if is_strong {
            self.wait_for_earlier()?;
        } else if has_put {
            self.flush_endpoint(route.poster)?;
        }
        let request = match vehicle {
            Vehicle::Write(word) => with_imm(empty(tables, route, peer)?, word.bits()),
            Vehicle::Send(message) => tables.target(route).existing()?.send_inline(message.words()),
        };
        if !has_put {
            return self.post(tables.endpoint(route), flags.weak(), flags.is_aggregate(), request, None);
        }
        // A counter counts the put. The next plain operation on the put's queue would not ring this one.
        self.post(self.endpoint(DATA), flags.weak(), false, request, None)
    }

    /// Posts what an operation has beside its signal, with an immediate if there is one. A put with an immediate is one request.
    fn post_payload(
        self,
        tables: Tables<'_>,
        route: Route,
        operation: Operation,
        payload: Payload,
        word: Option<Immediate>,
    ) -> Result<(), Status> {
        let Operation { peer, action, flags } = operation;
        let (request, pooled) = match payload {
            Payload::None => (empty(tables, route, peer)?, None),
            Payload::Put { remote, local, bytes } if word.is_none() => {
                return self.put_long(operation, remote, local, bytes);
            }
            Payload::Put { remote, local, bytes } => {
                let local = Sge { length: bytes as u32, ..local };
                (tables.target(route).existing()?.write(remote, local), None)
            }
            Payload::Value { .. } if action.counter_slot() != 0 => return Err(Status::InvalidArgument),
            Payload::Value { remote, value, bytes } => value_request(tables, route, remote, value, bytes)?,
        };
        let request = word.map_or(request, |word| with_imm(request, word.bits()));
        self.post(tables.endpoint(route), flags, flags.is_aggregate(), request, pooled)
    }

    /// Returns whether the payload takes more than one request.
    fn is_long(self, payload: Payload) -> bool {
        matches!(payload, Payload::Put { bytes, .. } if bytes > self.ext.max_rdma_size.into())
    }

    /// Waits until every earlier post on this context has completed, but not for later posts. Deferred posts are rung first.
    #[cold]
    #[inline(never)]
    fn wait_for_earlier(self) -> Result<(), Status> {
        let request = self.flush_async()?;
        self.wait_flush(&request)
    }

    /// The word of this rank's signal `id`.
    pub(super) fn signal_word(&self, id: u32) -> Result<&'a AtomicU64, Status> {
        let emulated = self.emulated().map_err(|_| Status::InvalidArgument)?;
        if id >= emulated.n_signals {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: the plugin made `n_signals` of these words for the context's life, 8-aligned; the agent and kernels only access
        // them atomically.
        Ok(unsafe { AtomicU64::from_ptr(emulated.words.wrapping_add(id as usize)) })
    }

    /// Waits until the word of signal `id` is at least `least`. Each round rings deferred posts, on which the signal may depend.
    #[cold]
    #[inline(never)]
    pub(super) fn wait_signal_word(&self, id: u32, least: u64) -> Result<(), Status> {
        let (word, mut spin) = (self.signal_word(id)?, Spin::new(self.limits()));
        while word.load_external(Ordering::Acquire) < least {
            self.ring()?;
            spin.pause()?;
        }
        Ok(())
    }
}

/// The word, as the peer's agent finds it.
fn target(tables: Tables<'_>, peer: u32, word: Word) -> Result<Target, Status> {
    let span = match word {
        Word::Indexed(id) => return Ok(Target::Indexed(id)),
        Word::At(span) if span.is_null() => return Err(Status::InvalidArgument),
        Word::At(span) => span,
    };
    let place = tables.remote(span, peer, true);
    // An offset that wraps would name a place before the window.
    if place.addr < span.offset {
        return Err(Status::InvalidArgument);
    }
    Ok(Target::Va { rkey: place.rkey, address: place.addr })
}

/// The constants of signals to that peer, which exists.
fn sender(emulated: &EmulatedSignals, peer: u32) -> Sender {
    // SAFETY: the plugin made an entry for each rank and keeps it constant as long as the context; callers have checked the peer.
    let of_peer = unsafe { &*emulated.peers.wrapping_add(peer as usize) };
    Sender { generation: Generation::new(of_peer.generation.into()), n_signals: of_peer.n_signals, rank: emulated.rank }
}
