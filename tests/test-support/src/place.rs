//! Directories and ports of test programs that use them until they end.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The directory of this process with the name `prefix` in `place`, which need not exist yet. Those of test programs that have ended are removed.
pub fn of_process(place: impl AsRef<Path>, prefix: &str) -> PathBuf {
    let place = place.as_ref();
    let ended = |name: &str| {
        let id = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('-'));
        id.is_some_and(|id| id.parse::<u32>().is_ok() && !Path::new("/proc").join(id).exists())
    };
    for old in std::fs::read_dir(place).into_iter().flatten().flatten() {
        if old.file_name().to_str().is_some_and(ended) {
            // Another process of these tests may have removed it.
            let _ = std::fs::remove_dir_all(old.path());
        }
    }
    place.join(format!("{prefix}-{}", std::process::id()))
}

/// A loopback address that no other process takes: Linux has at most 2^22 processes.
pub fn own_host() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 + high, middle, low)
}

/// A port of this machine, another one at each call: below those that Linux gives out, so that no other process takes it.
pub fn own_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    (20_000 + (std::process::id() * 16 + next % 16) % 10_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_ended_processes_are_removed() {
        let place = std::env::temp_dir().join(format!("ferrogin-places-{}", std::process::id()));
        // No process has the largest number.
        for name in ["card-4294967295", "card-1", "cards-4294967295", "card-x"] {
            std::fs::create_dir_all(place.join(name).join("sysfs")).unwrap();
        }
        assert_eq!(of_process(&place, "card"), place.join(format!("card-{}", std::process::id())));
        let left = ["card-4294967295", "card-1", "cards-4294967295", "card-x"].map(|name| place.join(name).exists());
        assert_eq!(left, [false, true, true, true]);
        std::fs::remove_dir_all(place).unwrap();
    }
}
