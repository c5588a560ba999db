//! Statistics that a card keeps itself: an EFA card's are its driver's files in sysfs, the software card has a call for
//! them.

use ferrogin_libfabric::statistics::Statistics;
use ferrogin_libfabric::{Domain, Info};
use std::path::Path;
use std::sync::Arc;

/// A card's totals, by the names of an EFA card's `hw_counters`. `None` for a number that the card lacks.
pub type Counters = [Option<u64>; NAMES.len()];

/// The numbers' names.
pub const NAMES: [&str; 8] = [
    "rdma_write_wrs",
    "rdma_read_wrs",
    "rdma_write_wr_err",
    "rdma_read_wr_err",
    "rdma_write_bytes",
    "rdma_read_bytes",
    "rdma_write_recv_bytes",
    "rdma_read_resp_bytes",
];

/// An open card.
pub type Card = (Arc<Domain>, Info);

/// Returns what a card has counted; `None` if it has no statistics.
pub fn statistics((domain, info): &Card) -> Option<Counters> {
    if let Some(of_software) = domain.statistics() {
        return Some(counters(&of_software));
    }
    of_driver(Path::new("/sys/bus/pci/devices"), &info.pci_address()?.to_string())
}

fn counters(from: &Statistics) -> Counters {
    [
        from.rdma_write_wrs,
        from.rdma_read_wrs,
        from.rdma_write_wr_err,
        from.rdma_read_wr_err,
        from.rdma_write_bytes,
        from.rdma_read_bytes,
        from.rdma_write_recv_bytes,
        from.rdma_read_resp_bytes,
    ]
    .map(Some)
}

/// Reads the files of the card's only port, by the EFA driver's names (`efa_verbs.c`); older drivers have fewer.
fn of_driver(devices: &Path, address: &str) -> Option<Counters> {
    let card = std::fs::read_dir(devices.join(address).join("infiniband")).ok()?.next()?.ok()?.path();
    let files = card.join("ports/1/hw_counters");
    files.is_dir().then(|| NAMES.map(|name| std::fs::read_to_string(files.join(name)).ok()?.trim().parse().ok()))
}

/// Totals that keep growing when a card restarts from 0, as a reopened software card does, and a card with a new
/// driver.
#[derive(Debug, Default)]
pub struct CardTotals {
    before: [u64; NAMES.len()],
    last: Counters,
}

impl CardTotals {
    /// Takes the card's current numbers.
    pub fn update(&mut self, now: &Counters) {
        for ((before, last), now) in self.before.iter_mut().zip(&mut self.last).zip(now) {
            if let (Some(last), Some(now)) = (*last, *now)
                && now < last
            {
                *before += last;
            }
            *last = now.or(*last);
        }
    }

    /// Returns the totals.
    pub fn get(&self) -> Counters {
        std::array::from_fn(|i| Some(self.before[i] + self.last[i]?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_hardware_are_files_of_the_driver() {
        let devices = std::env::temp_dir().join(format!("ferrogin-sysfs-{}", std::process::id()));
        let files = devices.join("0000:10:1b.0/infiniband/rdmap16s27/ports/1/hw_counters");
        std::fs::create_dir_all(&files).unwrap();
        std::fs::create_dir_all(devices.join("0000:10:1c.0")).unwrap();
        for (n, name) in NAMES.iter().enumerate().filter(|(n, _)| *n != 3) {
            std::fs::write(files.join(name), format!("{}\n", n + 100)).unwrap();
        }
        let found = of_driver(&devices, "0000:10:1b.0").unwrap();
        let others = [of_driver(&devices, "0000:10:1c.0"), of_driver(&devices, "0000:10:1d.0")];
        std::fs::remove_dir_all(&devices).unwrap();
        assert_eq!(found, [100, 101, 102, 0, 104, 105, 106, 107].map(|n| (n != 0).then_some(n)));
        assert_eq!(others, [None, None]);
    }

    #[test]
    fn totals_do_not_fall_when_a_card_begins_again() {
        let of = |n| [Some(n); NAMES.len()];
        let mut totals = CardTotals::default();
        assert_eq!(totals.get(), [None; NAMES.len()]);
        for (now, total) in [(5, 5), (9, 9), (0, 9), (4, 13)] {
            totals.update(&of(now));
            assert_eq!(totals.get(), of(total));
        }
        totals.update(&[None; NAMES.len()]);
        assert_eq!(totals.get(), of(13));
    }
}
