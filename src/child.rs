//! Child processes with a time limit: if a library crashes, hangs or floods its output, only the child suffers.

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many bytes of each output are kept: the last ones.
const KEPT: usize = 256 << 10;
/// How long a killed child and its output have to end.
const AFTERWARDS: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(3);

/// How a child ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It exited with this code.
    Exited(i32),
    /// This signal killed it.
    Crashed(String),
    /// It was killed at its time limit.
    TimedOut(Duration),
    /// It did not start, or how it ended is unknown.
    Unknown(String),
}

/// A child that has ended.
#[derive(Debug)]
pub struct Ended {
    pub end: End,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Returns how it ended, in words; `None` for exit code 0.
    pub fn failure(&self) -> Option<String> {
        match &self.end {
            End::Exited(0) => None,
            End::Exited(code) => Some(format!("it exited with code {code}")),
            End::Crashed(signal) => Some(format!("it crashed ({signal})")),
            End::TimedOut(limit) => Some(format!("it did not finish within {} s and was killed", limit.as_secs_f64())),
            End::Unknown(reason) => Some(reason.clone()),
        }
    }

    /// Returns the last `count` lines on standard error.
    pub fn last_errors(&self, count: usize) -> Vec<String> {
        let lines: Vec<&str> = self.stderr.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(count)..].iter().map(|line| (*line).to_owned()).collect()
    }
}

/// Returns a command that runs this program.
///
/// # Errors
/// The path of this program is unknown.
pub fn this_program() -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find the path of this program: {error}"))?;
    Ok(Command::new(program))
}

/// Runs `command` until it ends, or until `limit`. Its children are killed with it.
pub fn run(mut command: Command, limit: Duration) -> Ended {
    let began = Instant::now();
    // In its own process group, so that the time limit also ends what it started.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let reason = format!("{} does not start: {error}", command.get_program().to_string_lossy());
            return Ended { end: End::Unknown(reason), stdout: String::new(), stderr: String::new() };
        }
    };
    let outputs = [child.stdout.take().map(Tail::read), child.stderr.take().map(Tail::read)];
    let end = match wait(&mut child, began + limit) {
        Some(status) => describe(status),
        None => {
            // The child is not reaped yet, so the number of its group is still its own.
            let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
            // A child in an uninterruptible system call remains; this program does not wait for it.
            let _ = wait(&mut child, Instant::now() + AFTERWARDS);
            End::TimedOut(limit)
        }
    };
    let soon = Instant::now() + AFTERWARDS;
    let [stdout, stderr] = outputs.map(|tail| tail.map_or_else(String::new, |tail| tail.text(soon)));
    Ended { end, stdout, stderr }
}

fn wait(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Err(_) => return Some(ExitStatus::from_raw(1 << 8)),
            Ok(None) if Instant::now() >= deadline => return None,
            Ok(None) => std::thread::sleep(POLL),
        }
    }
}

fn describe(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Exited(code),
        (None, Some(number)) => End::Crashed(
            Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |signal| signal.to_string()),
        ),
        _ => End::Unknown(status.to_string()),
    }
}

/// The last bytes of a stream, read by a thread. A process that inherited the stream may keep it open forever, so the
/// thread isn't joined.
struct Tail(Arc<Mutex<(Vec<u8>, bool)>>);

impl Tail {
    fn read(mut stream: impl Read + Send + 'static) -> Tail {
        let shared: Arc<Mutex<(Vec<u8>, bool)>> = Arc::default();
        let kept = Arc::clone(&shared);
        std::thread::spawn(move || {
            let mut block = [0; 8192];
            loop {
                let count = stream.read(&mut block).unwrap_or(0);
                let mut kept = kept.lock();
                if count == 0 {
                    kept.1 = true;
                    return;
                }
                kept.0.extend_from_slice(&block[..count]);
                if kept.0.len() > 2 * KEPT {
                    let old = kept.0.len() - KEPT;
                    kept.0.drain(..old);
                }
            }
        });
        Tail(shared)
    }

    fn text(self, deadline: Instant) -> String {
        loop {
            let kept = self.0.lock();
            if kept.1 || Instant::now() >= deadline {
                return String::from_utf8_lossy(&kept.0[kept.0.len().saturating_sub(KEPT)..]).into_owned();
            }
            drop(kept);
            std::thread::sleep(POLL);
        }
    }
}

/// Kills this process when its parent dies, and at the latest after `limit`. To be called when a child starts.
pub fn end_with_parent(limit: Duration) {
    // If this fails, the time limit below still ends the process.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        let _ = nix::sys::signal::raise(Signal::SIGKILL);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrogin_test_support::wait::HANG_LIMIT;

    fn shell(script: &str, limit: Duration) -> Ended {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, limit)
    }

    #[test]
    fn ends_of_children_are_told_apart() {
        let ended = shell("echo out; echo err >&2; exit 3", HANG_LIMIT);
        assert_eq!((ended.end, &*ended.stdout, &*ended.stderr), (End::Exited(3), "out\n", "err\n"));
        assert_eq!(shell("kill -BUS $$", HANG_LIMIT).end, End::Crashed("SIGBUS".into()));
        assert!(matches!(run(Command::new("/nonexistent/x"), POLL).end, End::Unknown(_)));
    }

    /// The child ignores signals, and its own child holds the output open. Both would outlive any test.
    #[test]
    fn stubborn_child_ends_at_its_limit() {
        let limit = Duration::from_secs(1);
        let ended = shell("trap '' TERM INT; (trap '' TERM; while :; do sleep 1; done) & wait; sleep 3600", limit);
        assert_eq!(ended.end, End::TimedOut(limit));
    }

    #[test]
    fn end_of_a_flood_is_kept() {
        let ended = shell("yes | head -c 3000000; echo end", HANG_LIMIT);
        assert_eq!(ended.end, End::Exited(0));
        assert!(ended.stdout.len() <= KEPT && ended.stdout.ends_with("y\nend\n"), "{} bytes", ended.stdout.len());
    }

    #[test]
    fn output_held_open_by_survivor_does_not_hold_up_the_end() {
        let ended = shell("setsid sleep 300 & echo $!", HANG_LIMIT);
        let survivor: i32 = ended.stdout.trim().parse().expect("a process id");
        // A process that has exited has no command line.
        let lives = std::fs::read(format!("/proc/{survivor}/cmdline")).is_ok_and(|line| !line.is_empty());
        let _ = nix::sys::signal::kill(Pid::from_raw(survivor), Signal::SIGKILL);
        assert!(lives && ended.end == End::Exited(0), "{ended:?}");
    }
}
