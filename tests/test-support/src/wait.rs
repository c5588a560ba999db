//! Waits for events.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// How long a test waits for an event before it assumes that the program hangs. No test passes or fails with the
/// machine's speed: this limit only ends a run that would otherwise never end, so it is far longer than any delay on a
/// busy machine.
pub const HANG_LIMIT: Duration = Duration::from_secs(240);

/// The time between two checks of a condition that can only be polled.
const INTERVAL: Duration = Duration::from_millis(1);

/// Calls `poll` until it returns a value.
///
/// # Panics
/// After [`HANG_LIMIT`]; the message names `what`.
#[track_caller]
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    look(what, &mut poll, || std::thread::sleep(INTERVAL))
}

/// Calls `ready` until it returns true.
///
/// # Panics
/// As [`wait_for`].
#[track_caller]
pub fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    wait_for(what, || ready().then_some(()));
}

/// Calls `ready` until it returns true, without pausing between calls: for a test whose own calls make the progress
/// that it waits for.
///
/// # Panics
/// As [`wait_for`].
#[track_caller]
pub fn poll_until(what: &str, mut ready: impl FnMut() -> bool) {
    look(what, &mut || ready().then_some(()), std::thread::yield_now);
}

/// Calls `poll` until it returns a value, and `pause` between calls.
#[track_caller]
fn look<T>(what: &str, poll: &mut dyn FnMut() -> Option<T>, pause: impl Fn()) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(began.elapsed() < HANG_LIMIT, "no {what} within {HANG_LIMIT:?}");
        pause();
    }
}

/// Receives the next value that another thread sends.
///
/// # Panics
/// After [`HANG_LIMIT`], or if the thread has ended; the message names `what`.
#[track_caller]
pub fn receive<T>(what: &str, values: &Receiver<T>) -> T {
    values.recv_timeout(HANG_LIMIT).unwrap_or_else(|error| panic!("no {what}: {error}"))
}
