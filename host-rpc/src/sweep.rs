//! Deadlines: one thread for the whole process looks at all clients a hundred times a second, as long as there are any.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// How late a deadline may be noticed.
const TICK: Duration = Duration::from_millis(10);

/// Something with deadlines.
pub(crate) trait Swept: Send + Sync {
    /// Ends what is overdue.
    fn sweep(&self, now: Instant);
}

struct Sweeper {
    all: Mutex<Vec<Weak<dyn Swept>>>,
    more: Condvar,
}

static THREAD: OnceLock<ThreadId> = OnceLock::new();

/// True on the thread that looks after deadlines.
pub(crate) fn is_own_thread() -> bool {
    THREAD.get() == Some(&thread::current().id())
}

/// Looks after `swept` from now on, until it is dropped.
pub(crate) fn watch(swept: Weak<dyn Swept>) {
    static SWEEPER: OnceLock<&'static Sweeper> = OnceLock::new();
    let sweeper = SWEEPER.get_or_init(|| {
        let sweeper: &'static Sweeper =
            Box::leak(Box::new(Sweeper { all: Mutex::new(Vec::new()), more: Condvar::new() }));
        if let Err(error) = thread::Builder::new().name("rpc-deadlines".to_owned()).spawn(move || run(sweeper)) {
            log::error!("no thread for deadlines: {error}");
        }
        sweeper
    });
    sweeper.all.lock().unwrap_or_else(PoisonError::into_inner).push(swept);
    sweeper.more.notify_one();
}

fn run(sweeper: &Sweeper) {
    THREAD.get_or_init(|| thread::current().id());
    loop {
        let alive: Vec<Arc<dyn Swept>> = {
            let mut all = sweeper.all.lock().unwrap_or_else(PoisonError::into_inner);
            while all.is_empty() {
                all = sweeper.more.wait(all).unwrap_or_else(PoisonError::into_inner);
            }
            all.retain(|swept| swept.strong_count() > 0);
            all.iter().filter_map(Weak::upgrade).collect()
        };
        let now = Instant::now();
        for swept in alive {
            swept.sweep(now);
        }
        thread::sleep(TICK);
    }
}
