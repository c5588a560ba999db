//! Signals that are words in the peer's memory, which the peer's signal proxy adds to. [`ferrogin_ffi::signals`]
//! describes the protocol.
//!
//! They all go to the peer's inbox, a receive-only queue pair. A weak signal that fits in an immediate travels with its
//! own put: the call behind the fast path posts both as one request. Any other signal is a request of its own on this
//! rank's data endpoint, posted once everything it covers has completed: its own put or, with [`Flags::STRONG`], every
//! earlier operation of the context.

use super::operation::{Arguments, Kind, Operation};
use super::tables::Tables;
use super::{Context, DATA, Span};
use crate::action::{Action, Flags};
use crate::endpoint::Wqe;
use crate::status::Status;
use crate::sync::{AtomicU64, LoadExternal, Ordering};
use crate::wait::Spin;
use ferrogin_ffi::ext::{EmulatedPeer, EmulatedSignals};
use ferrogin_ffi::signals::{Generation, Route as Way, Sender, Signal, Strength, Target, Vehicle};

/// The word that a signal adds to.
#[derive(Clone, Copy)]
pub(super) enum Word {
    /// A signal of the peer's context.
    Indexed(u32),
    /// 8 bytes in the peer's part of a window.
    At(Span),
}

impl<'a> Context<'a> {
    /// Writes bytes like [`Context::put`], with a signal in a window's memory: adds `amount` to the 8 bytes at `word`
    /// on `peer`. `counter` names a counter or nothing.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]; also [`Status::InvalidArgument`] if `word` isn't a multiple of 8 or `counter` names a
    /// signal, and [`Status::Unsupported`] if the card counts the context's signals.
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
        self.raise_at(Arguments::put(peer, dst, src, bytes, counter, flags), word, amount)
    }

    /// Writes a value like [`Context::put_value`], with a signal in a window's memory like [`Context::put_signal_at`].
    ///
    /// # Errors
    ///
    /// As for [`Context::put_value`] and [`Context::put_signal_at`].
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
        self.raise_at(Arguments::value(peer, dst, value, bytes, Action::NONE, flags), word, amount)
    }

    /// Raises a signal like [`Context::signal`], but in a window's memory like [`Context::put_signal_at`].
    ///
    /// # Errors
    ///
    /// As for [`Context::put_signal_at`].
    pub fn signal_at(&self, peer: u32, word: Span, amount: u64, flags: Flags) -> Result<(), Status> {
        self.raise_at(Arguments::signal(peer, Action::NONE, flags), word, amount)
    }

    #[inline(never)]
    fn raise_at(self, arguments: Arguments, word: Span, amount: u64) -> Result<(), Status> {
        let emulated = self.emulated()?;
        let tables = self.tables();
        let resolved = tables.resolve(arguments);
        if resolved.is_invalid || arguments.named.signal.exists {
            return Err(Status::InvalidArgument);
        }
        self.raise(emulated, tables, resolved.operation.normalized(tables), Word::At(word), amount)
    }

    pub(super) fn emulated(&self) -> Result<&'a EmulatedSignals, Status> {
        if self.ext.emulated.is_null() {
            return Err(Status::Unsupported);
        }
        // SAFETY: the plugin filled the struct and keeps it constant as long as the context.
        Ok(unsafe { &*self.ext.emulated })
    }

    /// Posts the operation and adds `amount` to `word`. Peer and counter exist.
    #[inline(always)]
    pub(super) fn raise(
        self,
        emulated: &EmulatedSignals,
        tables: Tables<'_>,
        operation: Operation,
        word: Word,
        amount: u64,
    ) -> Result<(), Status> {
        let Operation { kind, peer, named, flags, .. } = operation;
        let (has_put, is_strong) = (kind != Kind::Signal, flags.has(Flags::STRONG));
        let named = named.without_signal();
        let route = tables.route(peer, named, kind.plain_endpoint())?;
        let (poster, template) = (tables.endpoint(route), tables.target(route.target).existing()?);
        let signal = Signal { target: target(tables, peer, word)?, add: amount };
        let strength = if is_strong { Strength::Strong } else { Strength::Weak };
        // SAFETY: the plugin made an entry for each rank and keeps it constant as long as the context; the peer exists.
        let EmulatedPeer { n_signals, generation } = unsafe { *emulated.peers.wrapping_add(peer as usize) };
        let sender = Sender { generation: Generation::new(generation.into()), n_signals, rank: emulated.rank };
        let way = sender.route(signal, strength, has_put).map_err(|_| Status::InvalidArgument)?;
        let flags = flags.without(Flags::STRONG);
        let operation = Operation { named, flags, ..operation };
        let vehicle = match way {
            None => return self.post_counted(tables, operation),
            // The last request of a long put may land before the others.
            Some(Way::WithPut(word)) if operation.bytes > self.ext.max_rdma_size.into() => Vehicle::Write(word),
            Some(Way::WithPut(word)) => {
                let wqe = operation.wqe_for(poster, template)?.with_imm(word.bits());
                return self.post(poster, flags, flags.is_aggregate(), wqe);
            }
            Some(Way::Alone(vehicle) | Way::AfterCompletion(vehicle)) => vehicle,
        };
        if has_put {
            // The wait below rings it.
            self.post_counted(tables, Operation { flags: flags.with(Flags::AGGREGATE), ..operation })?;
        }
        if is_strong {
            self.settle_earlier()?;
        } else if has_put {
            self.settle_endpoint(route.poster)?;
        }
        // Meanwhile, the peer may have been lost. The loss of another one doesn't hold this one's signal back.
        let template = if is_strong | has_put { tables.target(route.target).existing()? } else { template };
        let wqe = match vehicle {
            Vehicle::Write(word) => {
                let (remote, local) = tables.nothing(peer, true);
                Wqe::new(template.write(remote, local)).with_imm(word.bits())
            }
            Vehicle::Send(message) => Wqe::new(template.send_inline(message.words())),
        };
        if !has_put {
            return self.post(poster, flags, flags.is_aggregate(), wqe);
        }
        // On the data endpoint, as a counter counts only the put, and rung: the next plain operation on the put's queue
        // wouldn't ring it.
        self.post(self.endpoint(DATA), flags, false, wqe)
    }

    /// Returns the word of this rank's signal `id`.
    pub(super) fn signal_word(&self, id: u32) -> Result<&'a AtomicU64, Status> {
        let emulated = self.emulated().map_err(|_| Status::InvalidArgument)?;
        if id >= emulated.n_signals {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: the plugin made `n_signals` of these words for the context's life, 8-aligned; the signal proxy and
        // kernels only access them atomically.
        Ok(unsafe { AtomicU64::from_ptr(emulated.words.wrapping_add(id as usize)) })
    }

    /// Waits until the word of signal `id` is at least `least`. Each round rings deferred posts, on which the signal
    /// may depend.
    #[cold]
    #[inline(never)]
    pub(super) fn wait_signal_word(&self, id: u32, least: u64) -> Result<(), Status> {
        let (word, mut spin) = (self.signal_word(id)?, Spin::new(*self));
        while word.load_external(Ordering::Acquire) < least {
            self.ring()?;
            spin.pause()?;
        }
        Ok(())
    }
}

/// Returns the word as the peer's signal proxy finds it.
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
