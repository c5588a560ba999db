//! The signal proxy: a host thread that adds peers' emulated signals to words in memory.
//!
//! EFA has no atomic operations. A signal arrives as a completion in its context's [`inbox`], after all the bytes that
//! it covers, and the proxy adds it to its word in one step. `docs/signals.md` says what that guarantees.
//!
//! The thread runs while the process has an inbox. It serves the inboxes in turn. The watcher checks its [`Pulse`], and
//! closes the inboxes of a signal proxy that has exited or lags, so that peers' requests fail instead of being retried
//! forever. [`Rounds`](crate::rounds) tells whether the signal proxy may be using memory that another thread wants to
//! free, and bounds the wait for a signal proxy stuck in a driver.
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
//! **A signal proxy that exits or lags.** It counts its rounds and its driver calls. If it has exited, or has finished
//! neither a round nor a call for 5 s (as long as a card may stay silent), the watcher raises the abort flag of all
//! emulated contexts, with one WARN line per `createContext`, and closes the inboxes; one that the signal proxy is
//! using at that moment is closed by it when it returns. If it stays in a driver call for two seconds,
//! `destroyContext`, `deregMrSym` and `closeColl` go on without it, with a WARN line. Its thread and the inbox with its
//! memory stay until the call returns; from then on it touches no other memory, and the next context starts another
//! signal proxy. While it lags for less than that, senders are slower and nothing is lost.
#![allow(unsafe_code)]

pub mod inbox;
pub mod windows;

use crate::rounds::{Out, Rounds};
use inbox::Inbox;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest sleep. An event from a card ends it.
const SLEEP: Duration = Duration::from_millis(100);
/// Sleep between polls if a provider has no events: from the first to the second, doubled each time.
const POLL: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// Rounds without a completion before a sleep.
const IDLE_ROUNDS: u32 = 64;
/// Time without a round or driver call after which the signal proxy counts as lagging: as long as a card may be silent.
const LAG: Duration = Duration::from_secs(5);
/// The most that the time between two looks counts for: if it's longer, as in a stopped process, the watcher didn't run either.
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
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the inbox, after which peers' requests to it fail. If the signal proxy is using it, the proxy closes it when it's done.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        let inbox = self.lock().take();
        drop(inbox);
    }

    fn new(inbox: Option<Inbox>) -> Self {
        Self { inbox: Mutex::new(inbox), closing: AtomicBool::new(false), rounds: Default::default() }
    }

    /// Serves the inbox once. Returns the number of completions, or `None` if the signal proxy must exit.
    fn round(&self, rounds: &Rounds) -> Option<usize> {
        let completions = self.serve(rounds)?;
        self.rounds[0].fetch_add(1, Ordering::Release);
        self.rounds[1].fetch_add(u64::from(completions == 0), Ordering::Release);
        Some(completions)
    }

    fn rounds(&self) -> [u64; 2] {
        self.rounds.each_ref().map(|count| count.load(Ordering::Acquire))
    }

    fn serve(&self, rounds: &Rounds) -> Option<usize> {
        let round = rounds.begin()?;
        // A thread that closes the inbox sets this before it waits for the round.
        if self.closing.load(Ordering::Acquire) {
            return Some(0);
        }
        let Some(mut inbox) = self.lock().take() else { return Some(0) };
        let result = inbox.round(&round);
        if round.is_abandoned() {
            return None;
        }
        // Closing an inbox is a driver call too.
        let close = |inbox| round.call(|| drop::<Inbox>(inbox));
        let completions = match result {
            Ok(completions) => completions,
            Err(error) => {
                crate::warn!("the signal proxy stops: {error}; check the card, the GPU and their drivers");
                close(inbox);
                return None;
            }
        };
        let mut place = self.lock();
        if !self.closing.load(Ordering::Acquire) {
            *place = Some(inbox);
            return Some(completions);
        }
        drop(place);
        close(inbox).map(|()| completions)
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
    rounds: Rounds,
}

static TABLE: Mutex<Table> = Mutex::new(Table { served: Vec::new(), thread: None });

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the signal proxy has left any round that began before this call. A signal proxy stuck in a driver call is abandoned: its
/// thread, its inbox and the inbox's memory stay until the call returns, and it touches no other memory after that.
pub fn wait_out() {
    let Some(shared) = table().thread.as_ref().map(|thread| thread.shared.clone()) else { return };
    let Out::Abandoned { after } = shared.rounds.wait() else { return };
    // Removing its entry detaches the thread, and the next `serve` starts another one.
    table().thread.take_if(|thread| Arc::ptr_eq(&thread.shared, &shared));
    stay_loaded();
    crate::warn!(
        "the signal proxy (the thread that adds peers' emulated signals) has been in a driver call for {} s, so this \
         process goes on without it. Its thread and the receives of one context stay allocated until the call \
         returns, and the call may still add to words in windows. Check the GPU, the card and their drivers (dmesg, \
         nvidia-smi), and restart this process",
        after.as_secs()
    );
}

/// Waits until the signal proxy has added the signals that had arrived before this call, in all contexts of the process. Gives up on a
/// signal proxy that has stopped or is stuck.
pub fn catch_up() {
    // A card may count a signal as delivered shortly before it writes the completion, so one empty round isn't enough. The round that is in
    // progress now may be a third. A peer that keeps sending leaves no round empty; the completion queue holds no more than this many rounds.
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

/// Keeps this library in memory when NCCL unloads it, for a thread that is still running its code.
fn stay_loaded() {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr looks up this function's address, and writes a local variable.
    let found = unsafe { libc::dladdr(stay_loaded as *const libc::c_void, &mut info) };
    if found != 0 {
        // SAFETY: dladdr succeeded, so the name is the loader's NUL-terminated string. The flags load nothing: the library is in memory.
        unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

/// Stops serving an inbox when dropped. Afterwards the signal proxy accesses none of its memory, unless [`wait_out`] abandoned the proxy in
/// this inbox, which then keeps it.
pub struct Guard(Arc<Served>);

/// Hands an inbox to the signal proxy.
///
/// # Errors
/// The thread doesn't start, or it has exited while serving other inboxes that are still open.
pub fn serve(inbox: Inbox) -> std::io::Result<Guard> {
    let served = Arc::new(Served::new(Some(inbox)));
    let mut table = table();
    table.thread.take_if(|thread| thread.shared.rounds.is_abandoned());
    if table.thread.as_ref().is_some_and(|thread| thread.handle.is_finished()) {
        return Err(std::io::Error::other(
            "it has already stopped: close the communicators of this process that have emulated signals, and see the \
             WARN lines above",
        ));
    }
    if table.thread.is_none() {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let shared = Arc::new(Shared { stop: false.into(), wake, rounds: Rounds::default() });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("ferrogin-proxy".to_owned());
        let handle = thread.spawn(move || run(&of_thread))?;
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
        // NCCL may unload this library next, so the thread must have exited. It has no inbox, so no driver call holds it up.
        let _ = thread.handle.join();
    }
}

fn run(shared: &Shared) {
    let Shared { stop, wake, rounds } = shared;
    let (mut idle, mut pause) = (0, POLL[0]);
    while !stop.load(Ordering::Acquire) {
        let served = table().served.clone();
        let serve = || served.iter().map(|served| served.round(rounds)).sum::<Option<usize>>();
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
        sleep(&served, wake, &mut pause);
    }
}

/// Sleeps until an inbox has an event, [`serve`] is called, or the thread is stopped. `pause` is the sleep if an inbox has no events.
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
    progress: u64,
    looked: Instant,
    /// Time without progress.
    idle: Duration,
}

impl Pulse {
    /// Starts the view of a watcher that hasn't looked before `now`.
    pub fn new(now: Instant) -> Self {
        Self { progress: 0, looked: now, idle: Duration::ZERO }
    }

    /// Returns what is wrong with the signal proxy `now`, if anything. The caller must ask at least every 50 ms.
    pub fn problem(&mut self, now: Instant) -> Option<&'static str> {
        let table = table();
        let Some(thread) = table.thread.as_ref().filter(|thread| !thread.handle.is_finished()) else {
            return Some("has ended");
        };
        self.look(thread.shared.rounds.progress(), now).then_some("made no progress for 5 s")
    }

    /// Returns whether the signal proxy lags.
    fn look(&mut self, progress: u64, now: Instant) -> bool {
        let step = now.duration_since(self.looked).min(MAX_STEP);
        let idle = if progress == self.progress { self.idle + step } else { Duration::ZERO };
        *self = Self { progress, looked: now, idle };
        idle > LAG
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{self, Kind};
    use crate::watcher::{Output, Report, Watch};
    use ferrogin_test_support::{child, wait::wait_until};
    use std::sync::mpsc::{Sender, channel};

    #[test]
    fn process_pause_is_not_a_lag() {
        let mut now = Instant::now();
        let mut pulse = Pulse::new(now);
        let mut look = |step, progress| {
            now += step;
            pulse.look(progress, now)
        };
        assert!(!look(Duration::from_millis(1), 1));
        assert!((0..50).all(|_| !look(Duration::from_millis(1), 1)), "the signal proxy sleeps");
        assert!(!look(Duration::from_secs(3600), 1), "the process was stopped");
        assert!((0..98).all(|_| !look(Duration::from_secs(1), 1)), "no longer than 5 s, by steps of 50 ms");
        assert!(look(Duration::from_secs(1), 1));
        assert!(!look(Duration::from_secs(1), 2), "progress");
    }

    /// Starts the thread of an idle signal proxy, which exits when the sender is dropped.
    fn start_proxy() -> (Arc<Shared>, Sender<()>) {
        let (end, ended) = channel();
        let shared = Arc::new(Shared { stop: false.into(), wake: EventFd::new().unwrap(), rounds: Rounds::default() });
        let handle = std::thread::spawn(move || {
            let _ = ended.recv();
        });
        table().thread = Some(Thread { handle, shared: shared.clone() });
        (shared, end)
    }

    /// Calls `body` with the watcher's look at a context with emulated signals, at any given time: true once its waits are aborted.
    fn with_watched_context(body: impl FnOnce(&mut dyn FnMut(Instant) -> bool, Instant)) {
        let (handle, mut abort, began) = (registry::insert(Kind::Context, Arc::new(())).unwrap(), 0, Instant::now());
        let served = Arc::new(Served::new(None));
        let mut watch = Watch {
            handle: handle as usize,
            rank: 0,
            nranks: 2,
            endpoints: Vec::new(),
            targets: Vec::new(),
            abort: &raw mut abort,
            report: Report::Clean,
            failure: None,
            lost: None,
            proxy: Some((Pulse::new(began), vec![served.clone()])),
            output: Output::Log,
        };
        let mut look = |now| {
            watch.round(now);
            let failed = registry::fault(handle, Kind::Context) == Ok(true);
            // SAFETY: the pointer points to this function's local variable.
            assert_eq!((unsafe { watch.abort.read_volatile() } == 1, watch.report == Report::Done), (failed, failed));
            assert_eq!(served.closing.load(Ordering::Acquire), failed, "the inbox is closed");
            failed
        };
        body(&mut look, began);
        registry::remove::<()>(handle, Kind::Context).unwrap();
    }

    #[test]
    fn proxy_that_makes_no_progress_for_five_seconds_fails_its_contexts() {
        // A process has one signal proxy.
        let lines = child::run("proxy_that_makes_no_progress_for_five_seconds_fails_its_contexts", &[], || {
            let (shared, _end) = start_proxy();
            with_watched_context(|look, mut now| {
                let mut look_later = || {
                    now += MAX_STEP;
                    look(now)
                };
                assert!((0..100).all(|_| !look_later()), "5 s");
                drop(shared.rounds.begin());
                assert!((0..101).all(|_| !look_later()), "progress, and 5 s");
                assert!(look_later());
                assert!(look_later(), "keeps waiting");
            });
        });
        assert!(lines.is_none_or(|lines| lines.matches("made no progress").count() == 1));
    }

    #[test]
    fn proxy_that_ends_fails_its_contexts() {
        // A process has one signal proxy.
        let lines = child::run("proxy_that_ends_fails_its_contexts", &[], || {
            let (_, end) = start_proxy();
            with_watched_context(|look, now| {
                assert!(!look(now));
                drop(end);
                wait_until("end of the thread", || {
                    table().thread.as_ref().is_some_and(|thread| thread.handle.is_finished())
                });
                assert!(look(now));
            });
        });
        assert!(lines.is_none_or(|lines| lines.matches("has ended").count() == 1));
    }

    #[test]
    #[ignore = "make check"]
    fn proxy_in_a_call_that_does_not_return_is_given_up() {
        // A process has one signal proxy.
        let lines = child::run("proxy_in_a_call_that_does_not_return_is_given_up", &[], || {
            let (shared, end) = start_proxy();
            let (call_began, began) = channel();
            std::thread::scope(|scope| {
                let of_call = shared.clone();
                let proxy = scope.spawn(move || {
                    let round = of_call.rounds.begin().expect("a round");
                    let (returns, returned) = channel::<()>();
                    let result = round.call(|| {
                        call_began.send(returns).expect("a test");
                        let _ = returned.recv();
                    });
                    (result, round.is_abandoned())
                });
                let call = began.recv().expect("a call");
                wait_out();
                assert!(
                    shared.rounds.is_abandoned() && table().thread.is_none(),
                    "the next inbox starts another signal proxy"
                );
                wait_out();
                drop(call);
                assert_eq!(
                    proxy.join().expect("the signal proxy"),
                    (None, true),
                    "it touches no memory after the call"
                );
            });
            drop(end);
        });
        assert!(lines.is_none_or(|lines| lines.matches("in a driver call for").count() == 1));
    }
}
