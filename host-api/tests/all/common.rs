//! Shared helpers: the built libraries, C and C++ programs, processes with settings, ranks as threads.

use ferrogin::bootstrap::Bootstrap;
use ferrogin::{Comm, Options};
use ferrogin_test_support::child;
use ferrogin_test_support::wait::HANG_LIMIT;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Returns the directory of the libraries that `make build` builds. Without them, skips `test`.
pub fn dist(test: &str) -> Option<PathBuf> {
    ferrogin_test_support::dist(test, &["libferrogin.so", "libsoftefa-fi.so"])
}

/// Compiles a program from `examples/` with the compiler that `variable` names, or `default`. Without a compiler, skips
/// `test`.
pub fn compile(test: &str, compiler: (&str, &str), flags: &[&str], source: &str) -> Option<PathBuf> {
    compile_with(test, compiler, flags, source, &[])
}

/// Like `compile`, with extra linker flags.
pub fn compile_with(
    test: &str,
    (variable, default): (&str, &str),
    flags: &[&str],
    source: &str,
    link: &[&str],
) -> Option<PathBuf> {
    let dist = dist(test)?;
    let compiler = std::env::var(variable).ok().filter(|name| !name.is_empty()).unwrap_or_else(|| default.to_owned());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    let mut command = Command::new(&compiler);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(flags).args(["-Wall", "-Wextra", "-Werror", source, "-o"]);
    command.arg(&program).arg("-I").arg(include()).arg("-L").arg(&dist).arg("-lferrogin");
    command.arg(format!("-Wl,-rpath,{}", dist.display())).args(link);
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            ferrogin_test_support::skip(test, format_args!("{compiler}: {error}"));
            return None;
        }
    };
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// Returns the headers' directory.
pub fn include() -> PathBuf {
    ferrogin_test_support::workspace().join("ffi-headers/include")
}

/// Sets what a rank on the software card needs, and unsets all other settings.
pub fn on_software_card(command: &mut Command) -> &mut Command {
    let ours =
        |name: &str| ["FERROGIN_", "SOFTEFA_", "FI_", "OMPI_", "PMI"].iter().any(|prefix| name.starts_with(prefix));
    for name in std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).filter(|name| ours(name)) {
        command.env_remove(name);
    }
    command
        .env("FERROGIN_PROVIDER", "softefa")
        .env("FERROGIN_DEVICE", "cpu")
        .env("FERROGIN_TIMEOUT", HANG_LIMIT.as_secs().to_string())
}

/// Runs a job with one process per rank to completion, and returns their outputs.
pub fn job(test: &str, ranks: usize, command: impl Fn(usize) -> Command) -> Vec<Output> {
    let start = |rank: usize| {
        let mut command = command(rank);
        command.env("FERROGIN_RANK", rank.to_string()).env("FERROGIN_NRANKS", ranks.to_string());
        command.env("FERROGIN_BOOTSTRAP", format!("ferrogin-{test}-{}", std::process::id()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a process")
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().expect("an output")).collect()
}

/// Returns standard output and standard error as text.
pub fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Returns the command that runs only this program's `test`, as a rank on the software card.
pub fn this_test(test: &str, dist: &Path) -> Command {
    let mut command = child::command(test);
    on_software_card(&mut command).env("FI_PROVIDER_PATH", dist).env(ROLE, test);
    command
}

const ROLE: &str = "FERROGIN_HOST_TEST";

/// Returns true in a process started by [`this_test`].
pub fn is_child(test: &str) -> bool {
    std::env::var(ROLE).is_ok_and(|name| name == test)
}

/// Runs `body` in a child process on the software card with extra `settings`, because a process chooses its card and
/// faults only once.
pub fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    let Some(dist) = dist(test) else { return };
    if is_child(test) {
        return body();
    }
    let output = this_test(test, &dist).envs(settings.iter().copied()).output().expect("a process");
    let text = text(&output);
    assert!(output.status.success() && text.contains("1 passed"), "{test} in a child process, {settings:?}:\n{text}");
}

/// Runs `body` on `n` ranks, each a thread, and returns their results.
pub fn ranks<T: Send>(n: usize, body: impl Fn(Comm) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let members = Bootstrap::threads(n, HANG_LIMIT).into_iter().enumerate().map(|(rank, member)| {
            scope.spawn(move || {
                let comm = Comm::open(rank, n, &Options::default(), |block| Ok(member.allgather(block)?));
                body(comm.expect("a communicator"))
            })
        });
        members.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("a rank")).collect()
    })
}
