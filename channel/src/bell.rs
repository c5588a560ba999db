//! How a thread that sleeps is woken, without a system call while it is awake.
//!
//! The sleeper says that it is about to sleep, *then* looks for work once more; the waker brings work, *then* looks whether
//! anybody sleeps. Both steps are in one total order, so one of the two sees the other: no wake-up is lost.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the thread sleeps or is about to.
pub(super) struct Bell {
    asleep: AtomicBool,
}

impl Bell {
    pub fn new() -> Self {
        Self { asleep: AtomicBool::new(false) }
    }

    /// The sleeper, before its last look for work.
    pub fn lie_down(&self) {
        self.asleep.swap(true, Ordering::SeqCst);
    }

    /// The sleeper, after sleep or when its last look found work.
    pub fn get_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// The waker, after it has brought work: true when it must wake the sleeper.
    pub fn must_ring(&self) -> bool {
        // An exchange, so that it is ordered with `lie_down`, and so that one waker rings and the others need not.
        self.asleep.swap(false, Ordering::SeqCst)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::Bell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::thread;

    /// Whoever sleeps although there is work is woken by one of those who brought it, in every interleaving.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let shared = Arc::new((Bell::new(), AtomicU32::new(0), AtomicU32::new(0)));
            let wakers: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        let (bell, work, rung) = &*shared;
                        work.fetch_add(1, Ordering::Relaxed);
                        if bell.must_ring() {
                            rung.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let (bell, work, rung) = &*shared;
            bell.lie_down();
            let saw = work.load(Ordering::Relaxed);
            if saw > 0 {
                bell.get_up();
            }
            for waker in wakers {
                waker.join().unwrap();
            }
            let rung = rung.load(Ordering::Relaxed);
            assert!(saw > 0 || rung == 1, "asleep with work: saw {saw}, rung {rung}");
        });
    }
}
