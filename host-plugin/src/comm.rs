//! The listen communicator, which serves one `connect`, and the collective communicator, which owns the rails.

use crate::config::Signals;
use crate::device::{self, Device};
use crate::error::Error;
use crate::isolation::LostRanks;
use crate::log::counted;
use crate::metrics;
use crate::plugin::Plugin;
use crate::rail::Rail;
use crate::signal_proxy::windows::Windows;
use crate::trace;
use crate::watcher::{self, LostRank};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_rendezvous::ring::{Listener, Ring, RingError, Step, Traffic};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The listen communicator of plugin `P`, from `listen` to `closeListen`. It keeps everything that `connect` needs,
/// because NCCL's RMA layer passes `connect` another plugin's context.
pub struct ListenComm<P> {
    /// The plugin context.
    pub plugin: Arc<P>,
    pub(crate) listener: Listener,
    pub(crate) device: c_int,
}

impl<P> ListenComm<P> {
    /// Listens for NCCL device `device`, which must exist.
    ///
    /// # Errors
    /// The control plane's endpoint doesn't open.
    pub fn open(plugin: Arc<P>, device: c_int) -> Result<Self, Error> {
        let _span = trace::span("listen", 0);
        Ok(Self { plugin, listener: Listener::open()?, device })
    }

    /// Returns the handle for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.listener.handle()
    }
}

/// The collective communicator, from `connect` to `closeColl`.
pub struct CollComm {
    /// Dropped before the rails, whose cards it reads.
    pub metrics: Option<metrics::Communicator>,
    /// Windows not yet deregistered.
    pub windows: Handles,
    /// Contexts not yet destroyed.
    pub contexts: Handles,
    /// Windows that emulated signals may name.
    pub signal_windows: Arc<Windows>,
    /// One for each card of the NCCL device.
    pub rails: Vec<Arc<Rail>>,
    /// The device that kernels run on.
    pub device: Arc<dyn Device>,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// The plugin context.
    pub plugin: Arc<Plugin>,
    /// Ends before the ring.
    _ring_watch: watcher::Guard,
    ring: Arc<Mutex<Ring>>,
    /// Set by the watcher.
    pub(crate) lost: LostRank,
    /// Ranks that contexts with isolated peers go on without.
    pub(crate) lost_ranks: Arc<LostRanks>,
    /// What neighbours will connect to in a ring that goes on without ranks that go.
    ring_listener: Mutex<Option<Listener>>,
}

/// Each rank's block in `connect`'s allgather.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct PluginGreeting {
    version: U16,
    rails: U16,
    /// 1 with emulated signals.
    emulated: U16,
}

ferrogin_ffi::assert_layout!(PluginGreeting, size 6, align 1, { version @ 0, rails @ 2, emulated @ 4 });

impl Greeting for PluginGreeting {
    fn facts(&self) -> Vec<String> {
        let signals = if self.emulated == 0 { "card" } else { "emulated" };
        vec![version_text(self.version), rails_text(self.rails), format!("FERROGIN_SIGNALS={signals}")]
    }
}

/// Version of the blocks that ranks exchange.
const VERSION: u16 = 4;

impl CollComm {
    /// Opens the rails and joins the other ranks.
    ///
    /// # Errors
    /// A card doesn't open; a rank doesn't connect, or its greeting differs.
    pub fn connect(
        listen: &ListenComm<Plugin>,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
    ) -> Result<Arc<Self>, Error> {
        let _span = trace::span("connect", rank);
        let (nranks, plugin) = (handles.len(), listen.plugin.clone());
        let cards = &plugin.devices.get(listen.device)?.cards;
        let opened = (|| {
            let device = device::open(plugin.config.device, plugin.config.provider)?;
            let rails = cards.iter().zip(0..).map(|(card, index)| Rail::open(index, card, nranks));
            Ok::<_, Error>((device, rails.collect::<Result<Vec<_>, _>>()?))
        })();
        // Refuses the ranks that wait for this one at once.
        let (device, rails) = opened.inspect_err(|_| listen.listener.close())?;
        let emulated = u16::from(plugin.config.signals == Signals::Emulated);
        let greeting =
            PluginGreeting { version: VERSION.into(), rails: (rails.len() as u16).into(), emulated: emulated.into() };
        let ring = join(&listen.listener, handles, rank, plugin.config.timeout, &greeting)?;
        crate::info!(
            "rank {rank} of {nranks}: connected on {} {}, kernels on {}",
            counted(rails.len(), "rail"),
            rails.iter().map(|rail| rail.name()).collect::<Vec<_>>().join("+"),
            device.kind().name(),
        );
        let (windows, contexts, signal_windows) = (Handles::default(), Handles::default(), Arc::default());
        let metrics = plugin.metrics.as_ref().map(|metrics| {
            metrics.communicator(rank, rails.iter().map(|rail| (rail.domain.clone(), rail.info.clone())).collect())
        });
        let ring = Arc::new(Mutex::new(ring));
        let lost = LostRank::default();
        let lost_ranks = Arc::<LostRanks>::default();
        let _ring_watch = watcher::watch_ring(ring.clone(), lost.clone(), lost_ranks.clone())?;
        Ok(Arc::new(Self {
            metrics,
            windows,
            contexts,
            signal_windows,
            rails,
            device,
            rank,
            nranks,
            plugin,
            _ring_watch,
            ring,
            lost,
            lost_ranks,
            ring_listener: Mutex::default(),
        }))
    }

    /// Returns the handle of the listener for [`go_on`](Self::go_on).
    ///
    /// # Errors
    /// There is no port to listen on.
    pub fn ring_handle(&self) -> Result<[u8; HANDLE_MAXSIZE], Error> {
        Ok(self.ring_listener.lock().insert(Listener::open()?).handle())
    }

    /// Lets the ring go on without ranks that go. `handles` are all ranks' [`ring_handle`](Self::ring_handle)s.
    ///
    /// # Errors
    /// A handle is invalid.
    pub fn go_on(&self, handles: &[[u8; HANDLE_MAXSIZE]]) -> Result<(), Error> {
        let (mut ring, listener) = (self.ring.lock(), self.ring_listener.lock().take());
        if let Some(listener) = listener.filter(|_| !ring.goes_on()) {
            ring.go_on_without(&listener, handles)?;
        }
        Ok(())
    }

    /// Runs `agree` on this communicator's ring.
    ///
    /// # Errors
    /// The error in `part`, or an error of [`Ring::allgather`].
    pub fn agree<T>(
        &self,
        step: Step,
        part: Result<T, Error>,
        encode: impl FnOnce(&T) -> Vec<u8>,
    ) -> Result<(T, Vec<Vec<u8>>), Error> {
        agree(&mut self.ring.lock(), step, part, encode)
    }
}

/// What must be the same on all ranks of a communicator.
pub(crate) trait Greeting: FromBytes + IntoBytes + Immutable {
    /// Returns what each field says about a rank, the version first: "2 rails for its device".
    fn facts(&self) -> Vec<String>;
}

/// Returns what a greeting says about the version of ferrogin.
pub(crate) fn version_text(version: U16) -> String {
    format!("version {version} of ferrogin's set-up")
}

/// Returns what a greeting says about the number of rails.
pub(crate) fn rails_text(rails: U16) -> String {
    format!("{} for its device", counted(rails.get().into(), "rail"))
}

/// Returns how the greeting in `bytes` differs from this rank's: what the other rank has, and what this one has.
fn difference<G: Greeting>(greeting: &G, bytes: &[u8]) -> [String; 2] {
    let differs = |other: G| greeting.facts().into_iter().zip(other.facts()).find(|(own, other)| own != other);
    match G::read_from_bytes(bytes).ok().and_then(differs) {
        Some((own, other)) => [other, own],
        None => ["another version of ferrogin", "this one"].map(str::to_owned),
    }
}

/// Builds the ring, and checks that the ranks match.
///
/// # Errors
/// A rank doesn't connect, or doesn't match.
pub(crate) fn join(
    listener: &Listener,
    handles: &[[u8; HANDLE_MAXSIZE]],
    rank: usize,
    timeout: Duration,
    greeting: &impl Greeting,
) -> Result<Ring, Error> {
    let mut ring = Ring::connect(listener, handles, rank, timeout)?;
    ring.set_warn(|line| crate::warn!("{line}"));
    let bytes = greeting.as_bytes();
    let greetings = match exchange(&mut ring, Step::Connect, Some(bytes)) {
        Ok(greetings) => greetings,
        Err(error) => {
            listener.keep_failed(ring);
            return Err(error.into());
        }
    };
    let Some(other) = greetings.iter().position(|other| other != bytes) else { return Ok(ring) };
    let [theirs, own] = difference(greeting, &greetings[other]);
    Err(Error::Usage(format!(
        "rank {other} has {theirs}, and rank {rank} has {own}; run the same ferrogin with the same settings on the same kind of machine \
         on all ranks"
    )))
}

/// Exchanges the parts of all ranks in `step`, and returns them by rank. A rank that failed passes its error as `part`,
/// and the call then fails on all ranks. `encode` converts a part to bytes.
///
/// # Errors
/// The error in `part`, or an error of [`Ring::allgather`].
pub(crate) fn agree<T>(
    ring: &mut Ring,
    step: Step,
    part: Result<T, Error>,
    encode: impl FnOnce(&T) -> Vec<u8>,
) -> Result<(T, Vec<Vec<u8>>), Error> {
    match part {
        Ok(part) => {
            let all = exchange(ring, step, Some(&encode(&part)))?;
            Ok((part, all))
        }
        Err(error) => {
            // Reports the failure to the other ranks. The result is ignored, because this rank reports its own error.
            let _ = exchange(ring, step, None);
            Err(error)
        }
    }
}

/// Runs an allgather, with its step in the trace.
pub(crate) fn exchange(ring: &mut Ring, step: Step, block: Option<&[u8]>) -> Result<Vec<Vec<u8>>, RingError> {
    let mut span = trace::span(step.trace_name(), ring.rank());
    let result = ring.allgather(step, block);
    let Traffic { messages, sent, received } = ring.traffic();
    span.note("messages", messages);
    span.note("bytes_sent", sent);
    span.note("bytes_received", received);
    result
}

/// A communicator's handles that `closeColl` must close; empty once the communicator is closed.
#[derive(Debug)]
pub struct Handles(Mutex<Option<BTreeSet<usize>>>);

impl Default for Handles {
    fn default() -> Self {
        Self(Mutex::new(Some(BTreeSet::new())))
    }
}

impl Handles {
    fn lock(&self) -> MutexGuard<'_, Option<BTreeSet<usize>>> {
        self.0.lock()
    }

    /// Adds a handle; returns false if the communicator is closed, in which case the caller must close the handle.
    #[must_use]
    pub fn add(&self, handle: *mut c_void) -> bool {
        self.lock().as_mut().is_some_and(|all| all.insert(handle as usize))
    }

    /// Removes a handle; returns false if the communicator doesn't have it.
    pub fn take(&self, handle: *mut c_void) -> bool {
        self.lock().as_mut().is_some_and(|all| all.remove(&(handle as usize)))
    }

    /// Returns all handles.
    pub fn all(&self) -> Vec<*mut c_void> {
        self.lock().iter().flatten().map(|handle| *handle as *mut c_void).collect()
    }

    /// Removes all handles, newest first, and refuses later ones.
    pub fn close(&self) -> Vec<*mut c_void> {
        let all = self.lock().take().unwrap_or_default();
        all.into_iter().rev().map(|handle| handle as *mut c_void).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_communicator_refuses_handles() {
        let handles = Handles::default();
        let at = |n: usize| n as *mut c_void;
        assert!(handles.add(at(8)) && handles.add(at(16)) && handles.add(at(24)));
        assert!(handles.take(at(16)) && !handles.take(at(16)));
        assert_eq!(handles.close(), [at(24), at(8)]);
        assert!(!handles.add(at(32)) && !handles.take(at(8)) && handles.close().is_empty());
    }

    #[test]
    fn greeting_that_differs_names_the_field() {
        let own = PluginGreeting { version: 4.into(), rails: 1.into(), emulated: 0.into() };
        let differs = |other: PluginGreeting| difference(&own, other.as_bytes()).join(" and ");
        let newer = differs(PluginGreeting { version: 5.into(), rails: 2.into(), ..own });
        assert_eq!(newer, "version 5 of ferrogin's set-up and version 4 of ferrogin's set-up");
        let rails = differs(PluginGreeting { rails: 2.into(), ..own });
        assert_eq!(rails, "2 rails for its device and 1 rail for its device");
        let signals = differs(PluginGreeting { emulated: 1.into(), ..own });
        assert_eq!(signals, "FERROGIN_SIGNALS=emulated and FERROGIN_SIGNALS=card");
        assert_eq!(difference(&own, &[0; 16])[0], "another version of ferrogin");
    }
}
