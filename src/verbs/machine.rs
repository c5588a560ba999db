//! Shows the cards in /sys and /dev as on a machine that has them, in a mount namespace for this process.
//!
//! The kernel doesn't let programs add entries to sysfs. So a temporary file system covers each directory in
//! [`COVERED`]: it has the cards' entries, and mounts of everything else that was there.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use soft_nic::card::{LIFESPAN, Statistics};
use soft_nic::config::{Config, MAX_NICS};

/// The directories that get the cards' entries.
const COVERED: [&str; 4] = ["/sys/bus", "/sys/class", "/sys/devices", "/dev"];
/// Directories that show only the cards' entries.
const REPLACED: [&str; 3] = ["/sys/class/infiniband", "/sys/class/infiniband_verbs", "/dev/infiniband"];

/// Why this process can't show the cards on this machine.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(
        "no mount namespace ({0}): run as root (in a container: --cap-add SYS_ADMIN --security-opt apparmor=unconfined), or allow user \
         namespaces: {fix}", fix = namespace_fix(*.0)
    )]
    Namespace(Errno),
    #[error(
        "mounts are forbidden ({0}): AppArmor may forbid them in user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a \
         container: --security-opt apparmor=unconfined)"
    )]
    Mount(Errno),
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
}

fn namespace_fix(errno: Errno) -> &'static str {
    match errno {
        Errno::ENOSPC => "sysctl user.max_user_namespaces is too low",
        Errno::EINVAL | Errno::ENOSYS => "this kernel has none (CONFIG_USER_NS)",
        _ => {
            "sysctl kernel.unprivileged_userns_clone=1, and a seccomp profile that permits unshare and mount (in a container: --security-opt \
             seccomp=unconfined)"
        }
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Refusal {
    |error| Refusal::File(path.to_owned(), error)
}

/// Shows the cards in the settings; `sysfs` has their entries for /sys.
///
/// # Errors
/// The system refuses a mount, a namespace or a file.
pub fn show_cards(sysfs: &Path) -> Result<(), Refusal> {
    enter_namespace()?;
    cover_all(sysfs).inspect_err(|_| {
        // An unfinished stage would hide the cards' entries.
        let _ = umount2(sysfs, MntFlags::MNT_DETACH);
    })
}

fn cover_all(sysfs: &Path) -> Result<(), Refusal> {
    // The library refuses invalid settings.
    let config = Config::from_env().unwrap_or_else(|_| Config { nics: 1, ..Config::default() });
    let cards = config.nics;
    // The stage mounted below hides it.
    let entries = File::open(sysfs).map_err(at(sysfs))?;
    let entries = PathBuf::from(format!("/proc/self/fd/{}", entries.as_raw_fd()));
    for covered in COVERED.map(Path::new) {
        mount(Some("ferrogin"), sysfs, Some("tmpfs"), MsFlags::empty(), Some("mode=0755")).map_err(Refusal::Mount)?;
        match covered.strip_prefix("/sys") {
            Ok(part) => copy(&entries.join(part), sysfs, &others(cards)).map_err(at(covered))?,
            Err(_) => add_devices(sysfs, cards)?,
        }
        if covered == Path::new("/sys/devices") {
            describe(sysfs, &config).map_err(at(covered))?;
        }
        mirror(covered, sysfs)?;
        mount(Some(sysfs), covered, None::<&str>, MsFlags::MS_MOVE, None::<&str>).map_err(Refusal::Mount)?;
    }
    Ok(())
}

/// Enters a mount namespace of its own, as root or as the only user of a new user namespace.
fn enter_namespace() -> Result<(), Refusal> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).map_err(Refusal::Namespace)?;
        for (file, text) in [
            ("setgroups", "deny".to_owned()),
            ("uid_map", format!("{uid} {uid} 1")),
            ("gid_map", format!("{gid} {gid} 1")),
        ] {
            let file = Path::new("/proc/self").join(file);
            fs::write(&file, text).map_err(at(&file))?;
        }
    }
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).map_err(Refusal::Mount)
}

fn bind(from: &Path, to: &Path) -> Result<(), Refusal> {
    match mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>) {
        // It may have disappeared meanwhile.
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(Refusal::Mount(errno)),
    }
}

/// Adds to `stage` whatever is in `system` but not in `stage`.
fn mirror(system: &Path, stage: &Path) -> Result<(), Refusal> {
    for entry in fs::read_dir(system).map_err(at(system))?.filter_map(Result::ok) {
        let (from, to) = (entry.path(), stage.join(entry.file_name()));
        let Ok(kind) = entry.file_type() else { continue };
        match fs::symlink_metadata(&to) {
            Ok(ours) if ours.is_dir() && kind.is_dir() && !REPLACED.iter().any(|path| from == Path::new(path)) => {
                mirror(&from, &to)?;
            }
            Ok(_) => {}
            Err(_) if kind.is_symlink() => {
                fs::read_link(&from).and_then(|target| symlink(target, &to)).map_err(at(&from))?;
            }
            Err(_) => {
                if kind.is_dir() { fs::create_dir(&to) } else { File::create(&to).map(drop) }.map_err(at(&to))?;
                bind(&from, &to)?;
            }
        }
    }
    Ok(())
}

/// Names in the entries' directory that belong to cards which the settings don't have.
fn others(cards: u32) -> HashSet<OsString> {
    let names = |card| [format!("rdmap{card}s0"), format!("uverbs{card}"), address(card), bus(card)];
    (cards..MAX_NICS).flat_map(names).map(OsString::from).collect()
}

/// Returns a card's PCI address, as set by `emulators/soft-verbs/link.sh`.
fn address(card: u32) -> String {
    format!("0000:{:02x}:00.0", card + 16)
}

/// Returns its bus, as set there too.
fn bus(card: u32) -> String {
    format!("0000:{:02x}", card + 16)
}

/// Copies a directory's entries, except those of other cards.
fn copy(from: &Path, to: &Path, others: &HashSet<OsString>) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if others.contains(&entry.file_name()) {
            continue;
        }
        let (from, to, kind) = (entry.path(), to.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            fs::create_dir(&to)?;
            copy(&from, &to, others)?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
        } else {
            fs::copy(&from, &to)?;
        }
    }
    Ok(())
}

/// Adds what depends on the machine and the settings, and the statistics, which the cards of all processes in the
/// namespace update.
fn describe(devices: &Path, config: &Config) -> io::Result<()> {
    let read = |name: &str| fs::read_to_string(Path::new("/sys/devices/system").join(name)).ok();
    let online = read("cpu/online").unwrap_or_else(|| "0\n".to_owned());
    let node = if read("node/online").is_some() { "0\n" } else { "-1\n" };
    let id = config.faults.device;
    // aws-ofi-nccl crashes on a machine that doesn't say what it is.
    let product = devices.join("virtual/dmi/id/product_name");
    if fs::metadata("/sys/devices/virtual/dmi/id/product_name").is_err() {
        fs::create_dir_all(devices.join("virtual/dmi/id"))?;
        fs::write(product, "ferrogin verbs\n")?;
    }
    for card in 0..config.nics {
        let device = devices.join("pci0000:00").join(address(card));
        for file in ["device", "subsystem_device"] {
            fs::write(device.join(file), format!("{id:#06x}\n"))?;
        }
        let mut space = fs::read(device.join("config"))?;
        for place in [0x02, 0x2e] {
            space[place..place + 2].copy_from_slice(&id.to_le_bytes());
        }
        fs::write(device.join("config"), space)?;
        fs::write(device.join("numa_node"), node)?;
        fs::write(device.join("local_cpulist"), &online)?;
        fs::write(device.join("local_cpus"), mask(&online))?;
        let guid = soft_nic::host::card_guid(card).to_be_bytes();
        let guid = guid.chunks(2).map(|part| format!("{:02x}{:02x}", part[0], part[1])).collect::<Vec<_>>().join(":");
        fs::write(device.join(format!("infiniband/rdmap{card}s0/node_guid")), format!("{guid}\n"))?;
        let counters = device.join(format!("infiniband/rdmap{card}s0/ports/1/hw_counters"));
        for (name, _) in Statistics::default().named() {
            fs::write(counters.join(name), "0\n")?;
        }
        // How old the driver's numbers may be, in milliseconds.
        fs::write(counters.join("lifespan"), format!("{}\n", LIFESPAN.as_millis()))?;
    }
    Ok(())
}

/// Converts a list of CPUs ("0-3,8") to a mask as the kernel writes it: 32-bit words, highest first.
fn mask(list: &str) -> String {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let ranges = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(number(first)?..=number(last)?)
    });
    let mut words = vec![0u32];
    for cpu in ranges.flatten() {
        words.resize(words.len().max(cpu / 32 + 1), 0);
        words[cpu / 32] |= 1 << (cpu % 32);
    }
    let words: Vec<_> = words.iter().rev().map(|word| format!("{word:08x}")).collect();
    words.join(",") + "\n"
}

/// Adds the cards' character devices. Programs look for them and open them, but the card's library uses none, so
/// /dev/null stands in for each.
fn add_devices(dev: &Path, cards: u32) -> Result<(), Refusal> {
    let directory = dev.join("infiniband");
    DirBuilder::new().mode(0o755).create(&directory).map_err(at(&directory))?;
    for card in 0..cards {
        let file = directory.join(format!("uverbs{card}"));
        File::create(&file).map_err(at(&file))?;
        bind(Path::new("/dev/null"), &file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_become_masks() {
        for (list, expected) in
            [("0\n", "00000001\n"), ("0-1\n", "00000003\n"), ("0,2-3,33\n", "00000002,0000000d\n"), ("", "00000000\n")]
        {
            assert_eq!(mask(list), expected, "{list:?}");
        }
    }
}
