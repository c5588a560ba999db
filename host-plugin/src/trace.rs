//! FERROGIN_TRACE: set-up steps with their durations, as a Chrome trace (chrome://tracing, ui.perfetto.dev).
//!
//! One file for all ranks that name it: a JSON array that is whole after every step, to which each process adds under a
//! file lock. What an earlier run left there is added to as well.

use nix::fcntl::{Flock, FlockArg};
use nix::time::{ClockId, clock_gettime};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How a trace ends.
const END: &[u8] = b"\n]\n";

struct Sink {
    path: PathBuf,
    file: File,
}

impl Sink {
    /// Opens or makes the file.
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut sink = Self { path: path.to_owned(), file };
        let held = sink.lock()?;
        sink.place()?;
        drop(held);
        Ok(sink)
    }

    /// Keeps other processes out until dropped.
    fn lock(&self) -> io::Result<Flock<File>> {
        Flock::lock(self.file.try_clone()?, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
    }

    /// Where the next step goes, and what must stand before it. The lock is held.
    fn place(&mut self) -> io::Result<(u64, &'static str)> {
        let len = self.file.seek(SeekFrom::End(0))?;
        if len == 0 {
            return Ok((0, "[\n"));
        }
        let at = len.checked_sub(END.len() as u64);
        let at = at.ok_or_else(|| io::Error::new(io::ErrorKind::AlreadyExists, "the file is there and is no trace"))?;
        let mut tail = [0; END.len()];
        self.file.seek(SeekFrom::Start(at))?;
        self.file.read_exact(&mut tail)?;
        if tail != END {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the file is there and is no trace"));
        }
        Ok((at, ",\n"))
    }

    fn add(&mut self, event: &str) -> io::Result<()> {
        let _held = self.lock()?;
        let (at, before) = self.place()?;
        self.file.seek(SeekFrom::Start(at))?;
        self.file.write_all(&[before.as_bytes(), event.as_bytes(), END].concat())
    }
}

static SINK: Mutex<Option<Sink>> = Mutex::new(None);

/// The trace's clock, by a steady one: both at the same moment. Ranks of one host, and of hosts whose clocks agree, stand
/// beside each other.
fn origin() -> (Duration, Instant) {
    static ORIGIN: OnceLock<(Duration, Instant)> = OnceLock::new();
    *ORIGIN.get_or_init(|| (SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), Instant::now()))
}

/// Starts writing to `path`; `None` stops.
///
/// # Errors
/// The file cannot be made, or holds something else.
pub fn start(path: Option<&Path>) -> io::Result<()> {
    let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
    if sink.as_ref().map(|sink| sink.path.as_path()) != path {
        *sink = None;
        origin();
        *sink = path.map(Sink::open).transpose()?;
    }
    Ok(())
}

/// CPU time that this thread has used.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// One step, from its making to its drop.
#[derive(Debug)]
pub struct Span {
    name: &'static str,
    rank: usize,
    started: Instant,
    cpu: Duration,
    notes: Vec<(&'static str, u64)>,
}

/// Begins a step of `rank`.
pub fn span(name: &'static str, rank: usize) -> Span {
    Span { name, rank, started: Instant::now(), cpu: thread_time(), notes: Vec::new() }
}

impl Span {
    /// Adds a number to what is written of the step.
    pub fn note(&mut self, key: &'static str, value: u64) {
        self.notes.push((key, value));
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sink) = sink.as_mut() else { return };
        let (time, steady) = origin();
        let begin = (time + self.started.saturating_duration_since(steady)).as_micros();
        let duration = self.started.elapsed().as_micros();
        let (name, rank, process) = (self.name, self.rank, std::process::id());
        // What the step cost by itself, without waits for other ranks and other threads.
        self.notes.push(("cpu_us", thread_time().saturating_sub(self.cpu).as_micros() as u64));
        let notes: Vec<_> = self.notes.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        let event = format!(
            "{{\"name\":\"{name}\",\"cat\":\"setup\",\"ph\":\"X\",\"ts\":{begin},\"dur\":{duration},\"pid\":{process},\
             \"tid\":{rank},\"args\":{{{}}}}}",
            notes.join(",")
        );
        // A full disk must not end a job.
        let _ = sink.add(&event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_written_as_they_end() {
        let path = std::env::temp_dir().join(format!("ferrogin-trace-{}.json", std::process::id()));
        start(Some(&path)).unwrap();
        drop(span("outer", 3));
        start(None).unwrap();
        drop(span("unseen", 3));
        // Another process, or a later run.
        start(Some(&path)).unwrap();
        let mut second = span("second", 4);
        second.note("addresses", 12);
        second.note("endpoints", 3);
        drop(second);
        start(None).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines[0], lines.len(), lines[3]), ("[", 4, "]"), "{text}");
        assert!(
            lines[1].starts_with("{\"name\":\"outer\"") && lines[1].contains("\"tid\":3,\"args\":{\"cpu_us\":"),
            "{text}"
        );
        assert!(lines[2].starts_with("{\"name\":\"second\""), "{text}");
        assert!(lines[2].contains("\"tid\":4,\"args\":{\"addresses\":12,\"endpoints\":3,\"cpu_us\":"), "{text}");
        std::fs::write(&path, "something else").unwrap();
        assert!(start(Some(&path)).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "something else");
        std::fs::remove_file(&path).unwrap();
        assert!(start(Some(Path::new("/nonexistent/trace.json"))).is_err());
    }
}
