//! Launchers: N ranks of one command on this host, by ourselves or by an mpirun that is on PATH.
//!
//! The built-in one sets FERROGIN_RANK, FERROGIN_NRANKS and FERROGIN_BOOTSTRAP (an abstract socket name that no other
//! job has), so that [`Bootstrap::from_env`](crate::Bootstrap::from_env) finds the others. When a rank fails, the
//! rest get a grace period to notice by themselves, and are then killed; when the launcher dies, so do its ranks.

pub use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Exit code of a job that ran past its time, as timeout(1) has it.
pub const EXIT_TIMEOUT: i32 = 124;

/// Who starts the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Launcher {
    /// mpirun where it is on PATH, else the built-in one.
    #[default]
    Auto,
    /// mpirun, or an error.
    Mpirun,
    /// This module.
    Builtin,
}

/// Where the ranks' output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// To the launcher's own, unchanged.
    #[default]
    Inherit,
    /// To the launcher's own, each line behind its rank's number.
    Prefix,
    /// Into [`Outcome::lines`].
    Capture,
}

/// Failure to start a job.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// There is no mpirun.
    #[error("mpirun is not on PATH: install openmpi-bin, or use the built-in launcher")]
    NoMpirun,
    /// A rank cannot be started.
    #[error("cannot start {program}: {source}", program = program.display())]
    Spawn {
        /// The command.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A line that a rank wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The rank; `None` under mpirun, which mixes them.
    pub rank: Option<usize>,
    /// It came on standard error.
    pub stderr: bool,
    /// The line, without its end.
    pub text: String,
}

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// 0 when all ranks gave 0; else the first failure's code (128 + n for signal n; [`EXIT_TIMEOUT`]).
    pub code: i32,
    /// What the first failure was.
    pub failure: Option<String>,
    /// How each process ended, in rank order; one under mpirun.
    pub statuses: Vec<Option<ExitStatus>>,
    /// What was captured, in the order it came.
    pub lines: Vec<Line>,
}

impl Outcome {
    /// All captured lines as one text.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.text)).collect()
    }

    /// All ranks gave 0.
    pub fn success(&self) -> bool {
        self.code == 0
    }
}

/// A job to be started.
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
    /// `ranks` times `program`, with an hour as time limit and, after a failure, 5 s of grace.
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

    /// Sets an environment variable of the ranks.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Job {
        self.env.push((name.as_ref().to_os_string(), Some(value.as_ref().to_os_string())));
        self
    }

    /// Takes an environment variable away from the ranks.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Job {
        self.env.push((name.as_ref().to_os_string(), None));
        self
    }

    /// Chooses the launcher.
    pub fn launcher(mut self, launcher: Launcher) -> Job {
        self.launcher = launcher;
        self
    }

    /// Chooses where output goes.
    pub fn output(mut self, output: Output) -> Job {
        self.output = output;
        self
    }

    /// Limits the job's time.
    pub fn timeout(mut self, timeout: Duration) -> Job {
        self.timeout = timeout;
        self
    }

    /// Sets the time that the other ranks have after a failure.
    pub fn grace(mut self, grace: Duration) -> Job {
        self.grace = grace;
        self
    }

    /// Starts the job and waits for its end.
    ///
    /// # Errors
    /// When it cannot be started; a job that fails is an [`Outcome`].
    pub fn run(self) -> Result<Outcome, LaunchError> {
        Ok(self.start()?.wait())
    }

    /// Starts the job. The calling thread must stay: the ranks die with it.
    ///
    /// # Errors
    /// When a rank cannot be started; those that were are killed.
    pub fn start(self) -> Result<Running, LaunchError> {
        let mpirun = match self.launcher {
            Launcher::Builtin => None,
            Launcher::Auto => find_mpirun(),
            Launcher::Mpirun => Some(find_mpirun().ok_or(LaunchError::NoMpirun)?),
        };
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
                let mut command = self.mpirun_command(&mpirun);
                running.spawn(&mut command, &mpirun, None, self.output)?;
            }
            None => {
                let address = unique_name();
                for rank in 0..self.ranks {
                    let mut command = Command::new(&self.program);
                    command.args(&self.args);
                    self.apply_env(&mut command);
                    command.env("FERROGIN_RANK", rank.to_string());
                    command.env("FERROGIN_NRANKS", self.ranks.to_string());
                    command.env("FERROGIN_BOOTSTRAP", &address);
                    running.spawn(&mut command, &self.program, Some(rank), self.output)?;
                }
            }
        }
        Ok(running)
    }

    fn apply_env(&self, command: &mut Command) {
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
    }

    fn mpirun_command(&self, mpirun: &Path) -> Command {
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
            // Ranks of this host inherit the environment; those of others get only what is named.
            let own = std::env::vars_os().map(|(name, _)| name).chain(self.env.iter().map(|(name, _)| name.clone()));
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
        self.apply_env(&mut command);
        // A job inside of a job: mpirun's ranks are not ours.
        for name in INHERITED_IDENTITY {
            command.env_remove(name);
        }
        command
    }
}

/// What the built-in launcher sets.
const INHERITED_IDENTITY: [&str; 2] = ["FERROGIN_RANK", "FERROGIN_NRANKS"];

/// A started job; dropping it kills what still runs.
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
            // Not yet waited for, so the number is still this child's.
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
        die_with_parent(command);
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
                    sink.lock().unwrap_or_else(PoisonError::into_inner).push(Line { rank, stderr, text });
                    continue;
                }
                let line = match rank {
                    Some(rank) => format!("[{rank}] {text}\n"),
                    None => format!("{text}\n"),
                };
                // A closed output is no reason to stop a job.
                let _ = match stderr {
                    true => std::io::stderr().write_all(line.as_bytes()),
                    false => std::io::stdout().write_all(line.as_bytes()),
                };
            }
        }));
    }

    /// Sends a signal to one rank; nothing under mpirun or when it has ended.
    pub fn signal(&mut self, rank: usize, signal: Signal) {
        self.poll();
        if let Some(process) = self.children.iter().find(|process| process.rank == Some(rank)) {
            process.signal(signal);
        }
    }

    /// What has been captured so far.
    pub fn captured(&self) -> Vec<Line> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks once for processes that have ended; true when all have.
    fn poll(&mut self) -> bool {
        for process in self.children.iter_mut().filter(|process| process.status.is_none()) {
            // An error means that there is no such child any more: it ended, how is not known.
            process.status = process.child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(1 << 8)));
        }
        self.children.iter().all(|process| process.status.is_some())
    }

    /// Waits for the end of the job.
    pub fn wait(mut self) -> Outcome {
        let mut failure: Option<(i32, String)> = None;
        let mut give_up = self.deadline;
        loop {
            let done = self.poll();
            if failure.is_none() {
                let failed = self.children.iter().find(|process| process.status.is_some_and(|s| !s.success()));
                if let Some(process) = failed
                    && let Some(status) = process.status
                {
                    failure = Some((code_of(status), format!("{}: {}", process.name(), describe(status))));
                    give_up = give_up.min(Instant::now() + self.grace);
                }
            }
            if done {
                break;
            }
            if Instant::now() >= give_up {
                let names = self.children.iter().filter(|p| p.status.is_none()).map(Process::name);
                let names = names.collect::<Vec<_>>().join(", ");
                failure.get_or_insert_with(|| {
                    (EXIT_TIMEOUT, format!("{names}: still running after {:?}, killed", self.timeout))
                });
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

    /// mpirun gets time to end its ranks and to remove its files; a rank has none to remove.
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

/// The mpirun on PATH, if there is one.
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
fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let hook = move || {
        // SAFETY: a system call without pointers, safe between fork and exec.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have died before that.
        if std::os::unix::process::parent_id() != parent {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the hook makes two system calls and allocates nothing.
    unsafe { command.pre_exec(hook) };
}

#[cfg(test)]
mod tests;
