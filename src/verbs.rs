//! `ferrogin verbs`: runs a program on a software card below libibverbs.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// The arguments of `ferrogin verbs`.
#[derive(Debug, clap::Args)]
pub struct VerbsArgs {
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

const LIBRARY: &str = "libibverbs.so.1";

/// A directory of libraries for other programs: in FERROGIN_DIST, beside this executable, or in the libraries' directory of an installation.
pub(crate) fn directory(part: &str, library: &str) -> Result<PathBuf, String> {
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
        format!("no {part}/{library} in FERROGIN_DIST, beside this program or in its installation: `make build` puts it into dist/{part}")
    })?;
    let directory = found.canonicalize().map_err(|error| format!("{}: {error}", found.display()))?;
    // The loader ends an entry of LD_LIBRARY_PATH at both, has no escape for them, and takes what follows for a relative directory.
    if let Some(separator) = directory.as_os_str().as_bytes().iter().find(|byte| b":;".contains(byte)) {
        return Err(format!(
            "{} cannot be an entry of LD_LIBRARY_PATH, because its name contains `{}`: install ferrogin in a directory without it",
            directory.display(),
            char::from(*separator)
        ));
    }
    Ok(directory)
}

/// `directory` before the libraries' directories that the environment names.
pub(crate) fn library_path(directory: PathBuf) -> OsString {
    let mut path = directory.into_os_string();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    path
}

/// The directory of the card's libraries, where `ferrogin verbs` runs this process.
pub fn below() -> Option<PathBuf> {
    let sysfs = PathBuf::from(std::env::var_os("SYSFS_PATH")?).canonicalize().ok()?;
    let directory = sysfs.parent()?;
    let libraries = std::env::var_os("LD_LIBRARY_PATH")?;
    let is_loaded =
        std::env::split_paths(&libraries).any(|path| path.canonicalize().is_ok_and(|path| path == directory));
    (is_loaded && directory.join(LIBRARY).is_file()).then(|| directory.to_owned())
}

/// Makes a mount namespace of this process, as root or as the only user of a new user namespace.
fn enter_namespace() -> io::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    Ok(())
}

/// Shows the cards under /sys/class, beside all that is there. The kernel lets no program add entries, so a temporary file system with the
/// same links covers the directory.
fn show_cards(sysfs: &Path) -> io::Result<()> {
    const CLASS: &str = "/sys/class";
    const OURS: [&str; 2] = ["infiniband", "infiniband_verbs"];
    let mut links = Vec::new();
    for class in fs::read_dir(CLASS)?.filter_map(Result::ok) {
        let name = class.file_name();
        if OURS.iter().any(|ours| name == *ours) {
            continue;
        }
        let entries = fs::read_dir(class.path()).into_iter().flatten().filter_map(Result::ok);
        let targets = entries.filter_map(|entry| Some((entry.file_name(), fs::read_link(entry.path()).ok()?)));
        links.push((name, targets.collect::<Vec<_>>()));
    }
    mount(Some("ferrogin"), CLASS, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))?;
    for (class, targets) in links {
        let directory = Path::new(CLASS).join(class);
        fs::create_dir(&directory)?;
        for (name, target) in targets {
            symlink(target, directory.join(name))?;
        }
    }
    // The library refuses an invalid number.
    let cards: u32 = std::env::var("SOFTEFA_NICS").ok().and_then(|cards| cards.parse().ok()).unwrap_or(1);
    for (class, prefix, suffix) in [(OURS[0], "rdmap", "s0"), (OURS[1], "uverbs", "")] {
        let directory = Path::new(CLASS).join(class);
        fs::create_dir(&directory)?;
        for card in 0..cards {
            let name = format!("{prefix}{card}{suffix}");
            if let Ok(target) = sysfs.join("class").join(class).join(&name).canonicalize() {
                symlink(target, directory.join(name))?;
            }
        }
    }
    Ok(())
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
    let sysfs = directory.join("sysfs");
    if let Err(error) = enter_namespace().and_then(|()| show_cards(&sysfs)) {
        eprintln!(
            "ferrogin verbs: no private /sys/class ({error}): programs that look for cards under /sys/class/infiniband find none. Run as \
             root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces)."
        );
    }
    let path = library_path(directory);
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let error = Command::new(program).args(arguments).env("LD_LIBRARY_PATH", path).env("SYSFS_PATH", sysfs).exec();
    eprintln!("ferrogin verbs: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(127)
}
