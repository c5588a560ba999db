//! FERROGIN_METRICS: what is running, as a file in Prometheus' text format.
//!
//! At each interval, a host thread wakes up and reads what kernels and cards maintain anyway: cursors, completion
//! counters ([`source`]) and the cards' own statistics ([`card`]). Kernels don't execute a single extra instruction.
//! The file is replaced as a whole, so a reader never sees half of it. docs/metrics.md says what each number counts.
//!
//! All plugins of a process with the same file share one writer. When the last of them goes away, it writes the file
//! once more and exits.

pub mod card;
pub mod source;
mod state;
mod text;

use crate::config::Config;
use crate::device::DeviceKind;
use crate::error::Error;
use card::Card;
use ferrogin_rendezvous::Identity;
use parking_lot::{Condvar, Mutex, MutexGuard};
use source::{Counts, RmaCounts, Source};
use state::State;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::fs::OpenOptions;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// The writer of one file.
pub struct Metrics {
    shared: Arc<Shared>,
    /// `None` only in `drop`.
    thread: Option<JoinHandle<()>>,
    /// The process that the thread runs in.
    process: u32,
}

struct Shared {
    path: PathBuf,
    interval: Duration,
    /// The labels of `ferrogin_info`.
    about: String,
    state: Mutex<State>,
    wake: Condvar,
}

/// The writers of this process.
static WRITERS: Mutex<Vec<Weak<Metrics>>> = Mutex::new(Vec::new());

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Samples, and replaces the file. The lock isn't held while the file is written.
    fn write(&self) -> io::Result<()> {
        let text = {
            let mut state = self.lock();
            state.sample();
            state.writes += 1;
            text::render(&self.about, &state)
        };
        replace(&self.path, &text)
    }

    /// The writer's thread. A file that can't be written causes one WARN line until it can be written again.
    fn run(&self) {
        loop {
            let mut state = self.lock();
            if !state.stop {
                self.wake.wait_for(&mut state, self.interval);
            }
            let stop = state.stop;
            drop(state);
            let result = self.write();
            let failed_before = std::mem::replace(&mut self.lock().failed, result.is_err());
            if let Err(error) = result
                && !failed_before
            {
                let path = self.path.display();
                crate::warn!(
                    "FERROGIN_METRICS: {path} cannot be written: {error}. The job continues, and ferrogin \
                              will try again"
                );
            }
            if stop {
                return;
            }
        }
    }
}

impl Metrics {
    /// Returns the writer of the FERROGIN_METRICS file for a plugin with `device`, or `None` if it's not set.
    ///
    /// # Errors
    /// The file can't be written, or its name needs a rank but no launcher set one.
    pub fn open(config: &Config, device: DeviceKind) -> Result<Option<Arc<Self>>, Error> {
        let Some(template) = &config.metrics else { return Ok(None) };
        let path = path(template, std::process::id())?;
        // Outlives the lock, which the drop of a last reference takes.
        let mut open = Vec::new();
        let mut writers = WRITERS.lock();
        open.extend(writers.iter().filter_map(Weak::upgrade));
        if let Some(same) = open.iter().find(|writer| writer.shared.path == path) {
            return Ok(Some(same.clone()));
        }
        let about = text::labels(&[
            ("version", env!("CARGO_PKG_VERSION")),
            ("provider", config.provider.name()),
            ("device", device.name()),
            ("post", config.policy.name()),
        ]);
        let (state, wake) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { path, interval: config.metrics_interval, about, state, wake });
        shared.write().map_err(|error| {
            Error::Usage(format!(
                "FERROGIN_METRICS={template}: {} cannot be written: {error}; name a file in a directory that exists and that this user \
                 may write to, or unset FERROGIN_METRICS",
                shared.path.display()
            ))
        })?;
        let thread_shared = shared.clone();
        let thread = std::thread::Builder::new().name("ferrogin-metrics".to_owned()).spawn(move || thread_shared.run());
        let thread = thread.map_err(|source| Error::System { call: "starting the metrics' thread", source })?;
        let writer = Arc::new(Self { shared, thread: Some(thread), process: std::process::id() });
        writers.push(Arc::downgrade(&writer));
        Ok(Some(writer))
    }

    /// Adds a communicator. Its cards are read until the result is dropped.
    pub fn communicator(&self, rank: usize, cards: Vec<Card>) -> Communicator {
        let mut state = self.shared.lock();
        let number = state.comms;
        state.comms += 1;
        state.rails.insert(number, cards);
        // A software card that was closed and reopened counts from 0.
        state.sample();
        drop(state);
        Communicator { shared: self.shared.clone(), number, rank, contexts: AtomicU64::new(0) }
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        // A fork of the process doesn't have the thread, and the file belongs to the parent.
        let Some(thread) = self.thread.take().filter(|_| self.process == std::process::id()) else { return };
        // A plugin that opens the same file now has to wait for the last write.
        let mut writers = WRITERS.lock();
        self.shared.lock().stop = true;
        self.shared.wake.notify_all();
        // NCCL may unload this library next, so the thread must have exited.
        let _ = thread.join();
        writers.retain(|writer| writer.strong_count() > 0);
        writers.shrink_to_fit();
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("path", &self.shared.path).finish_non_exhaustive()
    }
}

/// A context's rail, card name, endpoints, and the signal proxy's counts.
type NewContext = (u32, String, Vec<source::Endpoint>, Option<Arc<Counts>>);

/// A communicator in the file, until dropped.
pub struct Communicator {
    shared: Arc<Shared>,
    number: u64,
    rank: usize,
    contexts: AtomicU64,
}

impl Communicator {
    /// Adds the contexts of a `createContext`: each one's rail, card name, where its endpoints count, and the signal
    /// proxy's counts.
    ///
    /// # Safety
    /// The memory of all endpoints must stay mapped until the result is dropped.
    #[allow(unsafe_code)]
    pub unsafe fn contexts(&self, contexts: Vec<NewContext>) -> Guard {
        let mut state = self.shared.lock();
        let mut ids = Vec::with_capacity(contexts.len());
        for (rail, card, endpoints, emulated) in contexts {
            let context = self.contexts.fetch_add(1, Ordering::Relaxed);
            let id = state.next;
            state.next += 1;
            let (rank, comm) = (self.rank, self.number);
            state.contexts.insert(id, Source { rank, comm, context, rail, card, endpoints, emulated, rma: None });
            ids.push(id);
        }
        drop(state);
        Guard { shared: self.shared.clone(), ids }
    }

    /// Adds an RMA plugin context: each rail's card name and counts.
    pub fn rma_context(&self, rails: impl Iterator<Item = (String, Arc<RmaCounts>)>) -> Guard {
        let mut state = self.shared.lock();
        let context = self.contexts.fetch_add(1, Ordering::Relaxed);
        let mut ids = Vec::new();
        for ((card, counts), rail) in rails.zip(0..) {
            let (rank, comm, id) = (self.rank, self.number, state.next);
            state.next += 1;
            let (endpoints, emulated, rma) = (Vec::new(), None, Some(counts));
            state.contexts.insert(id, Source { rank, comm, context, rail, card, endpoints, emulated, rma });
            ids.push(id);
        }
        drop(state);
        Guard { shared: self.shared.clone(), ids }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.sample();
        state.rails.remove(&self.number);
    }
}

/// Contexts in the file. Dropping it adds their final numbers to those of closed contexts, and stops reading their
/// memory.
pub struct Guard {
    shared: Arc<Shared>,
    ids: Vec<u64>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        self.ids.iter().for_each(|id| state.close(*id));
    }
}

/// Returns this process's file: `{pid}` and `{rank}` are replaced with numbers. A name without either gets `-PID`
/// before its extension, so that each rank on a host has its own file.
fn path(template: &str, pid: u32) -> Result<PathBuf, Error> {
    let invalid = |why: String| Error::Usage(format!("FERROGIN_METRICS={template}: {why}"));
    let given = Path::new(template);
    if template.ends_with('/') || given.file_name().is_none() || given.is_dir() {
        let example = given.join("ferrogin.prom");
        return Err(invalid(format!("this is a directory; name a file in it, such as {}", example.display())));
    }
    let others = template.replace("{pid}", "").replace("{rank}", "");
    if let Some(placeholder) = others.find('{').map(|at| &others[at..]) {
        let placeholder = placeholder.find('}').map_or(placeholder, |end| &placeholder[..=end]);
        return Err(invalid(format!("{placeholder} is not a placeholder: use {{rank}} or {{pid}}")));
    }
    let mut name = template.replace("{pid}", &pid.to_string());
    if name.contains("{rank}") {
        let rank = Identity::rank_from_env().map_err(|error| invalid(error.to_string()))?;
        let rank = rank.ok_or_else(|| {
            invalid(
                "no launcher set this process's rank: set FERROGIN_RANK and FERROGIN_NRANKS, or use {pid}".to_owned(),
            )
        })?;
        name = name.replace("{rank}", &rank.to_string());
    }
    if name != template {
        return Ok(PathBuf::from(name));
    }
    let stem = given.file_stem().unwrap_or_default().to_string_lossy();
    let extension = given.extension().map_or(String::new(), |extension| format!(".{}", extension.to_string_lossy()));
    Ok(given.with_file_name(format!("{stem}-{pid}{extension}")))
}

/// Replaces the file atomically. Until then the new file has a hidden name, which node_exporter doesn't read.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // A name that no other user can take in advance. `create_new` never follows another user's link.
    let new = path.with_file_name(format!(".{name}.{:016x}.tmp", RandomState::new().build_hasher().finish()));
    let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| std::fs::rename(&new, path));
    written.inspect_err(|_| drop(std::fs::remove_file(&new)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let of = |template| path(template, 77).unwrap();
        assert_eq!(of("/tmp/ferrogin.prom"), Path::new("/tmp/ferrogin-77.prom"));
        assert_eq!(of("metrics"), Path::new("metrics-77"));
        assert_eq!(of("/tmp/{pid}/a-{pid}.prom"), Path::new("/tmp/77/a-77.prom"));
        for directory in ["/tmp", "/", "/nonexistent/"] {
            let text = path(directory, 77).unwrap_err().to_string();
            assert!(text.contains("this is a directory; name a file in it"), "{text}");
        }
    }

    #[test]
    fn unknown_placeholders_are_refused() {
        for (template, placeholder) in
            [("m-{rnk}.prom", "{rnk}"), ("{pid}/m-{RANK}", "{RANK}"), ("m-{}", "{}"), ("m-{pid", "{pid")]
        {
            let text = path(template, 77).unwrap_err().to_string();
            assert!(text.contains(&format!("{placeholder} is not a placeholder: use {{rank}} or {{pid}}")), "{text}");
        }
    }

    #[test]
    fn file_is_replaced_atomically_and_leaves_no_other_file() {
        let directory = std::env::temp_dir().join(format!("ferrogin-replace-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a.prom");
        // A temporary name made from the process id is taken, by something that `replace` can't remove.
        let taken = directory.join(format!(".a.prom.{}.tmp", std::process::id()));
        std::fs::create_dir(&taken).unwrap();
        for text in ["first\n", "second\n"] {
            replace(&path, text).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        // The path is a non-empty directory.
        assert!(replace(&directory, "third\n").is_err());
        std::fs::remove_dir(taken).unwrap();
        let names: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["a.prom"]);
        assert!(replace(Path::new("/nonexistent/a.prom"), "").is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
