//! Which process this is. A process that `fork` makes inherits the library's memory, but none of its threads, and
//! perhaps locks that other threads held: what the parent opened stays the parent's, and the child opens its own.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use crate::log;

/// How many forks lie between the process that loaded the library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A process: a parent and its child have different ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// Returns the calling process.
    pub fn current() -> Self {
        static COUNTS: Once = Once::new();
        // SAFETY: the handler changes an atomic and nothing else. If the library is unloaded, the C library forgets the
        // handler.
        COUNTS.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is the calling process. The first call of [`Process::current`] was before.
    #[inline]
    pub fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Whether this process inherited the library from a parent that used it.
    pub fn is_child(self) -> bool {
        self.0 > 0
    }
}

/// How many open objects use this one, and the process that opened it.
#[derive(Debug)]
pub struct Uses {
    count: AtomicU32,
    process: Process,
}

impl Default for Uses {
    fn default() -> Self {
        Self { count: AtomicU32::new(0), process: Process::current() }
    }
}

impl Uses {
    /// Counts another use.
    pub fn begin(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends a use.
    pub fn end(&self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether an open object uses this one.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Whether the parent process opened the object, before it forked this process.
    pub fn are_inherited(&self) -> bool {
        !self.process.is_current()
    }
}

/// Logs, once in each process, that a call named an object that the parent process opened.
pub fn log_inherited(object: &str) {
    static LOGGED: PerProcess<OnceLock<()>> = PerProcess::new();
    LOGGED.get().get_or_init(|| {
        log::line(format_args!(
            "softefa: the {object} was opened before fork() and belongs to the parent process; this process must open its own"
        ));
    });
}

/// Has a function called when the process ends by `exit` or by returning from `main`.
pub(crate) fn at_exit(function: extern "C" fn()) {
    static ONCE: Once = Once::new();
    // SAFETY: the library stays loaded, or the C library calls the function when it is unloaded.
    ONCE.call_once(|| _ = unsafe { libc::atexit(function) });
}

/// A static of which each process has its own. A forked child gets a new one, and leaves its parent's as it was
/// inherited.
#[derive(Debug)]
pub struct PerProcess<T>(AtomicPtr<(Process, T)>);

impl<T: Default + Send + Sync> PerProcess<T> {
    /// Creates the static. Each process's value is made at its first use.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns this process's value.
    pub fn get(&'static self) -> &'static T {
        let process = Process::current();
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: null, or from a box that is never freed once it is here.
            match unsafe { known.as_ref() } {
                Some((owner, value)) if *owner == process => return value,
                _ => {}
            }
            let made = Box::into_raw(Box::new((process, T::default())));
            if self.0.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: another thread's value took the place, so only this thread has the address.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

impl<T: Default + Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    #[test]
    fn child_gets_its_own_even_if_parents_is_locked() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
        let process = Process::current();
        let mut locked = VALUE.get().lock().unwrap();
        *locked = 7;
        // SAFETY: the child takes no lock of another thread's, allocates once, and leaves without running destructors.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let own = VALUE.get().lock().is_ok_and(|value| *value == 0);
                let right = own && !process.is_current() && Process::current().is_child();
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!right)) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
                assert_eq!(*locked, 7);
                drop(locked);
                assert!(process.is_current() && *VALUE.get().lock().unwrap() == 7);
            }
        }
    }
}
