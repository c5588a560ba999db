//! The flag that tells whether a thread must be woken; while it's awake, that costs no system call.
//!
//! The sleeper sets the flag, then checks for work once more. A waker adds work, then checks the flag. All four steps
//! are totally ordered, so one of the two sees the other and no wake-up is lost.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the thread is asleep or about to sleep.
pub(crate) struct Parker {
    asleep: AtomicBool,
}

impl Parker {
    pub fn new() -> Self {
        Self { asleep: AtomicBool::new(false) }
    }

    /// Prepares to sleep. The sleeper must then check for work once more.
    pub fn prepare(&self) {
        self.asleep.swap(true, Ordering::SeqCst);
    }

    /// Called when the sleeper found work or is awake again.
    pub fn cancel(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Returns whether the caller, which has added work, must wake the sleeper.
    pub fn must_wake(&self) -> bool {
        // An exchange is ordered with `prepare`, and only one of several wakers gets true.
        self.asleep.swap(false, Ordering::SeqCst)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::Parker;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::thread;

    /// A thread that goes to sleep with work pending is woken by exactly one of two wakers, in every interleaving.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let shared = Arc::new((Parker::new(), AtomicU32::new(0), AtomicU32::new(0)));
            let wakers: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        let (parker, work, woken) = &*shared;
                        work.fetch_add(1, Ordering::Relaxed);
                        if parker.must_wake() {
                            woken.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let (parker, work, woken) = &*shared;
            parker.prepare();
            let saw = work.load(Ordering::Relaxed);
            if saw > 0 {
                parker.cancel();
            }
            for waker in wakers {
                waker.join().unwrap();
            }
            let woken = woken.load(Ordering::Relaxed);
            assert!(saw > 0 || woken == 1, "asleep with work: saw {saw}, woken {woken}");
        });
    }
}
