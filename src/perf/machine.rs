//! The machine that a measurement runs on, and the wire between the cards.

use serde::{Deserialize, Serialize};

/// The machine of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// The instruction set.
    pub architecture: String,
    /// The kernel's release.
    pub linux: String,
}

impl Machine {
    /// Returns this machine.
    pub fn this() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        // aarch64 kernels print no name.
        let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            processor: name.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            architecture: std::env::consts::ARCH.to_owned(),
            linux: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

/// Returns a text that differs between hosts, and between boots of a host.
pub fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id").trim().to_owned()
}

/// Returns the bytes of memory that programs can still allocate; `None` if the kernel does not say.
pub fn available_memory() -> Option<u64> {
    let meminfo = read("/proc/meminfo");
    let kibibytes = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kibibytes.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the wire between the cards: the software card's, or otherwise the provider's name.
pub fn wire(provider: &str, hosts: usize) -> String {
    let named = std::env::var("SOFTEFA_WIRE").ok().filter(|wire| !wire.is_empty());
    match (provider, named) {
        ("softefa", Some(wire)) => wire,
        ("softefa", None) if hosts == 1 => "shm".to_owned(),
        ("softefa", None) => "tcp".to_owned(),
        _ => provider.to_owned(),
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
