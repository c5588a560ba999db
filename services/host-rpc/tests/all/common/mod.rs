//! A transport in memory, and settings for channels, shared by several tests.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use ferrogin_channel::Config;
use ferrogin_test_support::wait::HANG_LIMIT;
use host_rpc::{Payload, ReceiveDone, SendDone, Transport, TransportError};

#[derive(Default)]
struct Side {
    arrived: VecDeque<Vec<u8>>,
    waiting: VecDeque<ReceiveDone>,
}

#[derive(Default)]
struct State {
    sides: [Side; 2],
    sent: VecDeque<SendDone>,
    closed: bool,
    /// How many ends were dropped.
    dropped: usize,
}

/// One end of a pipe in memory; the pipe's thread runs the callbacks.
pub struct Pipe {
    shared: Arc<(Mutex<State>, Condvar)>,
    side: usize,
}

pub fn pipe() -> (Pipe, Pipe) {
    let shared: Arc<(Mutex<State>, Condvar)> = Arc::default();
    let thread_shared = Arc::clone(&shared);
    thread::spawn(move || {
        let (state, change) = &*thread_shared;
        loop {
            let mut state = state.lock().unwrap();
            if let Some(done) = state.sent.pop_front() {
                let result = if state.closed { Err(TransportError::Closed) } else { Ok(()) };
                drop(state);
                done(result);
                continue;
            }
            let closed = state.closed;
            let mut ready = None;
            for side in &mut state.sides {
                if !side.waiting.is_empty() && (closed || !side.arrived.is_empty()) {
                    let message = side.arrived.pop_front().ok_or(TransportError::Closed);
                    ready = side.waiting.pop_front().map(|done| (done, message));
                    break;
                }
            }
            if let Some((done, message)) = ready {
                drop(state);
                done(message);
            } else if state.dropped == 2 {
                return;
            } else {
                drop(change.wait(state).unwrap());
            }
        }
    });
    (Pipe { shared: Arc::clone(&shared), side: 0 }, Pipe { shared, side: 1 })
}

impl Transport for Pipe {
    fn peer(&self) -> &str {
        ["the server", "the client"][self.side]
    }

    fn max_message(&self) -> usize {
        1 << 20
    }

    fn send(&self, message: Payload, done: SendDone) {
        let mut state = self.shared.0.lock().unwrap();
        assert!(message.as_slice().len() <= self.max_message());
        state.sides[1 - self.side].arrived.push_back(message.as_slice().to_vec());
        state.sent.push_back(done);
        self.shared.1.notify_all();
    }

    fn receive(&self, done: ReceiveDone) {
        self.shared.0.lock().unwrap().sides[self.side].waiting.push_back(done);
        self.shared.1.notify_all();
    }

    fn close(&self, _limit: Duration) {
        self.shared.0.lock().unwrap().closed = true;
        self.shared.1.notify_all();
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.shared.0.lock().unwrap().dropped += 1;
        self.shared.1.notify_all();
    }
}

/// For tests in which both ends live: no peer is given up because a busy machine delays it.
pub fn patient_config() -> Config {
    Config { lost_after: HANG_LIMIT, connect_within: HANG_LIMIT, ..Config::default() }
}
