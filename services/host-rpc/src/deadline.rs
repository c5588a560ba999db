//! Deadlines: one thread per process checks all clients a hundred times a second.

use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// The interval between two checks: a deadline is noticed at most this late.
const INTERVAL: Duration = Duration::from_millis(10);

/// An object whose calls have deadlines.
pub(crate) trait Expire: Send + Sync {
    /// Ends every call whose deadline has passed.
    fn expire(&self, now: Instant);
}

struct Timer {
    watched: Mutex<Vec<Weak<dyn Expire>>>,
    added: Condvar,
}

static THREAD: OnceLock<ThreadId> = OnceLock::new();

/// Returns true on the thread that checks deadlines.
pub(crate) fn is_own_thread() -> bool {
    THREAD.get() == Some(&thread::current().id())
}

/// Checks the deadlines of `object` from now on, until the object is dropped.
pub(crate) fn watch(object: Weak<dyn Expire>) {
    static TIMER: OnceLock<&'static Timer> = OnceLock::new();
    let timer = TIMER.get_or_init(|| {
        let timer: &'static Timer =
            Box::leak(Box::new(Timer { watched: Mutex::new(Vec::new()), added: Condvar::new() }));
        if let Err(error) = thread::Builder::new().name("rpc-deadlines".to_owned()).spawn(move || run(timer)) {
            log::error!("the thread that checks deadlines did not start, so calls have no deadlines: {error}");
        }
        timer
    });
    timer.watched.lock().push(object);
    timer.added.notify_one();
}

fn run(timer: &Timer) {
    THREAD.get_or_init(|| thread::current().id());
    loop {
        let alive: Vec<Arc<dyn Expire>> = {
            let mut watched = timer.watched.lock();
            while watched.is_empty() {
                timer.added.wait(&mut watched);
            }
            watched.retain(|object| object.strong_count() > 0);
            watched.iter().filter_map(Weak::upgrade).collect()
        };
        let now = Instant::now();
        for object in alive {
            object.expire(now);
        }
        thread::sleep(INTERVAL);
    }
}
