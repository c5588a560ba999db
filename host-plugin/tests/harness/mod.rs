//! What the tests through the built plugin share: finding it, processes of their own, ranks as threads.
#![allow(dead_code)]

use mini_nccl::{Bootstrap, Comm, Plugin};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Long enough for any step that ends.
pub const PATIENCE: Duration = Duration::from_secs(30);
const CHILD: &str = "FERROGIN_TEST_CHILD";

/// The built plugin: in FERROGIN_DIST, or in the workspace's `dist/`. None, aloud, without one.
pub fn plugin_path(test: &str) -> Option<PathBuf> {
    let dist = std::env::var_os("FERROGIN_DIST").map(PathBuf::from);
    let dist = dist.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist"));
    let (plugin, provider) = (dist.join("libnccl-gin-ferrogin.so"), dist.join("libsoftefa-fi.so"));
    if plugin.is_file() && provider.is_file() {
        return Some(plugin);
    }
    let (plugin, provider) = (plugin.display(), provider.display());
    // Past the test runner's capture: a skip must be seen.
    let _ = writeln!(std::io::stdout(), "SKIP {test}: no {plugin} and {provider}; run make build");
    None
}

/// Runs `body` in a process of its own, with `settings` in its environment: faults and providers are chosen once in a
/// process, and leaks are counted of a whole one. `test` is the name of the calling test.
pub fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(Arc<Plugin>)) {
    let Some(path) = plugin_path(test) else { return };
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        body(Plugin::load(path).expect("the built plugin loads"));
        return;
    }
    let mut command = Command::new(std::env::current_exe().expect("this test's program"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, test).env("FERROGIN_PROVIDER", "softefa").env("FERROGIN_DEVICE", "cpu");
    command.env("FERROGIN_TIMEOUT", "20").envs(settings.iter().copied());
    let output = command.output().expect("a process for the test");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{test} in its own process: {}\n{text}", output.status);
    assert!(text.contains("1 passed"), "{test} did run in its own process:\n{text}");
}

/// A communicator of `n` ranks, each in a thread; gives what `body` gives, by rank.
pub fn ranks<T: Send + 'static>(
    plugin: &Arc<Plugin>,
    n: usize,
    body: impl Fn(usize, Comm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let body = Arc::new(body);
    let threads: Vec<_> = Bootstrap::threads(n, PATIENCE)
        .into_iter()
        .enumerate()
        .map(|(rank, bootstrap)| {
            let (plugin, body) = (plugin.clone(), body.clone());
            std::thread::spawn(move || body(rank, Comm::init(&plugin, Arc::new(bootstrap), 0).expect("a communicator")))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("a rank that ends well")).collect()
}
