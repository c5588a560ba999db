//! An operation that is not over yet: to wait for, or to await with any executor.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::ChannelError;
use super::reactor::{Request, Shared};

enum State<T> {
    Waiting(Option<Waker>),
    Ready(Result<T, ChannelError>),
    Taken,
}

struct Slot<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
}

impl<T> Slot<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What dropping a [`Pending`] cancels.
pub(super) enum Cancel {
    Nothing,
    Read(Weak<Shared>, u32, u64),
    Write(Weak<Shared>, u32, u64),
    Accept(Weak<Shared>, u32, u64),
}

/// The outcome of an operation, to come.
///
/// It is a future; [`Pending::wait`] and [`Pending::wait_for`] are for threads (other than the reactor's, which would wait for
/// itself). Dropping it cancels a read or an accept: the next one gets what this one would have got. A write goes on.
#[must_use = "dropping it cancels a read or an accept"]
pub struct Pending<T> {
    slot: Arc<Slot<T>>,
    cancel: Cancel,
}

impl<T: Send + 'static> Pending<T> {
    /// The pending side and the callback that ends it.
    pub(super) fn new(cancel: Cancel) -> (Self, impl FnOnce(Result<T, ChannelError>) + Send + 'static) {
        let slot = Arc::new(Slot { state: Mutex::new(State::Waiting(None)), ready: Condvar::new() });
        let pending = Self { slot: Arc::clone(&slot), cancel };
        let done = move |result| {
            let before = std::mem::replace(&mut *slot.state(), State::Ready(result));
            slot.ready.notify_all();
            if let State::Waiting(Some(waker)) = before {
                waker.wake();
            }
        };
        (pending, done)
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
        let deadline = Instant::now() + limit;
        if let Some(result) = self.wait_until(Some(deadline)) {
            return result;
        }
        let taken_back = self.cancel();
        let late = if taken_back { self.wait_until(None) } else { None };
        match late {
            Some(Ok(value)) => Ok(value),
            Some(Err(ChannelError::Cancelled { peer })) => {
                Err(ChannelError::Timeout { peer, what: "send or take a message", limit })
            }
            Some(Err(error)) => Err(error),
            None => Err(ChannelError::Timeout { peer: "the peer".into(), what: "take or send a message", limit }),
        }
    }

    /// None at the deadline.
    fn wait_until(&self, deadline: Option<Instant>) -> Option<Result<T, ChannelError>> {
        let mut state = self.slot.state();
        loop {
            match std::mem::replace(&mut *state, State::Taken) {
                State::Ready(result) => return Some(result),
                State::Taken => return None,
                waiting @ State::Waiting(_) => *state = waiting,
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
        let (shared, request) = match &self.cancel {
            Cancel::Nothing => return false,
            Cancel::Read(shared, channel, ticket) | Cancel::Write(shared, channel, ticket) => {
                (shared, Request::Cancel { channel: *channel, ticket: *ticket })
            }
            Cancel::Accept(shared, listener, ticket) => {
                (shared, Request::CancelAccept { listener: *listener, ticket: *ticket })
            }
        };
        let Some(shared) = shared.upgrade() else { return false };
        shared.submit(request);
        // A write that has begun goes on, and may take as long as the peer pleases.
        !matches!(self.cancel, Cancel::Write(..))
    }
}

impl<T: Send + 'static> Future for Pending<T> {
    type Output = Result<T, ChannelError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.slot.state();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Ready(result) => Poll::Ready(result),
            State::Waiting(_) => {
                *state = State::Waiting(Some(context.waker().clone()));
                Poll::Pending
            }
            State::Taken => Poll::Ready(Err(ChannelError::Stopped)),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        let waiting = matches!(*self.slot.state(), State::Waiting(_));
        if waiting && !matches!(self.cancel, Cancel::Write(..)) {
            self.cancel();
        }
    }
}
