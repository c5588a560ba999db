//! FERROGIN_TRACE: set-up steps with their durations, as a Chrome trace (chrome://tracing, ui.perfetto.dev).
//!
//! All processes with the same FERROGIN_TRACE share one file: a JSON array, complete after every step. Each process
//! appends under a file lock, to the steps of an earlier run too.

use ferrogin_rendezvous::open_own_file;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The last bytes of a trace.
const END: &[u8] = b"\n]\n";
/// Pause between two attempts to lock the file.
const LOCK_PAUSE: Duration = Duration::from_millis(1);
/// Attempts of a step to lock the file: a second. A count, because the other process may have been stopped along with
/// this one.
const LOCK_ATTEMPTS: u32 = 1000;

struct Sink {
    file: File,
}

impl Sink {
    /// Opens or creates the file.
    fn open(path: &Path) -> io::Result<Self> {
        let file = open_own_file(path, OpenOptions::new().read(true).write(true))?;
        let mut sink = Self { file };
        let guard = sink.lock()?;
        sink.append_position()?;
        drop(guard);
        Ok(sink)
    }

    /// Locks the file against other processes until the result is dropped. Gives up after a second: a stopped process
    /// may hold the lock.
    fn lock(&self) -> io::Result<Flock<File>> {
        let mut file = self.file.try_clone()?;
        for _ in 0..LOCK_ATTEMPTS {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((unlocked, Errno::EAGAIN | Errno::EINTR)) => file = unlocked,
                Err((_, errno)) => return Err(errno.into()),
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let text = format!("another process has held the file's lock for {:?}", LOCK_ATTEMPTS * LOCK_PAUSE);
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    }

    /// Returns the offset of the next step, and the separator before it. The caller must hold the lock.
    fn append_position(&mut self) -> io::Result<(u64, &'static str)> {
        let len = self.file.seek(SeekFrom::End(0))?;
        if len == 0 {
            return Ok((0, "[\n"));
        }
        let at = len.checked_sub(END.len() as u64);
        let at =
            at.ok_or_else(|| io::Error::new(io::ErrorKind::AlreadyExists, "the file exists and is not a trace"))?;
        let mut tail = [0; END.len()];
        self.file.seek(SeekFrom::Start(at))?;
        self.file.read_exact(&mut tail)?;
        if tail != END {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the file exists and is not a trace"));
        }
        Ok((at, ",\n"))
    }

    fn add(&mut self, event: &str) -> io::Result<()> {
        let _guard = self.lock()?;
        let (at, before) = self.append_position()?;
        self.file.seek(SeekFrom::Start(at))?;
        let written = self.file.write_all(&[before.as_bytes(), event.as_bytes(), END].concat());
        written.inspect_err(|_| drop(self.remove_part(at)))
    }

    /// Restores the end at `at`, after a failed write of a step. This works on a full disk: the end goes back to where
    /// it was.
    fn remove_part(&self, at: u64) -> io::Result<()> {
        if at == 0 {
            return self.file.set_len(0);
        }
        self.file.write_all_at(END, at)?;
        self.file.set_len(at + END.len() as u64)
    }
}

/// The value of FERROGIN_TRACE, and the open file; none after an error.
struct Trace {
    path: Option<PathBuf>,
    sink: Option<Sink>,
}

static TRACE: Mutex<Trace> = Mutex::new(Trace { path: None, sink: None });

/// Returns one moment on the system clock, which the trace shows, and on the steady clock, which measures. Ranks' steps
/// line up if their hosts' system clocks agree.
fn origin() -> (Duration, Instant) {
    static ORIGIN: OnceLock<(Duration, Instant)> = OnceLock::new();
    *ORIGIN.get_or_init(|| (SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), Instant::now()))
}

/// Starts writing to `path`; `None` stops. A file that can't be written causes one WARN line, and the job continues
/// without a trace.
pub fn start(path: Option<&Path>) {
    let mut trace = TRACE.lock();
    if trace.path.as_deref() != path {
        origin();
        *trace = Trace { path: path.map(Path::to_owned), sink: None };
        match path.map(Sink::open).transpose() {
            Ok(sink) => trace.sink = sink,
            Err(error) => stop_after(&mut trace, &error),
        }
    }
}

/// Stops the trace and writes the WARN line.
fn stop_after(trace: &mut Trace, error: &io::Error) {
    trace.sink = None;
    let path = trace.path.as_deref().unwrap_or(Path::new("")).display();
    crate::warn!("FERROGIN_TRACE={path} cannot be written: {error}. The job continues without a trace");
}

/// Returns this thread's CPU time.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// One step, from its creation to its drop.
#[derive(Debug)]
pub struct Span {
    name: &'static str,
    rank: usize,
    started: Instant,
    cpu: Duration,
    notes: Vec<(&'static str, u64)>,
}

/// Starts a step of `rank`.
pub fn span(name: &'static str, rank: usize) -> Span {
    Span { name, rank, started: Instant::now(), cpu: thread_time(), notes: Vec::new() }
}

impl Span {
    /// Adds a number to the step's arguments in the trace.
    pub fn note(&mut self, key: &'static str, value: u64) {
        self.notes.push((key, value));
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let mut trace = TRACE.lock();
        let Some(sink) = trace.sink.as_mut() else { return };
        let (time, steady) = origin();
        let begin = (time + self.started.saturating_duration_since(steady)).as_micros();
        let duration = self.started.elapsed().as_micros();
        let (name, rank, process) = (self.name, self.rank, std::process::id());
        // CPU time excludes waiting for other ranks and threads.
        self.notes.push(("cpu_us", thread_time().saturating_sub(self.cpu).as_micros() as u64));
        let notes: Vec<_> = self.notes.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        let event = format!(
            "{{\"name\":\"{name}\",\"cat\":\"setup\",\"ph\":\"X\",\"ts\":{begin},\"dur\":{duration},\"pid\":{process},\
             \"tid\":{rank},\"args\":{{{}}}}}",
            notes.join(",")
        );
        // A full disk ends the trace, not the job.
        if let Err(error) = sink.add(&event) {
            stop_after(&mut trace, &error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrogin_test_support::child;
    use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
    use nix::sys::signal::{SigSet, Signal};

    /// Limits the size of this process's files; writes beyond it fail as they would on a full disk.
    fn limit_files(len: u64) {
        // The kernel also sends this signal, which would kill the process.
        SigSet::from(Signal::SIGXFSZ).thread_block().unwrap();
        setrlimit(Resource::RLIMIT_FSIZE, len, RLIM_INFINITY).unwrap();
    }

    #[test]
    fn full_disk_leaves_the_steps_before_it() {
        child::run("full_disk_leaves_the_steps_before_it", &[], || {
            let path = std::env::temp_dir().join(format!("ferrogin-trace-full-{}.json", std::process::id()));
            let _ = std::fs::remove_file(&path);
            start(Some(&path));
            limit_files(20);
            drop(span("unseen", 1));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "", "no part of the first step");
            limit_files(RLIM_INFINITY);
            start(None);
            start(Some(&path));
            drop(span("first", 1));
            let whole = std::fs::read_to_string(&path).unwrap();
            // Room for part of the next step, and for less than the end of the file.
            for more in [60, 2] {
                limit_files(whole.len() as u64 + more);
                drop(span("unseen", 1));
                assert_eq!(std::fs::read_to_string(&path).unwrap(), whole, "{more} bytes of room");
                start(None);
                start(Some(&path));
            }
            limit_files(RLIM_INFINITY);
            drop(span("second", 1));
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<Vec<serde_json::Value>>(&text).unwrap().len(), 2, "{text}");
            std::fs::remove_file(&path).unwrap();
        });
    }

    #[test]
    fn link_is_refused_and_its_target_stays() {
        child::run("link_is_refused_and_its_target_stays", &[], || {
            let place = std::env::temp_dir().join(format!("ferrogin-trace-link-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&place);
            std::fs::create_dir(&place).unwrap();
            let (link, target) = (place.join("trace.json"), place.join("target"));
            std::os::unix::fs::symlink(&target, &link).unwrap();
            start(Some(&link));
            drop(span("unseen", 1));
            assert!(!target.exists(), "nothing was created through the link");
            std::fs::remove_dir_all(place).unwrap();
        });
    }

    #[test]
    fn each_step_is_written_when_it_ends() {
        // This process's other tests have steps too.
        child::run("each_step_is_written_when_it_ends", &[], || {
            let path = std::env::temp_dir().join(format!("ferrogin-trace-{}.json", std::process::id()));
            // A killed process with the same id may have left a file.
            let _ = std::fs::remove_file(&path);
            start(Some(&path));
            drop(span("outer", 3));
            start(None);
            drop(span("unseen", 3));
            // Like another process, or a later run.
            start(Some(&path));
            let mut second = span("second", 4);
            second.note("addresses", 12);
            second.note("endpoints", 3);
            drop(second);
            start(None);
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<_> = text.lines().collect();
            assert_eq!((lines[0], lines.len(), lines[3]), ("[", 4, "]"), "{text}");
            assert!(
                lines[1].starts_with("{\"name\":\"outer\"") && lines[1].contains("\"tid\":3,\"args\":{\"cpu_us\":"),
                "{text}"
            );
            assert!(lines[2].starts_with("{\"name\":\"second\""), "{text}");
            assert!(lines[2].contains("\"tid\":4,\"args\":{\"addresses\":12,\"endpoints\":3,\"cpu_us\":"), "{text}");
            // Like a process that is stopped while it holds the lock.
            start(Some(&path));
            let other = Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusive).unwrap();
            drop(span("unseen", 5));
            assert!(TRACE.lock().sink.is_none(), "later steps do not wait for the lock");
            drop(span("unseen", 5));
            drop(other);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            start(None);
            std::fs::write(&path, "something else").unwrap();
            start(Some(&path));
            drop(span("unseen", 3));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "something else");
            std::fs::remove_file(&path).unwrap();
            start(Some(Path::new("/nonexistent/trace.json")));
            assert!(TRACE.lock().sink.is_none());
        });
    }
}
