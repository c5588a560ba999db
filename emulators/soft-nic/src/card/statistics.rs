//! A card's statistics, with the names of an EFA card's `hw_counters`.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use super::MAX_SEND_SIZE;

/// Defines [`Statistics`] and the names of its fields.
macro_rules! statistics {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a card has counted since it was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Statistics {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Statistics {
            /// Returns the numbers with their names.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

statistics! {
    /// Payload bytes that the card sent.
    tx_bytes,
    /// Packets that the card sent, of up to [`MAX_SEND_SIZE`] payload bytes each.
    tx_pkts,
    /// Payload bytes that the card received.
    rx_bytes,
    /// Packets that the card received.
    rx_pkts,
    /// Datagrams that found no receive.
    rx_drops,
    /// Sends that completed without error.
    send_wrs,
    /// Bytes of these sends.
    send_bytes,
    /// Messages received without error.
    recv_wrs,
    /// Bytes of these messages.
    recv_bytes,
    /// This side's writes that completed without error.
    rdma_write_wrs,
    /// Bytes of these writes.
    rdma_write_bytes,
    /// This side's writes that completed in error.
    rdma_write_wr_err,
    /// Bytes that peers have written to this side's memory.
    rdma_write_recv_bytes,
    /// This side's reads that completed without error.
    rdma_read_wrs,
    /// Bytes of these reads.
    rdma_read_bytes,
    /// This side's reads that completed in error.
    rdma_read_wr_err,
    /// Bytes that peers have read from this side's memory.
    rdma_read_resp_bytes,
}

/// Returns how many packets of EFA's wire carry `len` bytes.
fn packets(len: u32) -> u64 {
    len.div_ceil(MAX_SEND_SIZE).max(1).into()
}

impl Statistics {
    pub(crate) fn sent(&mut self, len: u32) {
        self.tx_bytes += u64::from(len);
        self.tx_pkts += packets(len);
    }

    pub(crate) fn received(&mut self, len: u32) {
        self.rx_bytes += u64::from(len);
        self.rx_pkts += packets(len);
    }
}

/// Time between two updates of the files, like the driver's `lifespan`.
pub const LIFESPAN: Duration = Duration::from_millis(100);

/// The files in an `hw_counters` directory, to which cards of several processes add.
#[derive(Debug)]
pub(crate) struct CounterFiles {
    directory: PathBuf,
    added: Vec<u64>,
    due: Instant,
}

impl CounterFiles {
    /// Opens the files; `None` if `directory` has none. `ferrogin verbs` makes them.
    pub(crate) fn open(directory: &Path) -> Option<Self> {
        let has_files = directory.join("tx_bytes").is_file();
        let added = Statistics::default().named().map(|(_, number)| number).collect();
        has_files.then(|| Self { directory: directory.to_owned(), added, due: Instant::now() })
    }

    /// Whether an update is due.
    pub(crate) fn is_due(&self) -> bool {
        self.due <= Instant::now()
    }

    /// Adds what was counted since the last update. Returns false if another process held a file; the next update
    /// catches up on it.
    pub(crate) fn update(&mut self, statistics: &Statistics) -> bool {
        let mut all = true;
        for ((name, now), added) in statistics.named().zip(&mut self.added) {
            if now != *added {
                match add(&self.directory.join(name), now - *added) {
                    Ok(()) => *added = now,
                    Err(_) => all = false,
                }
            }
        }
        self.due = Instant::now() + LIFESPAN;
        all
    }
}

/// Adds to the number in a file. A number never gets shorter, so nothing is truncated and a reader sees the old number
/// or the new one.
fn add(path: &Path, more: u64) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let number: u64 = text.trim().parse().unwrap_or(0);
    file.write_all_at(format!("{}\n", number + more).as_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_of_several_processes_add_to_the_same_files() {
        let directory = ferrogin_test_support::of_process(std::env::temp_dir(), "ferrogin-hw-counters");
        std::fs::create_dir_all(&directory).unwrap();
        assert!(CounterFiles::open(&directory).is_none());
        for (name, _) in Statistics::default().named() {
            std::fs::write(directory.join(name), "0\n").unwrap();
        }
        let [mut one, mut other] = [0; 2].map(|_| CounterFiles::open(&directory).unwrap());
        let mut counted = Statistics::default();
        for _ in 0..3 {
            counted.sent(2 * MAX_SEND_SIZE);
            counted.received(0);
            assert!(one.update(&counted) && other.update(&counted));
        }
        let read = |name| std::fs::read_to_string(directory.join(name)).unwrap();
        let held = OpenOptions::new().write(true).open(directory.join("tx_bytes")).unwrap();
        let held = Flock::lock(held, FlockArg::LockExclusive).unwrap();
        counted.sent(1);
        assert!(!one.update(&counted) && read("tx_bytes") == "107136\n");
        drop(held);
        assert!(one.update(&counted));
        assert_eq!(["tx_bytes", "tx_pkts", "rx_pkts", "rx_bytes"].map(read), ["107137\n", "13\n", "6\n", "0\n"]);
        std::fs::remove_dir_all(directory).unwrap();
    }
}
