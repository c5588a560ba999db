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
