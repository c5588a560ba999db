//! Shared parts of the built plugin's tests: its path, child processes, ranks as threads.

mod memory;
pub mod software_gpu_driver;

pub use memory::{device_memory, gpu_memory};

use ferrogin_device::{Action, Context, Flags, Window as DeviceWindow};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::wait::HANG_LIMIT;
use ferrogin_test_support::{child, skip};
use mini_nccl::rma::RmaPlugin;
use mini_nccl::{Bootstrap, Comm, DeviceMemory, GinContext, Plugin, Window};
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const CHILD: &str = "FERROGIN_TEST_CHILD";
/// Names the device for tests in child processes; `cpu` if unset.
pub const DEVICE: &str = "FERROGIN_TEST_DEVICE";
/// Names the provider for tests in child processes; `softefa` if unset.
pub const PROVIDER: &str = "FERROGIN_TEST_PROVIDER";

/// Returns the path of the built plugin. Skips `test` if it or the software card is missing.
pub fn plugin_path(test: &str) -> Option<PathBuf> {
    let plugin = "libnccl-gin-ferrogin.so";
    Some(ferrogin_test_support::dist(test, &[plugin, "libsoftefa-fi.so"])?.join(plugin))
}

/// Returns the directory of the software GPU's libcuda.so.1. Skips `test` if it or the plugin is missing.
pub fn software_gpu(test: &str) -> Option<String> {
    plugin_path(test)?;
    ferrogin_test_support::software_gpu(test)
}

/// Returns an `LD_LIBRARY_PATH` with the software GPU and a libgdrapi.so.2 for it. Skips `test` if something is
/// missing.
pub fn software_gpu_with_gdrcopy(test: &str) -> Option<String> {
    let gpu = software_gpu(test)?;
    let place = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), test);
    std::fs::create_dir_all(&place).expect("a directory");
    let library = place.join("libgdrapi.so.2");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gdrapi.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(library).arg(source).arg("-ldl").status();
    if !built.is_ok_and(|status| status.success()) {
        ferrogin_test_support::skip(test, "cc is missing");
        return None;
    }
    Some(format!("{}:{gpu}", place.display()))
}

/// The libgdrapi.so.2 for tests, which counts as long as this keeps it loaded.
pub struct Gdrcopy(libloading::Library);

#[allow(unsafe_code)]
impl Gdrcopy {
    pub fn load() -> Self {
        // SAFETY: the test's library has no initialisers.
        Self(unsafe { libloading::Library::new("libgdrapi.so.2") }.expect("the test's libgdrapi"))
    }

    /// Returns the number of pins and mappings now, and of all mappings so far.
    pub fn counts(&self) -> [i32; 3] {
        // SAFETY: the test's library defines the function with this type.
        let get = unsafe { self.0.get::<unsafe extern "C" fn(&mut [i32; 3])>(b"gdr_test_counts\0") };
        let mut counts = [0; 3];
        // SAFETY: the function writes the local variable.
        unsafe { get.expect("the test's libgdrapi")(&mut counts) };
        counts
    }
}

/// Returns the path of a second, newer libfabric; `None`, with a line for `test`, if there is none.
pub fn second_libfabric(test: &str) -> Option<String> {
    let path = std::env::var("FERROGIN_LIBFABRIC_ALT").ok();
    if path.is_none() {
        ferrogin_test_support::skip(test, "FERROGIN_LIBFABRIC_ALT names no second libfabric");
    }
    path
}

/// Runs `body` in a child process with `settings` in its environment, because a process chooses its provider and faults
/// only once, and the leak tests count the whole process's resources. `test` is the calling test's name.
pub fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(Arc<Plugin>)) {
    alone_each(test, &[settings.to_vec()], body);
}

/// Like [`alone`], once for each of several settings. In the parent process, returns the lines that the children
/// reported.
pub fn alone_each(test: &str, all: &[Vec<(&str, &str)>], body: impl FnOnce(Arc<Plugin>)) -> Vec<String> {
    in_children(test, all, |path| body(Plugin::load(path).expect("the built plugin loads")))
}

/// Like [`alone_each`], with one version of the RMA plugin's table.
pub fn rma_alone(test: &str, all: &[Vec<(&str, &str)>], version: u32, body: impl FnOnce(Arc<RmaPlugin>)) {
    in_children(test, all, |path| {
        body(RmaPlugin::load_version(path, version).expect("the built plugin loads"));
    });
}

/// Calls `body` with the built plugin's path in a child process for each of several settings.
fn in_children(test: &str, all: &[Vec<(&str, &str)>], body: impl FnOnce(PathBuf)) -> Vec<String> {
    let mut reports = Vec::new();
    let Some(path) = plugin_path(test) else { return reports };
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        body(path);
        return reports;
    }
    for settings in all {
        let mut command = child::command(test);
        let or = |name, usual: &str| std::env::var_os(name).unwrap_or_else(|| usual.into());
        command.env(CHILD, test).env("FERROGIN_PROVIDER", or(PROVIDER, "softefa"));
        command.env("FERROGIN_DEVICE", or(DEVICE, "cpu"));
        command.env("FERROGIN_TIMEOUT", "120").envs(settings.iter().copied());
        let output = command.output().expect("a process for the test");
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        // Without memory for a new thread's own data, glibc ends the process: no plugin can report that.
        if settings.contains(&("LIMIT", "memory")) && text.contains("cannot allocate memory for thread-local data") {
            skip(test, "glibc ended the child process, which had no memory left for a thread's own data");
            continue;
        }
        assert!(output.status.success(), "{test} in a child process, {settings:?}: {}\n{text}", output.status);
        assert!(text.contains("1 passed"), "{test} did not run in the child process:\n{text}");
        // Written directly, so that the test runner doesn't capture the child's reports.
        for (_, line) in text.lines().filter_map(|line| line.split_once(REPORT)) {
            let _ = writeln!(std::io::stdout(), "{test}: {line}");
            reports.push(line.to_owned());
        }
    }
    reports
}

/// A set-up trace for a test in a child process. The parent names the file and removes it.
pub struct TraceFile(PathBuf);

impl TraceFile {
    /// Names a new file for `test`. A killed process with the same id may have left one.
    pub fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferrogin-{test}-{}.json", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }

    /// Returns the setting that selects the file.
    pub fn setting(&self) -> (&'static str, &str) {
        ("FERROGIN_TRACE", self.0.to_str().expect("a path of text"))
    }

    /// Returns all steps so far, in the child process. The file lock keeps out ranks that are appending steps.
    pub fn steps() -> Vec<serde_json::Value> {
        let trace = File::open(std::env::var_os("FERROGIN_TRACE").expect("set")).expect("a trace");
        let trace = Flock::lock(trace, FlockArg::LockShared).expect("a lock");
        let text = std::io::read_to_string(&*trace).expect("text");
        serde_json::from_str(&text).expect("an array of steps")
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The prefix of a line that the parent of a child process prints.
pub const REPORT: &str = "report: ";

/// Returns the configuration of one context, with backendVersion 2.
pub fn config(n_signals: i32, n_counters: i32) -> GinConfigV14 {
    GinConfigV14 {
        n_signals,
        n_counters,
        n_contexts: 1,
        queue_depth: 64,
        traffic_class: -1,
        backend_version: 2,
        rank_stride: 1,
    }
}

/// Allocates memory and registers it as a window.
pub fn window(comm: &Comm, bytes: usize) -> (Arc<DeviceMemory>, Window) {
    let memory = Arc::new(DeviceMemory::alloc(bytes).expect("memory"));
    let window = comm.register(&memory, 0).expect("a window");
    (memory, window)
}

/// Returns a kernel's view of a context.
#[allow(unsafe_code)]
pub fn device(context: &GinContext, id: u32) -> Context<'_> {
    // SAFETY: the result borrows the context, which keeps the handle valid.
    unsafe { Context::from_handle(context.handle(), id) }.expect("a handle of this plugin")
}

/// Sends one value with signal `signal` to the next rank, and receives one from the previous rank.
pub fn pass_round(comm: &Comm, context: &GinContext, id: u32, window: &Window, memory: &DeviceMemory, signal: u16) {
    let (rank, n) = (comm.rank() as u64, comm.nranks() as u64);
    let device = device(context, id);
    let next = ((rank + 1) % n) as u32;
    let before = device.read_signal(signal.into()).expect("a signal");
    comm.barrier().expect("all ranks");
    let target = DeviceWindow(window.gin_handle());
    device.put_value(next, target.at(64), 0x1000 + rank, 8, Action::signal_inc(signal), Flags::NONE).expect("a value");
    device.wait_signal(signal.into(), before + 1).expect("a signal");
    assert_eq!(memory.load(64), 0x1000 + (rank + n - 1) % n);
    device.flush().expect("a flush");
    comm.barrier().expect("all ranks");
}

/// Runs `body` on each rank of an `n`-rank communicator, each in its own thread. Returns the results by rank.
pub fn ranks<T: Send + 'static>(
    plugin: &Arc<Plugin>,
    n: usize,
    body: impl Fn(usize, Comm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let body = Arc::new(body);
    let threads: Vec<_> = Bootstrap::threads(n, HANG_LIMIT)
        .into_iter()
        .enumerate()
        .map(|(rank, bootstrap)| {
            let (plugin, body) = (plugin.clone(), body.clone());
            std::thread::spawn(move || body(rank, Comm::init(&plugin, Arc::new(bootstrap), 0).expect("a communicator")))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("a rank without a panic")).collect()
}
