//! The parts of a streaming call. A sender sends a part only if the receiver has room for it, so neither end holds more
//! than [`WINDOW`] unread parts.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::connection::Connection;
use crate::frame::{Header, Kind};
use crate::{Body, Data, RpcError, Violation};

/// How many parts may be sent but unread.
pub(crate) const WINDOW: u32 = 8;

#[derive(Default)]
struct State {
    received: VecDeque<Body>,
    /// The peer has sent its last part.
    peer_finished: bool,
    /// This end has sent its last part.
    finished: bool,
    /// The peer knows the call. At a client, the request may wait for a credit.
    opened: bool,
    /// How many parts the peer has room for.
    window: u32,
    /// Length of the longest part that the peer accepts, in bytes.
    max: usize,
    /// The result of the call.
    result: Option<Result<Body, RpcError>>,
    waiting: Vec<Waker>,
}

/// The parts of one call at one end.
pub(crate) struct Parts {
    connection: Arc<Connection>,
    call: u64,
    peer: Arc<str>,
    state: Mutex<State>,
}

impl Parts {
    pub fn new(connection: &Arc<Connection>, call: u64, peer: &Arc<str>, window: u32, max: usize) -> Arc<Self> {
        let state = Mutex::new(State { window, max, ..State::default() });
        Arc::new(Self { connection: Arc::clone(connection), call, peer: Arc::clone(peer), state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state and wakes the tasks that wait for a change.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, waiting) = {
            let mut state = self.state();
            (change(&mut state), std::mem::take(&mut state.waiting))
        };
        waiting.into_iter().for_each(Waker::wake);
        result
    }

    /// Waits until `ready` returns a value.
    fn when<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> impl Future<Output = T> {
        poll_fn(move |context: &mut Context<'_>| {
            let mut state = self.state();
            match ready(&mut state) {
                Some(value) => Poll::Ready(value),
                None => {
                    if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                        state.waiting.push(context.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
    }

    /// Lets the peer send this many more parts.
    pub fn grant(&self, credits: u32) {
        let header = Header { call: self.call, credits, ..Header::new(Kind::Window) };
        self.connection.send(header, Vec::new().into());
    }

    /// Sends a part, once the peer has room for it.
    pub async fn send(&self, part: Data) -> Result<(), RpcError> {
        let peer = || Arc::clone(&self.peer);
        let (len, mut part) = (part.as_slice().len(), Some(part));
        self.when(|state| match &state.result {
            Some(Err(error)) => Some(Err(error.clone())),
            Some(Ok(_)) => Some(Err(RpcError::Answered { peer: peer() })),
            None if state.finished => Some(Err(RpcError::Finished)),
            None if state.window == 0 => None,
            None if len > state.max => Some(Err(RpcError::TooLarge { peer: peer(), len, max: state.max })),
            None => {
                state.window -= 1;
                // Under the lock, so that parts stay in order.
                let header = Header { call: self.call, ..Header::new(Kind::Part) };
                part.take().into_iter().for_each(|part| self.connection.send(header, part));
                Some(Ok(()))
            }
        })
        .await
    }

    /// Tells the peer that no more parts follow, once it knows the call.
    pub fn finish(&self) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.finished, true) && state.opened {
            self.send_end(&state);
        }
    }

    /// Called when the peer knows the call, or will before it gets anything that this end sends from now on.
    pub fn open(&self) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.opened, true) && state.finished {
            self.send_end(&state);
        }
    }

    fn send_end(&self, state: &State) {
        if state.result.is_none() {
            let header = Header { call: self.call, code: 1, ..Header::new(Kind::Part) };
            self.connection.send(header, Vec::new().into());
        }
    }

    /// Returns the peer's next part; `None` after its last.
    pub async fn next(&self) -> Result<Option<Body>, RpcError> {
        let next = self.when(|state| match (state.received.pop_front(), &state.result) {
            (Some(part), _) => Some(Ok(Some(part))),
            (None, Some(Err(error))) if !state.peer_finished => Some(Err(error.clone())),
            (None, None) if !state.peer_finished => None,
            (None, _) => Some(Ok(None)),
        });
        let part = next.await?;
        if part.is_some() {
            self.grant(1);
        }
        Ok(part)
    }

    /// Returns the answer, which can be taken once.
    pub async fn answer(&self) -> Result<Body, RpcError> {
        self.when(|state| state.result.take()).await
    }

    /// Called when a part has arrived: the last one has `code` 1 and no bytes.
    pub fn received(&self, header: &Header, part: Body) -> Result<(), Violation> {
        self.change(|state| {
            match header.code {
                _ if state.peer_finished => return Err(Violation::PartNotGranted),
                0 if state.received.len() >= WINDOW as usize => return Err(Violation::PartNotGranted),
                0 => state.received.push_back(part),
                // Not a part: it takes no room.
                _ => state.peer_finished = true,
            }
            Ok(())
        })
    }

    /// Called when the peer has room for this many more parts.
    pub fn granted(&self, credits: u32, max: usize) {
        self.change(|state| (state.window, state.max) = (state.window.saturating_add(credits), max));
    }

    /// Called when the call has ended.
    pub fn end(&self, result: Result<Body, RpcError>) {
        self.change(|state| {
            state.result.get_or_insert(result);
        });
    }
}
