//! Verbs programs on the software card: the system's own, and C programs compiled here against the system's headers.

mod front_ends;
mod perftest;
mod programs;
mod pyverbs;
mod symbols;
mod trace;
mod two_hosts;
mod untrusted;
mod verbs_program;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use ferrogin_test_support::wait::{wait_for, wait_until};

/// Passes the directory of [`libraries`] to a process that a test starts.
const LIBRARIES: &str = "FERROGIN_TEST_VERBS";

/// Returns the directory of the libraries, which are linked once from the static library that cargo built for this
/// test.
fn libraries() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        if let Some(made) = std::env::var_os(LIBRARIES) {
            return made.into();
        }
        let beside = std::env::current_exe().unwrap();
        let beside = beside.parent().unwrap();
        let archives =
            std::fs::read_dir(beside).unwrap().filter_map(Result::ok).map(|entry| entry.path()).filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("libsoft_verbs") && name.ends_with(".a")
            });
        let newest = archives.max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok());
        let archive = newest.expect("cargo builds the static library beside the tests");
        let directory = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), "verbs");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("link.sh");
        let linked = Command::new(script).arg(archive).arg(&directory).status().expect("a shell");
        assert!(linked.success(), "emulators/soft-verbs/link.sh failed");
        directory
    })
}

/// Makes a command for a program that finds the software card.
fn on_card(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    set_card(&mut command);
    command
}

/// Sets what a program needs to find the software card.
fn set_card(command: &mut Command) {
    command.env("LD_LIBRARY_PATH", libraries()).env("SYSFS_PATH", libraries().join("sysfs"));
}

/// Whether a program is installed; if not, reports the test as skipped.
fn have(test: &str, program: &str, package: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if !found {
        ferrogin_test_support::skip(test, format!("{program} is not installed (Debian: {package})"));
    }
    found
}

/// A child process that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a child process"))
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Waits for the process to exit.
    fn output(mut self) -> Output {
        let status = wait_for("end of the program", || self.0.try_wait().unwrap());
        let read = |from: &mut dyn std::io::Read| {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            bytes
        };
        let stdout = read(self.0.stdout.as_mut().unwrap());
        let stderr = read(self.0.stderr.as_mut().unwrap());
        Output { status, stdout, stderr }
    }
}

/// Returns a successful run's output.
fn text(output: &Output) -> String {
    let all = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {all}", output.status);
    all
}

fn run(command: Command) -> String {
    text(&Running::start(command).output())
}

/// Runs a server and, once it listens, a client, both with the same port. Returns what they print.
fn server_and_client(server: impl Fn(&str) -> Command, client: impl Fn(&str) -> Command) -> (String, String) {
    let port = ferrogin_test_support::own_port();
    let mut server = Running::start(server(&port.to_string()));
    // The client doesn't wait for a server that isn't listening yet.
    let listens = || {
        let wanted = format!(":{port:04X} ");
        let lines = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
        lines.iter().flat_map(|text| text.lines()).any(|line| line.contains(&wanted) && line.contains(" 0A "))
    };
    wait_until("server that listens", || listens() || server.has_ended());
    if server.has_ended() {
        panic!("the server ended before its client came: {}", text(&server.output()));
    }
    let client = run(client(&port.to_string()));
    (text(&server.output()), client)
}
