//! Launchers: start N ranks of a command on this host, as child processes or through the mpirun on PATH.
//!
//! The built-in launcher sets FERROGIN_RANK, FERROGIN_NRANKS and FERROGIN_BOOTSTRAP (a unique abstract socket name),
//! and both launchers set FERROGIN_SECRET; [`Bootstrap::from_env`](crate::Bootstrap::from_env) reads them. When a rank
//! fails, the others get a grace period to exit before the launcher kills them, or none if the rank failed because its
//! output was closed. The ranks die with the launcher.

use ferrogin_rendezvous::Secret;
pub use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use parking_lot::Mutex;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Exit code of a job that exceeded its time limit, as with timeout(1).
pub const EXIT_TIMEOUT: i32 = 124;

/// What launches a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Launcher {
    /// The built-in launcher.
    #[default]
    Builtin,
    /// mpirun, or an error.
    Mpirun,
}

/// Where the ranks' output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// The launcher's own output, unchanged.
    #[default]
    Inherit,
    /// The launcher's own output, each line prefixed with its rank.
    Prefix,
    /// [`Outcome::lines`].
    Capture,
}

/// A job did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// PATH has no mpirun.
    #[error("mpirun is not on PATH: install openmpi-bin, or use the built-in launcher")]
    NoMpirun,
    /// The system has no random numbers.
    #[error("cannot make a secret for the job: {0}")]
    Secret(std::io::Error),
    /// A rank does not start.
    #[error("cannot start {program}: {source}", program = program.display())]
    Spawn {
        /// The command.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A line of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The rank; `None` under mpirun, which mixes the ranks' output.
    pub rank: Option<usize>,
    /// True for a line on standard error.
    pub stderr: bool,
    /// The text, without the line ending.
    pub text: String,
}

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// 0 if all ranks returned 0; otherwise the code of the first failure (128 + n for signal n; [`EXIT_TIMEOUT`]).
    pub code: i32,
    /// The first failure.
    pub failure: Option<String>,
    /// Each rank's exit status; under mpirun only mpirun's.
    pub statuses: Vec<Option<ExitStatus>>,
    /// The captured lines, in order of arrival.
    pub lines: Vec<Line>,
}

impl Outcome {
    /// Returns all captured lines as one text.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.text)).collect()
    }

    /// Returns whether all ranks returned 0.
    pub fn success(&self) -> bool {
        self.code == 0
    }
}

/// A job to run.
#[derive(Debug, Clone)]
pub struct Job {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, Option<OsString>)>,
    ranks: usize,
    launcher: Launcher,
    output: Output,
    timeout: Duration,
    grace: Duration,
}

impl Job {
    /// Describes `ranks` ranks of `program`, with a time limit of an hour, and 5 s of grace after a failure.
    pub fn new(program: impl Into<PathBuf>, ranks: usize) -> Job {
        Job {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            ranks,
            launcher: Launcher::Builtin,
            output: Output::Inherit,
            timeout: Duration::from_secs(3600),
            grace: Duration::from_secs(5),
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Job {
        self.args.push(arg.as_ref().to_os_string());
        self
    }

    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Job {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_os_string()));
        self
    }

    /// Sets an environment variable for the ranks.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Job {
        self.env.push((name.as_ref().to_os_string(), Some(value.as_ref().to_os_string())));
        self
    }

    /// Removes an environment variable for the ranks.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Job {
        self.env.push((name.as_ref().to_os_string(), None));
        self
    }

    /// Sets the launcher.
    pub fn launcher(mut self, launcher: Launcher) -> Job {
        self.launcher = launcher;
        self
    }

    /// Sets where the output goes.
    pub fn output(mut self, output: Output) -> Job {
        self.output = output;
        self
    }

    /// Sets the time limit.
    pub fn timeout(mut self, timeout: Duration) -> Job {
        self.timeout = timeout;
        self
    }

    /// Sets how long the other ranks have to exit after a failure.
    pub fn grace(mut self, grace: Duration) -> Job {
        self.grace = grace;
        self
    }

    /// Starts the job and waits until it ends.
    ///
    /// # Errors
    /// The job does not start. A job that starts and fails is an [`Outcome`].
    pub fn run(self) -> Result<Outcome, LaunchError> {
        Ok(self.start()?.wait())
    }

    /// Starts the job. The ranks die with the calling thread.
    ///
    /// # Errors
    /// A rank does not start; the launcher kills the others.
    pub fn start(self) -> Result<Running, LaunchError> {
        let mpirun = match self.launcher {
            Launcher::Builtin => None,
            Launcher::Mpirun => Some(find_mpirun().ok_or(LaunchError::NoMpirun)?),
        };
        let secret = Secret::random().map_err(LaunchError::Secret)?;
        let mut running = Running {
            children: Vec::new(),
            sink: Arc::default(),
            readers: Vec::new(),
            deadline: Instant::now() + self.timeout,
            timeout: self.timeout,
            grace: self.grace,
        };
        match mpirun {
            Some(mpirun) => {
                let mut command = self.mpirun_command(&mpirun, secret);
                running.spawn(&mut command, &mpirun, None, self.output)?;
            }
            None => {
                let address = unique_name();
                for rank in 0..self.ranks {
                    let mut command = Command::new(&self.program);
                    command.args(&self.args);
                    self.apply_env(&mut command, secret);
                    command.env("FERROGIN_RANK", rank.to_string());
                    command.env("FERROGIN_NRANKS", self.ranks.to_string());
                    command.env("FERROGIN_BOOTSTRAP", &address);
                    running.spawn(&mut command, &self.program, Some(rank), self.output)?;
                }
            }
        }
        Ok(running)
    }

    /// Applies the job's variables, and its own secret, which its ranks prove to each other.
    fn apply_env(&self, command: &mut Command, secret: Secret) {
        command.env("FERROGIN_SECRET", secret.to_hex());
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
    }

    fn mpirun_command(&self, mpirun: &Path, secret: Secret) -> Command {
        let mut command = Command::new(mpirun);
        command.arg("-n").arg(self.ranks.to_string());
        if is_open_mpi(mpirun) {
            if nix::unistd::geteuid().is_root() {
                command.arg("--allow-run-as-root");
            }
            command.args(["--oversubscribe", "--bind-to", "none"]);
            if self.output == Output::Prefix {
                command.arg("--tag-output");
            }
            // Ranks on this host inherit the environment; ranks on other hosts only get the variables passed with -x.
            let own = std::env::vars_os().map(|(name, _)| name).chain(self.env.iter().map(|(name, _)| name.clone()));
            let own = own.chain(["FERROGIN_SECRET".into()]);
            let mut names: Vec<String> = own
                .filter_map(|name| name.into_string().ok())
                .filter(|name| ["FERROGIN_", "SOFTEFA_", "NCCL_", "FI_"].iter().any(|p| name.starts_with(p)))
                .filter(|name| !self.env.iter().any(|(n, value)| value.is_none() && n.to_str() == Some(name)))
                .filter(|name| !INHERITED_IDENTITY.contains(&name.as_str()))
                .collect();
            names.sort();
            names.dedup();
            for name in names {
                command.arg("-x").arg(name);
            }
        }
        command.arg(&self.program).args(&self.args);
        self.apply_env(&mut command, secret);
        // mpirun sets the ranks' identity; the variables would be those of an enclosing job.
        for name in INHERITED_IDENTITY {
            command.env_remove(name);
        }
        command
    }
}

/// The variables that identify a rank of the built-in launcher.
const INHERITED_IDENTITY: [&str; 2] = ["FERROGIN_RANK", "FERROGIN_NRANKS"];

/// A running job; dropping it kills the remaining ranks.
#[derive(Debug)]
pub struct Running {
    children: Vec<Process>,
    sink: Arc<Mutex<Vec<Line>>>,
    readers: Vec<JoinHandle<()>>,
    deadline: Instant,
    timeout: Duration,
    grace: Duration,
}

#[derive(Debug)]
struct Process {
    child: Child,
    rank: Option<usize>,
    status: Option<ExitStatus>,
}

impl Process {
    fn name(&self) -> String {
        self.rank.map_or_else(|| "mpirun".into(), |rank| format!("rank {rank}"))
    }

    fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            // The child is not reaped yet, so the process id is still its own.
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), signal);
        }
    }
}

impl Running {
    fn spawn(
        &mut self,
        command: &mut Command,
        program: &Path,
        rank: Option<usize>,
        output: Output,
    ) -> Result<(), LaunchError> {
        command.stdin(Stdio::null());
        if output != Output::Inherit {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        set_parent_death_signal(command);
        let mut child =
            command.spawn().map_err(|source| LaunchError::Spawn { program: program.to_path_buf(), source })?;
        if let Some(stream) = child.stdout.take() {
            self.read(stream, rank, false, output);
        }
        if let Some(stream) = child.stderr.take() {
            self.read(stream, rank, true, output);
        }
        self.children.push(Process { child, rank, status: None });
        Ok(())
    }

    fn read(&mut self, stream: impl Read + Send + 'static, rank: Option<usize>, stderr: bool, output: Output) {
        let sink = Arc::clone(&self.sink);
        self.readers.push(std::thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut bytes = Vec::new();
            while matches!(stream.read_until(b'\n', &mut bytes), Ok(n) if n > 0) {
                let text = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_string();
                bytes.clear();
                if output == Output::Capture {
                    sink.lock().push(Line { rank, stderr, text });
                    continue;
                }
                let line = match rank {
                    Some(rank) => format!("[{rank}] {text}\n"),
                    None => format!("{text}\n"),
                };
                // The job continues if the output is closed.
                let _ = if stderr {
                    std::io::stderr().write_all(line.as_bytes())
                } else {
                    std::io::stdout().write_all(line.as_bytes())
                };
            }
        }));
    }

    /// Sends a signal to one rank. Does nothing under mpirun, or if the rank has ended.
    pub fn signal(&mut self, rank: usize, signal: Signal) {
        self.poll();
        if let Some(process) = self.children.iter().find(|process| process.rank == Some(rank)) {
            process.signal(signal);
        }
    }

    /// Returns the lines captured so far.
    pub fn captured(&self) -> Vec<Line> {
        self.sink.lock().clone()
    }

    /// Reaps the processes that have ended; true if all have.
    fn poll(&mut self) -> bool {
        for process in self.children.iter_mut().filter(|process| process.status.is_none()) {
            // An error means that the child was reaped elsewhere, so its status is unknown.
            process.status = process.child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(1 << 8)));
        }
        self.children.iter().all(|process| process.status.is_some())
    }

    /// Waits until the job ends.
    pub fn wait(mut self) -> Outcome {
        let mut failure: Option<(i32, String)> = None;
        let mut kill_at = self.deadline;
        loop {
            let done = self.poll();
            if failure.is_none() {
                let failed = self.children.iter().find(|process| process.status.is_some_and(|s| !s.success()));
                if let Some(process) = failed
                    && let Some(status) = process.status
                {
                    failure = Some((code_of(status), format!("{}: {}", process.name(), describe(status))));
                    // With a closed output, nothing that the ranks could still say would be seen.
                    let is_closed_output = status.signal() == Some(Signal::SIGPIPE as i32);
                    let grace = if is_closed_output { Duration::ZERO } else { self.grace };
                    kill_at = kill_at.min(Instant::now() + grace);
                }
            }
            if done {
                break;
            }
            if Instant::now() >= kill_at {
                let names = self.children.iter().filter(|p| p.status.is_none()).map(Process::name);
                let names = names.collect::<Vec<_>>().join(", ");
                match &mut failure {
                    Some((_, text)) => {
                        *text += &format!("; {names}: killed after the grace period of {:?}", self.grace)
                    }
                    None => {
                        failure =
                            Some((EXIT_TIMEOUT, format!("{names}: killed after the time limit of {:?}", self.timeout)));
                    }
                }
                self.kill_all();
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        let (code, failure) = failure.map_or((0, None), |(code, text)| (code, Some(text)));
        let statuses = self.children.iter().map(|process| process.status).collect();
        Outcome { code, failure, statuses, lines: self.captured() }
    }

    /// Kills all processes. mpirun first gets time to end its ranks and remove its files.
    fn kill_all(&mut self) {
        if self.children.iter().any(|process| process.rank.is_none()) {
            self.children.iter().for_each(|process| process.signal(Signal::SIGTERM));
            let deadline = Instant::now() + Duration::from_secs(5);
            while !self.poll() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        self.children.iter().for_each(|process| process.signal(Signal::SIGKILL));
        for process in self.children.iter_mut().filter(|process| process.status.is_none()) {
            process.status = process.child.wait().ok();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.poll() {
            self.kill_all();
        }
    }
}

fn code_of(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal().map(Signal::try_from)) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(Ok(signal))) => format!("killed by {signal}"),
        _ => status.to_string(),
    }
}

fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    format!("ferrogin-job-{}-{}-{nanos:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the mpirun on PATH.
pub fn find_mpirun() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("mpirun")).find(|candidate| {
        use std::os::unix::fs::PermissionsExt;
        candidate.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    })
}

fn is_open_mpi(mpirun: &Path) -> bool {
    let output = Command::new(mpirun).arg("--version").stdin(Stdio::null()).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"))
}

#[allow(unsafe_code)]
fn set_parent_death_signal(command: &mut Command) {
    let parent = std::process::id();
    let hook = move || {
        // SAFETY: prctl takes no pointers here, and is async-signal-safe, which is required between fork and exec.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have died before the prctl call.
        if std::os::unix::process::parent_id() != parent {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the hook is async-signal-safe: it makes two system calls, and its errors allocate no memory.
    unsafe { command.pre_exec(hook) };
}

#[cfg(test)]
mod tests;
