//! The result of an operation in progress: a future that can also be waited for without an executor.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::ChannelError;
use crate::shared::Shared;

enum State<T> {
    Waiting(Option<Waker>),
    /// The result, and its number if it is a message.
    Ready(Result<T, ChannelError>, u64),
    Taken,
    /// The [`Pending`] was dropped.
    Dropped,
}

/// What an operation waits for: an action of a peer.
pub(crate) struct Awaited {
    pub shared: Weak<Shared>,
    pub peer: Arc<str>,
    pub what: &'static str,
}

/// What dropping a [`Pending`] cancels.
#[derive(Clone, Copy)]
pub(crate) enum Cancel {
    Nothing,
    Read(u32, u64),
    Write(u32, u64),
    Accept(u32, u64),
}

/// Returns an unused result to the engine, if it can be returned.
pub(crate) type Return<T> = fn(&Shared, Cancel, u64, T);

struct Slot<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    awaited: Awaited,
    cancel: Cancel,
    return_unused: Return<T>,
}

impl<T> Slot<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock()
    }

    /// Records the operation's result and wakes the waiter.
    fn end(&self, result: Result<T, ChannelError>, number: u64) {
        let mut state = self.state();
        if matches!(*state, State::Dropped) {
            drop(state);
            return self.return_unused(result, number);
        }
        let before = std::mem::replace(&mut *state, State::Ready(result, number));
        drop(state);
        self.ready.notify_all();
        if let State::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }

    fn return_unused(&self, result: Result<T, ChannelError>, number: u64) {
        if let Ok(value) = result
            && let Some(shared) = self.awaited.shared.upgrade()
        {
            (self.return_unused)(&shared, self.cancel, number, value);
        }
    }
}

/// The result of an operation in progress.
///
/// It is a future. [`Pending::wait`] and [`Pending::wait_for`] block a thread; on the reactor's own thread, which would
/// wait for itself, they return [`ChannelError::OwnThread`]. Dropping it cancels a read or an accept: the next read or
/// accept gets the message or channel, even one that has already arrived. A write continues.
#[must_use = "dropping it cancels a read or an accept"]
pub struct Pending<T> {
    slot: Arc<Slot<T>>,
}

impl<T: Send + 'static> Pending<T> {
    /// Returns the future and the callback that completes it.
    pub(crate) fn new(
        awaited: Awaited,
        cancel: Cancel,
    ) -> (Self, impl FnOnce(Result<T, ChannelError>) + Send + 'static) {
        let (pending, done) = Self::with_return(awaited, cancel, |_, _, _, _| ());
        (pending, move |result| done(result, 0))
    }

    /// Like [`Pending::new`], but the callback also gets the result's number, and an unused result goes back to the
    /// engine.
    pub(crate) fn with_return(
        awaited: Awaited,
        cancel: Cancel,
        return_unused: Return<T>,
    ) -> (Self, impl FnOnce(Result<T, ChannelError>, u64) + Send + 'static) {
        let (state, ready) = (Mutex::new(State::Waiting(None)), Condvar::new());
        let slot = Arc::new(Slot { state, ready, awaited, cancel, return_unused });
        (Self { slot: Arc::clone(&slot) }, move |result, number| slot.end(result, number))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// The operation's error.
    pub fn wait(self) -> Result<T, ChannelError> {
        self.wait_until(None).unwrap_or(Err(ChannelError::Stopped))
    }

    /// Waits up to `limit` for the result, then cancels the operation if that is still possible.
    ///
    /// # Errors
    /// The operation's error; [`ChannelError::Timeout`].
    pub fn wait_for(self, limit: Duration) -> Result<T, ChannelError> {
        // None if the limit is beyond the clock's range.
        let deadline = Instant::now().checked_add(limit);
        if let Some(result) = self.wait_until(deadline) {
            return result;
        }
        let cancelled = self.cancel();
        let late = if cancelled { self.wait_until(None) } else { None };
        match late {
            None | Some(Err(ChannelError::Cancelled { .. })) => {
                let Awaited { peer, what, .. } = &self.slot.awaited;
                Err(ChannelError::Timeout { peer: Arc::clone(peer), what, limit })
            }
            Some(result) => result,
        }
    }

    /// Returns None at the deadline.
    fn wait_until(&self, deadline: Option<Instant>) -> Option<Result<T, ChannelError>> {
        let mut state = self.slot.state();
        loop {
            match std::mem::replace(&mut *state, State::Taken) {
                State::Ready(result, _) => return Some(result),
                State::Taken | State::Dropped => return None,
                waiting @ State::Waiting(_) => *state = waiting,
            }
            let Awaited { shared, peer, .. } = &self.slot.awaited;
            if shared.upgrade().is_some_and(|shared| shared.is_own_thread()) {
                return Some(Err(ChannelError::OwnThread { peer: Arc::clone(peer) }));
            }
            match deadline {
                None => self.slot.ready.wait(&mut state),
                Some(deadline) if Instant::now() >= deadline => return None,
                Some(deadline) => {
                    self.slot.ready.wait_until(&mut state, deadline);
                }
            }
        }
    }
}

impl<T> Pending<T> {
    /// Cancels the operation; true if its callback will soon follow in any case.
    fn cancel(&self) -> bool {
        let Some(shared) = self.slot.awaited.shared.upgrade() else { return false };
        match self.slot.cancel {
            Cancel::Nothing => return false,
            Cancel::Read(channel, ticket) | Cancel::Write(channel, ticket) => {
                shared.request(move |engine| engine.cancel(channel, ticket));
            }
            Cancel::Accept(listener, ticket) => shared.request(move |engine| engine.cancel_accept(listener, ticket)),
        }
        // A write that has started continues for as long as the peer takes.
        !matches!(self.slot.cancel, Cancel::Write(..))
    }
}

impl<T: Send + 'static> Future for Pending<T> {
    type Output = Result<T, ChannelError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker().clone();
        let mut state = self.slot.state();
        let before = std::mem::replace(&mut *state, State::Taken);
        if let State::Waiting(_) = before {
            *state = State::Waiting(Some(waker));
        }
        // A waker may own the task that it wakes, and so is dropped without the lock.
        drop(state);
        match before {
            State::Ready(result, _) => Poll::Ready(result),
            State::Waiting(_) => Poll::Pending,
            State::Taken | State::Dropped => Poll::Ready(Err(ChannelError::Stopped)),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        let before = std::mem::replace(&mut *self.slot.state(), State::Dropped);
        match before {
            State::Waiting(_) if !matches!(self.slot.cancel, Cancel::Write(..)) => {
                self.cancel();
            }
            State::Ready(result, number) => self.slot.return_unused(result, number),
            State::Waiting(_) | State::Taken | State::Dropped => {}
        }
    }
}
