//! The signal proxy: a host thread that adds peers' emulated signals to words in memory.
//!
//! EFA has no atomic operations. A signal arrives as a completion in its context's [`inbox`], after all the bytes that
//! it covers, and the proxy adds it to its word in one step. `docs/signals.md` says what that guarantees.
//!
//! The thread runs while the process has an inbox. It serves the inboxes in turn. The watcher checks its [`Pulse`], and
//! closes the inboxes of a signal proxy that has exited or lags, so that peers' requests fail instead of being retried
//! forever. A thread that frees memory which a round may be using waits for the end of the round ([`wait_out`]).
//!
//! # The protocol
//!
//! `ferrogin_ffi::signals` has both halves, without I/O. A signal takes one of four routes:
//!
//! | signal | route |
//! |---|---|
//! | weak, indexed below 65,536, amount 1 to 4,096 | immediate data of its own put, or of an empty write |
//! | strong, the same | an empty write with the immediate, once everything that the context posted to the peer before has completed |
//! | any other with a put, or strong | a send of 32 bytes, once its put (or, if strong, everything as above) has completed |
//! | any other without a put, weak | a send at once |
//!
//! An amount of 0 posts no signal. A weak signal that waits for its put waits for more than it has to, because counters
//! don't identify requests.
//!
//! * **Immediate**: signal (16 bits), amount minus one (12), generation (4).
//! * **Message**: kind, version, generation (16), signal or remote key (32), amount (64), address (64), rank (32);
//!   reserved bytes are 0.
//! * **Context.** A queue pair belongs to one context, so the completion identifies the context.
//! * **Covered requests.** After the group of threads has synchronised, the sender takes a snapshot of the endpoints
//!   that the context has used, as `fgin_flush_async` does, so it includes the puts of all lanes of a warp, and covers
//!   all peers. Later posts of other threads don't prolong the wait.
//! * **Credits.** Each signal takes one posted receive. If none is posted, the receiver's card refuses the request and
//!   the sender's card retries it. So the posted receives are the credits of all senders together: no sender counts,
//!   and the completion queue, which has as many entries, can't overflow. This requires that writes with immediate data
//!   take receives: on libfabric's `efa-direct`, the mode bit `FI_RX_CQ_DATA` turns the card's other behaviour
//!   (unsolicited writes) off.
//! * **Generations.** The receiver numbers its contexts and tells peers the number with the queue pair. A context that
//!   replaces another refuses the earlier one's signals: a request still in flight has the wrong QKey, an immediate has
//!   4 bits of the generation, and each context has a completion queue of its own, so no entry of an earlier context is
//!   read.
//! * **Wraps.** Amounts and words are modulo 2^64. No other number of the protocol counts, so none wraps.
//! * **Retransmission.** The card may read a write's source late. Immediates and inline sends are part of the request,
//!   so they have no source that could change.
//!
//! # A round
//!
//! Each context has an inbox, a queue pair that only receives, with 4,096 receives of 32 bytes. All requests of peers
//! to the context go there, including puts without a signal, so that the host can close it while kernels post on the
//! other queue pairs. In each round the signal proxy reads up to 512 completions of each inbox, makes their bytes
//! visible, adds, and posts the receives again. After 64 rounds without a completion it asks for an event, makes one
//! more round, and sleeps: for at most 100 ms, or without an event for 20 µs to 1 ms. It writes and reads the rings
//! itself, as kernels do; libfabric opens them and provides the event.
//!
//! **Bytes before signals.** A completion in CPU memory says nothing about bytes that the card wrote to GPU memory over
//! another PCIe path. So with a GPU, the signal proxy calls `cuFlushGPUDirectRDMAWrites` between a round's completions
//! and its adds, unless the driver says that the GPU keeps writes in order. The software card needs no flush, and works
//! with a driver that has none: it has written all bytes, through the driver or its own mapping, before it writes the
//! completion.
//!
//! **Checks.** The key names a window that is registered now, the 8 bytes lie in it and are aligned, the signal exists,
//! the generation is this context's, the rank exists, the reserved bytes are 0. A signal that fails a check changes no
//! memory. It's counted in `ferrogin_signals_refused_total`; at most every ten seconds, a WARN line names the first one
//! and says how many others there were.
//!
//! **A signal proxy that exits or lags.** It counts its rounds. If it has exited, or has begun none for 5 s (as long as
//! a card may stay silent), the watcher raises the abort flag of all emulated contexts, with one WARN line per
//! `createContext`, and closes the inboxes; one that the signal proxy is using at that moment is closed by it when it
//! returns. `destroyContext`, `deregMrSym` and `closeColl` wait for the end of its round. While it lags for less than
//! that, senders are slower and nothing is lost.
#![allow(unsafe_code)]

pub mod inbox;
pub mod windows;

use inbox::Inbox;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::{Mutex, MutexGuard};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest sleep. An event from a card ends it.
const SLEEP: Duration = Duration::from_millis(100);
/// Sleep between polls if a provider has no events: from the first to the second, doubled each time.
const POLL: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// Rounds without a completion before a sleep.
const IDLE_ROUNDS: u32 = 64;
/// Time without a round after which the signal proxy counts as lagging: as long as a card may be silent.
const LAG: Duration = Duration::from_secs(5);
/// The most that the time between two checks counts for: if it's longer, as in a stopped process, the watcher didn't
/// run either.
const MAX_STEP: Duration = Duration::from_millis(50);

/// An inbox that the signal proxy serves.
pub struct Served {
    /// `None` while the signal proxy is using it, and once it's closed.
    inbox: Mutex<Option<Inbox>>,
    /// Tells the signal proxy to leave the inbox alone, or to close it if it's using it.
    closing: AtomicBool,
    /// The number of rounds, and of those that found nothing.
    rounds: [AtomicU64; 2],
}

impl Served {
    fn lock(&self) -> MutexGuard<'_, Option<Inbox>> {
        self.inbox.lock()
    }

    /// Closes the inbox, after which peers' requests to it fail. If the signal proxy is using it, the proxy closes it
    /// when it's done.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        let inbox = self.lock().take();
        drop(inbox);
    }

    fn new(inbox: Option<Inbox>) -> Self {
        Self { inbox: Mutex::new(inbox), closing: AtomicBool::new(false), rounds: Default::default() }
    }

    /// Serves the inbox once. Returns the number of completions, or `None` if the signal proxy must exit.
    fn round(&self, shared: &Shared) -> Option<usize> {
        let completions = shared.in_round(|| self.serve())?;
        self.rounds[0].fetch_add(1, Ordering::Release);
        self.rounds[1].fetch_add(u64::from(completions == 0), Ordering::Release);
        Some(completions)
    }

    fn rounds(&self) -> [u64; 2] {
        self.rounds.each_ref().map(|count| count.load(Ordering::Acquire))
    }

    fn serve(&self) -> Option<usize> {
        // A thread that closes the inbox sets this before it waits for the round.
        if self.closing.load(Ordering::Acquire) {
            return Some(0);
        }
        let Some(mut inbox) = self.lock().take() else { return Some(0) };
        let completions = match inbox.round() {
            Ok(completions) => completions,
            Err(error) => {
                crate::warn!("the signal proxy stops: {error}; check the card, the GPU and their drivers");
                return None;
            }
        };
        let mut place = self.lock();
        if !self.closing.load(Ordering::Acquire) {
            *place = Some(inbox);
        }
        Some(completions)
    }
}

#[derive(Default)]
struct Table {
    served: Vec<Arc<Served>>,
    thread: Option<Thread>,
}

struct Thread {
    handle: JoinHandle<()>,
    shared: Arc<Shared>,
}

/// What the signal proxy's thread shares with others.
struct Shared {
    stop: AtomicBool,
    wake: EventFd,
    /// Held during a round.
    round: Mutex<()>,
    /// Number of rounds begun.
    rounds: AtomicU64,
}

impl Shared {
    fn new() -> std::io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { stop: false.into(), wake, round: Mutex::new(()), rounds: 0.into() })
    }

    fn in_round<T>(&self, body: impl FnOnce() -> T) -> T {
        let round = self.round.lock();
        self.rounds.fetch_add(1, Ordering::Relaxed);
        let result = body();
        // The next round waits for the threads that wait for this one.
        MutexGuard::unlock_fair(round);
        result
    }
}

static TABLE: Mutex<Table> = Mutex::new(Table { served: Vec::new(), thread: None });

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock()
}

/// Waits until the signal proxy has left any round that began before this call, which lasts as long as the driver calls
/// in it.
pub fn wait_out() {
    let Some(shared) = table().thread.as_ref().map(|thread| thread.shared.clone()) else { return };
    drop(shared.round.lock());
}

/// Waits until the signal proxy has added the signals that had arrived before this call, in all contexts of the
/// process. Gives up on a signal proxy that has stopped.
pub fn catch_up() {
    // A card may count a signal as delivered shortly before it writes the completion, so one empty round isn't enough.
    // The round that is in progress now may be a third. A peer that keeps sending leaves no round empty; the completion
    // queue holds no more than this many rounds.
    let has_caught_up = |[rounds, empty]: [u64; 2], [first, first_empty]: [u64; 2]| {
        empty >= first_empty + 3 || rounds >= first + 3 + (inbox::DEPTH / inbox::BATCH) as u64
    };
    let mut waiting: Vec<_> = table().served.iter().map(|served| (served.clone(), served.rounds())).collect();
    loop {
        {
            let table = table();
            let Some(thread) = table.thread.as_ref().filter(|thread| !thread.handle.is_finished()) else { return };
            waiting.retain(|(served, first)| {
                !has_caught_up(served.rounds(), *first) && table.served.iter().any(|open| Arc::ptr_eq(open, served))
            });
            if waiting.is_empty() {
                return;
            }
            let _ = thread.shared.wake.write(1);
        }
        wait_out();
        std::thread::sleep(POLL[0]);
    }
}

/// Stops serving an inbox when dropped. Afterwards the signal proxy accesses none of its memory.
pub struct Guard(Arc<Served>);

/// Hands an inbox to the signal proxy.
///
/// # Errors
/// The thread doesn't start, or it has exited while serving other inboxes that are still open.
pub fn serve(inbox: Inbox) -> std::io::Result<Guard> {
    let served = Arc::new(Served::new(Some(inbox)));
    let mut table = table();
    if table.thread.as_ref().is_some_and(|thread| thread.handle.is_finished()) {
        return Err(std::io::Error::other(
            "it has already stopped: close the communicators of this process that have emulated signals, and see the \
             WARN lines above",
        ));
    }
    if table.thread.is_none() {
        let shared = Arc::new(Shared::new()?);
        let proxy = shared.clone();
        let handle = std::thread::Builder::new().name("ferrogin-proxy".to_owned()).spawn(move || run(&proxy))?;
        table.thread = Some(Thread { handle, shared });
    }
    table.served.push(served.clone());
    if let Some(thread) = &table.thread {
        // The signal proxy only sleeps on the descriptors of inboxes that it knows.
        let _ = thread.shared.wake.write(1);
    }
    Ok(Guard(served))
}

impl Guard {
    /// Returns the inbox, for the watcher.
    pub fn served(&self) -> Arc<Served> {
        self.0.clone()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.closing.store(true, Ordering::Release);
        wait_out();
        self.0.close();
        let mut table = table();
        table.served.retain(|served| !Arc::ptr_eq(served, &self.0));
        if !table.served.is_empty() {
            return;
        }
        let Some(thread) = table.thread.take() else { return };
        drop(table);
        thread.shared.stop.store(true, Ordering::Release);
        let _ = thread.shared.wake.write(1);
        // NCCL may unload this library next, so the thread must have exited. It has no inbox, so no driver call holds
        // it up.
        let _ = thread.handle.join();
    }
}

fn run(shared: &Shared) {
    let (mut idle, mut pause) = (0, POLL[0]);
    while !shared.stop.load(Ordering::Acquire) {
        let served = table().served.clone();
        let serve = || served.iter().map(|served| served.round(shared)).sum::<Option<usize>>();
        let Some(taken) = serve() else { return };
        if taken > 0 {
            (idle, pause) = (0, POLL[0]);
            continue;
        }
        idle += 1;
        if idle < IDLE_ROUNDS {
            std::thread::yield_now();
            continue;
        }
        // Completions between the last round and arming wouldn't raise an event.
        served.iter().for_each(|served| {
            if let Some(inbox) = &*served.lock() {
                inbox.arm();
            }
        });
        let Some(late) = serve() else { return };
        if late > 0 {
            idle = 0;
            continue;
        }
        sleep(&served, &shared.wake, &mut pause);
    }
}

/// Sleeps until an inbox has an event, [`serve`] is called, or the thread is stopped. `pause` is the sleep if an inbox
/// has no events.
fn sleep(served: &[Arc<Served>], wake: &EventFd, pause: &mut Duration) {
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut fds = vec![entry(wake.as_fd().as_raw_fd())];
    let mut limit = SLEEP;
    for served in served {
        match served.lock().as_ref().map(Inbox::wait_fd) {
            Some(Some(fd)) => fds.push(entry(fd)),
            Some(None) => limit = *pause,
            None => {}
        }
    }
    let limit_ns = libc::timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    // SAFETY: the array has `fds.len()` entries, and a descriptor that was closed meanwhile only ends the sleep early.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, &limit_ns, std::ptr::null()) };
    *pause = (*pause * 2).min(POLL[1]);
    let _ = wake.read();
}

/// The watcher's view of the signal proxy's progress.
#[derive(Debug)]
pub struct Pulse {
    rounds: u64,
    last_check: Instant,
    /// Time without a round.
    idle: Duration,
}

impl Pulse {
    /// Starts the view of a watcher that hasn't checked before `now`.
    pub fn new(now: Instant) -> Self {
        Self { rounds: 0, last_check: now, idle: Duration::ZERO }
    }

    /// Returns what is wrong with the signal proxy `now`, if anything. The caller must ask at least every 50 ms.
    pub fn problem(&mut self, now: Instant) -> Option<&'static str> {
        let table = table();
        let Some(thread) = table.thread.as_ref().filter(|thread| !thread.handle.is_finished()) else {
            return Some("has ended");
        };
        self.lags(thread.shared.rounds.load(Ordering::Relaxed), now).then_some("made no progress for 5 s")
    }

    /// Returns whether the signal proxy lags.
    fn lags(&mut self, rounds: u64, now: Instant) -> bool {
        let step = now.duration_since(self.last_check).min(MAX_STEP);
        let idle = if rounds == self.rounds { self.idle + step } else { Duration::ZERO };
        *self = Self { rounds, last_check: now, idle };
        idle > LAG
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{self, Kind};
    use crate::watcher::{Report, Watch};
    use ferrogin_test_support::{child, wait::wait_until};
    use std::sync::mpsc::{Sender, channel};

    #[test]
    fn process_pause_is_not_a_lag() {
        let mut now = Instant::now();
        let mut pulse = Pulse::new(now);
        let mut lags = |step, rounds| {
            now += step;
            pulse.lags(rounds, now)
        };
        assert!(!lags(Duration::from_millis(1), 1));
        assert!((0..50).all(|_| !lags(Duration::from_millis(1), 1)), "the signal proxy sleeps");
        assert!(!lags(Duration::from_secs(3600), 1), "the process was stopped");
        assert!((0..98).all(|_| !lags(Duration::from_secs(1), 1)), "no longer than 5 s, by steps of 50 ms");
        assert!(lags(Duration::from_secs(1), 1));
        assert!(!lags(Duration::from_secs(1), 2), "a round");
    }

    /// Starts the thread of an idle signal proxy, which exits when the sender is dropped.
    fn start_proxy() -> (Arc<Shared>, Sender<()>) {
        let (end, ended) = channel();
        let shared = Arc::new(Shared::new().unwrap());
        let handle = std::thread::spawn(move || {
            let _ = ended.recv();
        });
        table().thread = Some(Thread { handle, shared: shared.clone() });
        (shared, end)
    }

    /// Calls `body` with the watcher's check of a context with emulated signals, at any given time: true once its waits
    /// are aborted.
    fn with_watched_context(body: impl FnOnce(&mut dyn FnMut(Instant) -> bool, Instant)) {
        let (handle, began) = (registry::insert(Kind::Context, Arc::new(())).unwrap(), Instant::now());
        let served = Arc::new(Served::new(None));
        let mut watch = Watch::of(handle as usize, 2);
        watch.proxy = Some((Pulse::new(began), vec![served.clone()]));
        let mut check = |now| {
            watch.round(now);
            let failed = registry::fault(handle, Kind::Context) == Ok(true);
            assert_eq!((watch.stop.is_raised(), watch.report == Report::Done), (failed, failed));
            assert_eq!(served.closing.load(Ordering::Acquire), failed, "the inbox is closed");
            failed
        };
        body(&mut check, began);
        registry::remove::<()>(handle, Kind::Context).unwrap();
    }

    #[test]
    fn proxy_that_makes_no_progress_for_five_seconds_fails_its_contexts() {
        // A process has one signal proxy.
        let lines = child::run("proxy_that_makes_no_progress_for_five_seconds_fails_its_contexts", &[], || {
            let (shared, _end) = start_proxy();
            with_watched_context(|check, mut now| {
                let mut check_later = || {
                    now += MAX_STEP;
                    check(now)
                };
                assert!((0..100).all(|_| !check_later()), "5 s");
                shared.in_round(|| ());
                assert!((0..101).all(|_| !check_later()), "progress, and 5 s");
                assert!(check_later());
                assert!(check_later(), "keeps waiting");
            });
        });
        assert!(lines.is_none_or(|lines| lines.matches("made no progress").count() == 1));
    }

    #[test]
    fn proxy_that_ends_fails_its_contexts() {
        // A process has one signal proxy.
        let lines = child::run("proxy_that_ends_fails_its_contexts", &[], || {
            let (_, end) = start_proxy();
            with_watched_context(|check, now| {
                assert!(!check(now));
                drop(end);
                wait_until("end of the thread", || {
                    table().thread.as_ref().is_some_and(|thread| thread.handle.is_finished())
                });
                assert!(check(now));
            });
        });
        assert!(lines.is_none_or(|lines| lines.matches("has ended").count() == 1));
    }

    #[test]
    fn wait_ends_after_the_round_that_may_use_the_memory() {
        // A process has one signal proxy.
        child::run("wait_ends_after_the_round_that_may_use_the_memory", &[], || {
            let (shared, _end) = start_proxy();
            let [known, freed, stop] = [const { AtomicBool::new(false) }; 3];
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Acquire) {
                        shared.in_round(|| {
                            if known.load(Ordering::SeqCst) {
                                std::thread::yield_now();
                                assert!(!freed.load(Ordering::SeqCst), "used after the wait");
                            }
                        });
                    }
                });
                for _ in 0..100 {
                    freed.store(false, Ordering::SeqCst);
                    known.store(true, Ordering::SeqCst);
                    std::thread::yield_now();
                    known.store(false, Ordering::SeqCst);
                    wait_out();
                    freed.store(true, Ordering::SeqCst);
                }
                stop.store(true, Ordering::Release);
            });
        });
    }
}
