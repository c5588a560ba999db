//! Directories and ports that a test program has to itself until it exits.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// This process's directory in `place` whose name starts with `prefix`; neither need exist yet. Removes those of
/// processes that have ended.
pub fn of_process(place: impl AsRef<Path>, prefix: &str) -> PathBuf {
    let place = place.as_ref();
    let ended = |name: &str| {
        let id = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('-'));
        id.is_some_and(|id| id.parse::<u32>().is_ok() && !Path::new("/proc").join(id).exists())
    };
    for old in std::fs::read_dir(place).into_iter().flatten().flatten() {
        if old.file_name().to_str().is_some_and(ended) {
            // Another test process may have removed it.
            let _ = std::fs::remove_dir_all(old.path());
        }
    }
    place.join(format!("{prefix}-{}", std::process::id()))
}

/// A loopback address that no other process gets: Linux process IDs stay below 2^22.
pub fn own_host() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 + high, middle, low)
}

/// A port of this machine, a different one each call. It is below those that Linux hands out, so that no other process
/// takes it.
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
        // No process has the largest ID.
        for name in ["card-4294967295", "card-1", "cards-4294967295", "card-x"] {
            std::fs::create_dir_all(place.join(name).join("sysfs")).unwrap();
        }
        assert_eq!(of_process(&place, "card"), place.join(format!("card-{}", std::process::id())));
        let left = ["card-4294967295", "card-1", "cards-4294967295", "card-x"].map(|name| place.join(name).exists());
        assert_eq!(left, [false, true, true, true]);
        std::fs::remove_dir_all(place).unwrap();
    }
}
