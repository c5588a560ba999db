//! FERROGIN_TRACE: set-up steps with their durations, as a Chrome trace (chrome://tracing, ui.perfetto.dev).
//!
//! One file for the process, a JSON array that is left open, as the format allows: lines of a process that ends
//! early are not lost. `%p` in the name stands for the process id, so that ranks do not write over each other.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

struct Sink {
    path: PathBuf,
    file: File,
}

static SINK: Mutex<Option<Sink>> = Mutex::new(None);

/// Start of the trace's clock.
fn origin() -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

/// Starts writing to `path`; `None` stops. A file that is open already goes on.
///
/// # Errors
/// The file cannot be made.
pub fn start(path: Option<&Path>) -> std::io::Result<()> {
    let path = path.map(|path| PathBuf::from(path.to_string_lossy().replace("%p", &std::process::id().to_string())));
    let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
    if sink.as_ref().map(|sink| &sink.path) == path.as_ref() {
        return Ok(());
    }
    *sink = None;
    origin();
    if let Some(path) = path {
        let mut file = File::create(&path)?;
        file.write_all(b"[\n")?;
        *sink = Some(Sink { path, file });
    }
    Ok(())
}

/// One step, from its making to its drop.
#[derive(Debug)]
pub struct Span {
    name: &'static str,
    rank: usize,
    started: Instant,
}

/// Begins a step of `rank`.
pub fn span(name: &'static str, rank: usize) -> Span {
    Span { name, rank, started: Instant::now() }
}

impl Drop for Span {
    fn drop(&mut self) {
        let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sink) = sink.as_mut() else { return };
        let begin = self.started.saturating_duration_since(origin()).as_micros();
        let duration = self.started.elapsed().as_micros();
        let (name, rank, process) = (self.name, self.rank, std::process::id());
        let line = format!(
            "{{\"name\":\"{name}\",\"cat\":\"setup\",\"ph\":\"X\",\"ts\":{begin},\"dur\":{duration},\"pid\":{process},\
             \"tid\":{rank}}},\n"
        );
        // A full disk must not end a job.
        let _ = sink.file.write_all(line.as_bytes());
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
        start(Some(&path)).unwrap();
        drop(span("second", 3));
        start(None).unwrap();
        drop(span("unseen", 3));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(text.starts_with("[\n{\"name\":\"outer\""), "{text}");
        assert!(text.contains("\"second\"") && !text.contains("unseen"), "{text}");
        assert!(start(Some(Path::new("/nonexistent/trace.json"))).is_err());
    }
}
