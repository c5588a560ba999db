//! Process limits, shared memory, the loopback interface, and the page size.

use super::finding::Finding;
use super::machine::Machine;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, SysconfVar, access, sysconf};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Descriptors for a rank with a few hundred peers.
const DESCRIPTORS: u64 = 1024;
/// Fewer don't suffice for one rank alone.
const DESCRIPTORS_MIN: u64 = 64;
/// Memory that an EFA card locks for a job's windows; a lower limit is probably just the default.
const LOCKED: u64 = 1 << 30;
/// NCCL takes about 10 MiB of /dev/shm per rank on a host; 64 MiB is a container's default.
const SHARED: u64 = 512 * MIB;
/// More than the size of a file shared by two software cards.
const FILE: u64 = 64 * MIB;
pub const AREA: &str = "limits";
pub const SHARED_MEMORY: &str = "shared memory";

pub fn check(machine: &Machine) -> Vec<Finding> {
    let mut findings = resources(machine);
    findings.extend(shared_memory(machine));
    findings.extend(memory_files());
    findings.push(loopback());
    findings.push(pages());
    findings
}

fn soft(resource: Resource) -> u64 {
    getrlimit(resource).map_or(RLIM_INFINITY, |(soft, _)| soft)
}

fn amount(limit: u64) -> String {
    match limit {
        RLIM_INFINITY => "unlimited".into(),
        bytes if bytes >= MIB => format!("{} MiB", bytes / MIB),
        bytes => format!("{} KiB", bytes / 1024),
    }
}

fn resources(machine: &Machine) -> Vec<Finding> {
    let (files, locked) = (soft(Resource::RLIMIT_NOFILE), soft(Resource::RLIMIT_MEMLOCK));
    let (file, space) = (soft(Resource::RLIMIT_FSIZE), soft(Resource::RLIMIT_AS));
    let mut findings = Vec::new();
    let shown = if files == RLIM_INFINITY { "unlimited".into() } else { files.to_string() };
    let what = format!("open files (ulimit -n): {shown}");
    let fix = "ulimit -n 65536, or LimitNOFILE= in the service";
    findings.push(match files {
        0..DESCRIPTORS_MIN => Finding::problem(AREA, what, "even one rank needs more", fix),
        DESCRIPTORS_MIN..DESCRIPTORS => {
            Finding::warning(AREA, what, "each peer and each window needs descriptors; a call without one fails", fix)
        }
        _ => Finding::ok(AREA, what),
    });
    if locked < LOCKED && !machine.has_software_card() && machine.provider != "tcp" {
        findings.push(Finding::warning(
            AREA,
            format!("locked memory (ulimit -l): {}", amount(locked)),
            "a card locks the memory that it registers; registration fails at the limit",
            "ulimit -l unlimited (/etc/security/limits.conf; docker run --ulimit memlock=-1)",
        ))
    } else {
        findings.push(Finding::ok(AREA, format!("locked memory (ulimit -l): {}", amount(locked))))
    }
    if file < FILE {
        findings.push(Finding::problem(
            AREA,
            format!("size of a file (ulimit -f): {}", amount(file)),
            "it also limits memory files, which software cards and windows use",
            "ulimit -f unlimited",
        ));
    }
    if space != RLIM_INFINITY {
        findings.push(Finding::warning(
            AREA,
            format!("address space (ulimit -v): {}", amount(space)),
            "CUDA and libfabric reserve many GiB of addresses; a call fails at the limit",
            "ulimit -v unlimited",
        ));
    }
    findings
}

fn shared_memory(machine: &Machine) -> Vec<Finding> {
    const AREA: &str = SHARED_MEMORY;
    let path = machine.path("/dev/shm");
    let why = "NCCL's ranks on one host, and libfabric's shm, exchange data there; ferrogin's own ranks do not";
    let size = match statvfs(&path) {
        Ok(stat) => stat.blocks().saturating_mul(stat.fragment_size()),
        Err(error) => {
            let fix = "mount it: mount -t tmpfs -o size=50% tmpfs /dev/shm";
            return vec![Finding::warning(AREA, format!("{}: {error}", path.display()), why, fix)];
        }
    };
    let mut findings = Vec::new();
    if access(&path, AccessFlags::W_OK | AccessFlags::X_OK).is_err() {
        let what = format!("this user may not write to {}", path.display());
        findings.push(Finding::warning(AREA, what, why, "chmod 1777 /dev/shm"));
    }
    let what = format!("{} has {}", path.display(), amount(size));
    findings.push(if size < SHARED {
        Finding::warning(
            AREA,
            what,
            "NCCL takes about 10 MiB of it per rank on a host, and fails with \"No space left on device\"",
            "mount -o remount,size=8G /dev/shm; docker run --shm-size=8g (a container's default is 64 MiB)",
        )
    } else {
        Finding::ok(AREA, what)
    });
    findings
}

fn memory_files() -> Option<Finding> {
    let error = memfd_create("ferrogin-doctor", MFdFlags::MFD_CLOEXEC).err()?;
    Some(Finding::problem(
        SHARED_MEMORY,
        format!("memfd_create fails: {error}"),
        "windows and software cards use memory files",
        "allow the system call memfd_create (the container's seccomp profile), and descriptors (ulimit -n)",
    ))
}

fn loopback() -> Finding {
    let reach = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(2)).map(drop)
    };
    match reach() {
        Ok(()) => Finding::ok("loopback", "127.0.0.1 works"),
        Err(error) => Finding::warning(
            "loopback",
            format!("127.0.0.1 does not work: {error}"),
            "mpirun, torchrun and ranks on one host meet there",
            "ip link set lo up",
        ),
    }
}

fn pages() -> Finding {
    let bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(0);
    match bytes {
        4096 => Finding::ok("page size", "4096 bytes"),
        bytes => Finding::warning(
            "page size",
            format!("{bytes} bytes"),
            "the plugin asks the system for the size, but was tested with pages of 4096 bytes only",
            "report what fails; no setting is needed",
        ),
    }
}
