//! The plugin's FERROGIN_METRICS file under NCCL's calls.

use crate::harness::{alone, config, pass_round, ranks, window};
use ferrogin_test_support::prometheus::Metrics;
use ferrogin_test_support::wait::wait_until;
use std::path::PathBuf;

/// A metrics file for a child process. The parent puts its own id into the name, and removes the file.
pub struct MetricsFile(PathBuf);

impl MetricsFile {
    /// Names a file for `test`.
    pub fn new(test: &str) -> Self {
        Self(std::env::temp_dir().join(format!("ferrogin-{test}-{{pid}}-of-{}.prom", std::process::id())))
    }

    /// Returns the setting that selects the file.
    pub fn setting(&self) -> (&'static str, &str) {
        ("FERROGIN_METRICS", self.0.to_str().expect("a path of text"))
    }

    /// Reads this process's file.
    pub fn read() -> Metrics {
        let path = std::env::var("FERROGIN_METRICS").expect("set").replace("{pid}", &std::process::id().to_string());
        let text = std::fs::read_to_string(path).expect("a metrics file");
        Metrics::parse(&text).unwrap_or_else(|error| panic!("{error}, in\n{text}"))
    }
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        let name = self.0.file_name().expect("a name").to_string_lossy();
        let (before, after) = name.split_once("{pid}").expect("the place of the child's id");
        for entry in std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            // This process's other tests have files too.
            let child = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            if child.is_some_and(|id| id.bytes().all(|byte| byte.is_ascii_digit())) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

#[test]
fn metrics_of_all_ranks_of_a_process_are_in_its_file() {
    let test = "metrics_of_all_ranks_of_a_process_are_in_its_file";
    let file = MetricsFile::new(test);
    alone(test, &[file.setting()], |plugin| {
        for time in 1..3 {
            ranks(&plugin, 3, move |_, comm| {
                let (memory, window) = window(&comm, 4096);
                let context = comm.create_context(&config(2, 1)).expect("a context");
                for _ in 0..5 {
                    pass_round(&comm, &context, 0, &window, &memory, 1);
                }
                context.destroy().expect("destroyed");
            });
            drop(mini_nccl::log::take());
            // The last finalize wrote the file and stopped its thread. A later init starts from 0.
            let metrics = MetricsFile::read();
            for rank in ["0", "1", "2"] {
                let labels = [("rank", rank), ("context", "closed"), ("queue", "signal")];
                // Cursors and counters of a GPU's kernels are in GPU memory, which the host doesn't read.
                let five = std::env::var("FERROGIN_DEVICE").is_ok_and(|device| device == "cpu").then_some(5);
                assert_eq!(metrics.sum("ferrogin_posts_total", &labels), five, "{time}: {metrics:?}");
                assert_eq!(metrics.sum("ferrogin_completions_total", &labels), five, "{time}: {metrics:?}");
                assert_eq!(metrics.sum("ferrogin_signals_total", &[("rank", rank)]), five, "{time}: {metrics:?}");
            }
            // The ranks share their process's card.
            assert_eq!(
                metrics.sum("ferrogin_card_bytes_total", &[("operation", "write")]),
                Some(15 * 8),
                "{metrics:?}"
            );
            // The kernel lists a joined thread until it removes it.
            wait_until("end of the writer's thread", || {
                let threads = std::fs::read_dir("/proc/self/task").expect("a directory").flatten();
                let mut names = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
                names.all(|name| name.trim() != "ferrogin-metrics")
            });
        }
    });
}
