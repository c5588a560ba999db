//! The flag by which a sleeping thread is woken, without a system call while it is awake.
//!
//! The sleeper sets the flag, then checks for work once more. A waker adds work, then checks the flag. All four steps have one total
//! order, so one of the two sees the other: no wake-up is lost.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the thread sleeps or is about to sleep.
pub(crate) struct Parker {
    asleep: AtomicBool,
}

impl Parker {
    pub fn new() -> Self {
        Self { asleep: AtomicBool::new(false) }
    }

    /// Prepares to sleep. The sleeper then checks for work once more.
    pub fn prepare(&self) {
        self.asleep.swap(true, Ordering::SeqCst);
    }

    /// The sleeper found work, or is awake again.
    pub fn cancel(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// True when the caller, which has added work, must wake the sleeper.
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

    /// A thread that sleeps although there is work is woken by one of two wakers, in every interleaving.
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
