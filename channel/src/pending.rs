//! An operation that is not over yet: to wait for, or to await with any executor.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::ChannelError;
use crate::shared::{Request, Shared};

enum State<T> {
    Waiting(Option<Waker>),
    /// With its number, if it is a message.
    Ready(Result<T, ChannelError>, u64),
    Taken,
    /// Nobody will take it.
    Dropped,
}

/// What is waited for: that the peer does it.
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

/// How an outcome that nobody takes goes to the next one, if it does.
pub(crate) type GiveBack<T> = fn(Cancel, u64, T) -> Option<Request>;

struct Slot<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    awaited: Awaited,
    cancel: Cancel,
    give_back: GiveBack<T>,
}

impl<T> Slot<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation is over.
    fn end(&self, result: Result<T, ChannelError>, number: u64) {
        let mut state = self.state();
        if matches!(*state, State::Dropped) {
            drop(state);
            return self.give_back(result, number);
        }
        let before = std::mem::replace(&mut *state, State::Ready(result, number));
        drop(state);
        self.ready.notify_all();
        if let State::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }

    fn give_back(&self, result: Result<T, ChannelError>, number: u64) {
        if let Ok(value) = result
            && let Some(shared) = self.awaited.shared.upgrade()
            && let Some(request) = (self.give_back)(self.cancel, number, value)
        {
            shared.submit(request);
        }
    }
}

/// The outcome of an operation, to come.
///
/// It is a future; [`Pending::wait`] and [`Pending::wait_for`] are for threads, other than the reactor's, which would wait for
/// itself: there they end with [`ChannelError::OwnThread`]. Dropping it cancels a read or an accept: the next one gets what this
/// one would have got, or has got and not handed out. A write goes on.
#[must_use = "dropping it cancels a read or an accept"]
pub struct Pending<T> {
    slot: Arc<Slot<T>>,
}

impl<T: Send + 'static> Pending<T> {
    /// The pending side and the callback that ends it.
    pub(crate) fn new(
        awaited: Awaited,
        cancel: Cancel,
    ) -> (Self, impl FnOnce(Result<T, ChannelError>) + Send + 'static) {
        let (pending, done) = Self::giving_back(awaited, cancel, |_, _, _| None);
        (pending, move |result| done(result, 0))
    }

    /// As [`Pending::new`]; the callback is told the number of what has come, and what nobody takes is given back.
    pub(crate) fn giving_back(
        awaited: Awaited,
        cancel: Cancel,
        give_back: GiveBack<T>,
    ) -> (Self, impl FnOnce(Result<T, ChannelError>, u64) + Send + 'static) {
        let (state, ready) = (Mutex::new(State::Waiting(None)), Condvar::new());
        let slot = Arc::new(Slot { state, ready, awaited, cancel, give_back });
        (Self { slot: Arc::clone(&slot) }, move |result, number| slot.end(result, number))
    }

    /// Waits for the outcome.
    ///
    /// # Errors
    /// The operation's.
    pub fn wait(self) -> Result<T, ChannelError> {
        self.wait_until(None).unwrap_or(Err(ChannelError::Stopped))
    }

    /// Waits for the outcome, but no longer than `limit`; then the operation is cancelled, if it still can be.
    ///
    /// # Errors
    /// The operation's; [`ChannelError::Timeout`].
    pub fn wait_for(self, limit: Duration) -> Result<T, ChannelError> {
        // A limit beyond all clocks is none.
        let deadline = Instant::now().checked_add(limit);
        if let Some(result) = self.wait_until(deadline) {
            return result;
        }
        let taken_back = self.cancel();
        let late = if taken_back { self.wait_until(None) } else { None };
        match late {
            None | Some(Err(ChannelError::Cancelled { .. })) => {
                let Awaited { peer, what, .. } = &self.slot.awaited;
                Err(ChannelError::Timeout { peer: Arc::clone(peer), what, limit })
            }
            Some(result) => result,
        }
    }

    /// None at the deadline.
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
            state = match deadline {
                None => self.slot.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.slot.ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl<T> Pending<T> {
    /// Asks for the operation to be taken back; true when a callback will come soon in any case.
    fn cancel(&self) -> bool {
        let request = match self.slot.cancel {
            Cancel::Nothing => return false,
            Cancel::Read(channel, ticket) | Cancel::Write(channel, ticket) => Request::Cancel { channel, ticket },
            Cancel::Accept(listener, ticket) => Request::CancelAccept { listener, ticket },
        };
        let Some(shared) = self.slot.awaited.shared.upgrade() else { return false };
        shared.submit(request);
        // A write that has begun goes on, and may take as long as the peer pleases.
        !matches!(self.slot.cancel, Cancel::Write(..))
    }
}

impl<T: Send + 'static> Future for Pending<T> {
    type Output = Result<T, ChannelError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.slot.state();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Ready(result, _) => Poll::Ready(result),
            State::Waiting(_) => {
                *state = State::Waiting(Some(context.waker().clone()));
                Poll::Pending
            }
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
            State::Ready(result, number) => self.slot.give_back(result, number),
            State::Waiting(_) | State::Taken | State::Dropped => {}
        }
    }
}
