//! `ferrogin verbs` runs a program on a software card below libibverbs, and `ferrogin gpu` on software GPUs.

mod machine;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use soft_nic::card::pace::shares_a_core;

/// The arguments of `ferrogin verbs`.
#[derive(Debug, clap::Args)]
pub struct VerbsArgs {
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

const LIBRARY: &str = "libibverbs.so.1";
/// Stands in for /sys, next to the library.
const SYSFS: &str = "sysfs";
/// libfabric's setting: whether its provider efa writes and reads a card's queues itself, from libfabric 2.3.
const DATA_PATH_DIRECT: &str = "FI_EFA_USE_DATA_PATH_DIRECT";

/// Finds a directory of libraries for other programs: in FERROGIN_DIST, next to this executable, or in an
/// installation's library directory.
pub fn directory(part: &str, library: &str) -> Result<PathBuf, String> {
    let from_environment = std::env::var_os("FERROGIN_DIST").map(PathBuf::from).into_iter().map(|dist| dist.join(part));
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let places = [part.to_owned()]
        .into_iter()
        .chain(["lib", "lib64", &multiarch].map(|lib| format!("../{lib}/ferrogin/{part}")));
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let beside = places.filter_map(|place| Some(own.as_ref()?.join(place)));
    let found = from_environment.chain(beside).find(|directory| directory.join(library).is_file());
    let found = found.ok_or_else(|| {
        format!(
            "no {part}/{library} in FERROGIN_DIST, next to this program or in its installation: `make build` \
                 puts it into dist/{part}"
        )
    })?;
    let directory = found.canonicalize().map_err(|error| format!("{}: {error}", found.display()))?;
    // Both characters end an entry of LD_LIBRARY_PATH, can't be escaped, and make the loader take the rest for a
    // relative directory.
    if let Some(separator) = directory.as_os_str().as_bytes().iter().find(|byte| b":;".contains(byte)) {
        return Err(format!(
            "{} cannot be in LD_LIBRARY_PATH, because its name contains `{}`: install ferrogin in a directory without it",
            directory.display(),
            char::from(*separator)
        ));
    }
    Ok(directory)
}

/// Puts `directory` before the library directories in the environment.
pub fn library_path(directory: PathBuf) -> OsString {
    let mut path = directory.into_os_string();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    path
}

/// Returns the directory of the card's libraries, if this process runs under `ferrogin verbs`.
pub fn below() -> Option<PathBuf> {
    let libraries = std::env::var_os("LD_LIBRARY_PATH")?;
    let is_card = |path: &PathBuf| path.join(LIBRARY).is_file() && path.join(SYSFS).is_dir();
    std::env::split_paths(&libraries).find(is_card)?.canonicalize().ok()
}

/// Libraries of rdma-core that programs link to, and that need private symbols of its libibverbs.
const DRIVERS: [&str; 3] = ["libmlx5.so.1", "libmlx4.so.1", "libefa.so.1"];

/// Finds a library of the system's rdma-core whose private symbols have a version that the card's libibverbs lacks.
fn unmatched_release(card: &Path) -> Option<(PathBuf, String)> {
    let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let from_environment = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let system = [multiarch.as_str(), "/usr/lib64", "/usr/lib"].map(PathBuf::from);
    let known = private_versions(&std::fs::read(card.join(LIBRARY)).ok()?);
    let directories = std::env::split_paths(&from_environment).chain(system);
    let libraries = directories.flat_map(|directory| DRIVERS.map(|name| directory.join(name)));
    libraries.filter(|library| !library.starts_with(card)).find_map(|library| {
        let needed = private_versions(&std::fs::read(&library).ok()?);
        Some((library, needed.difference(&known).next()?.clone()))
    })
}

/// Returns the versions of private symbols whose names are in a library.
fn private_versions(library: &[u8]) -> BTreeSet<String> {
    const PREFIX: &[u8] = b"IBVERBS_PRIVATE_";
    let places = library.windows(PREFIX.len()).enumerate().filter(|(_, bytes)| *bytes == PREFIX);
    let versions = places.map(|(at, _)| {
        let number = library[at + PREFIX.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        number.fold(String::from_utf8_lossy(PREFIX).into_owned(), |name, digit| name + &char::from(*digit).to_string())
    });
    versions.collect()
}

/// Runs the program in place of this one.
pub fn run(args: &VerbsArgs) -> ExitCode {
    let directory = match directory("verbs", LIBRARY) {
        Ok(directory) => directory,
        Err(problem) => {
            eprintln!("ferrogin verbs: {problem}");
            return ExitCode::FAILURE;
        }
    };
    if let Some((library, version)) = unmatched_release(&directory) {
        eprintln!(
            "ferrogin verbs: {} needs {version}, which the card's libibverbs doesn't have, because this rdma-core is newer than this \
             ferrogin: programs that link to it, such as perftest and UCX, don't start; use a newer ferrogin, or a container with rdma-core \
             34 to 65",
            library.display()
        );
    }
    let sysfs = directory.join(SYSFS);
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", library_path(directory));
    match machine::show_cards(&sysfs) {
        Ok(()) => command.env_remove("SYSFS_PATH"),
        Err(refusal) => {
            eprintln!(
                "ferrogin verbs: the cards are only in SYSFS_PATH, not in /sys and /dev/infiniband, where UCX, MPICH \
                 and Mooncake look for them: {refusal}"
            );
            command.env("SYSFS_PATH", sysfs)
        }
    };
    // On such a machine, a program that polls a queue in memory keeps the card's thread from running for milliseconds.
    // A program that polls through libibverbs lets the card run.
    if std::env::var_os(DATA_PATH_DIRECT).is_none() && shares_a_core() {
        command.env(DATA_PATH_DIRECT, "0");
    }
    let error = command.exec();
    eprintln!("ferrogin verbs: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(127)
}

/// The arguments of `ferrogin gpu`.
#[derive(Debug, clap::Args)]
pub struct GpuArgs {
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

/// Runs the program in place of this one.
pub fn run_gpu(args: &GpuArgs) -> ExitCode {
    let directory = match directory("gpu", "libcuda.so.1") {
        Ok(directory) => directory,
        Err(problem) => {
            eprintln!("ferrogin gpu: {problem}");
            return ExitCode::FAILURE;
        }
    };
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let error = Command::new(program).args(arguments).env("LD_LIBRARY_PATH", library_path(directory)).exec();
    eprintln!("ferrogin gpu: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(127)
}
