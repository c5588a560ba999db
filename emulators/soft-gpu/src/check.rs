//! What `ferrogin check` needs of this library: launches under its detector of races, and records of what they did.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use gin_check::event::{Event, Log, directory};
use gin_check::race::{Detector, Fault};
use soft_gpu_ptx::{Kernel, Launch, Loaded, Memory, Origin, Program, Statistics, Trap};

use crate::guard::{lock, log};

/// The record of this process, if it is checked.
static LOG: LazyLock<Option<Log>> = LazyLock::new(|| {
    let log_file = Log::create(&directory()?, "gpu");
    log_file.inspect_err(|error| log(format_args!("cannot write the record for `ferrogin check`: {error}"))).ok()
});

/// Whether this process is checked.
pub(crate) fn enabled() -> bool {
    LOG.is_some()
}

/// Records events.
pub(crate) fn record(events: &[Event]) {
    if let Some(file) = &*LOG
        && let Err(error) = file.write(events)
    {
        log(format_args!("cannot write the record for `ferrogin check`: {error}"));
    }
}

/// A program's instructions.
struct Code {
    /// The number of the first place.
    first: u32,
    origins: Vec<Origin>,
    library: Arc<[bool]>,
    functions: Vec<(String, String)>,
    /// Which places have been recorded.
    recorded: Mutex<Vec<bool>>,
}

/// The headers of ferrogin that kernels include.
const HEADERS: [&str; 7] =
    ["gin.cuh", "gin.h", "post.cuh", "fast_path.cuh", "nccl_gin.cuh", "nccl_gin_backend.cuh", "layout.h"];

/// Whether a source file belongs to ferrogin's device code or NCCL's.
fn is_library_file(file: &str) -> bool {
    let (directory, name) = file.rsplit_once('/').unwrap_or(("", file));
    let crates = ["device-kernels/src/", "efa-dp-direct/src/", "ffi-headers/src/"];
    directory.ends_with("ferrogin") && HEADERS.contains(&name)
        || file.contains("/nccl_device/")
        || crates.iter().any(|part| file.contains(part))
}

/// Whether a function belongs to ferrogin's device code.
fn is_library_function(name: &str) -> bool {
    name.starts_with("fgin_")
        || ["ferrogin_device_kernels", "efa_dp_direct", "ferrogin_ffi"].iter().any(|part| name.contains(part))
}

impl Code {
    fn new(program: &Program, first: u32) -> Self {
        let functions: Vec<_> =
            program.functions().map(|(name, module)| (name.to_owned(), module.to_owned())).collect();
        let libraries: Vec<bool> = functions.iter().map(|(name, _)| is_library_function(name)).collect();
        let origins: Vec<Origin> = program.origins().collect();
        let library = origins.iter().map(|origin| {
            libraries[origin.function as usize] || origin.lines.iter().any(|line| is_library_file(&line.file))
        });
        let library = library.collect();
        Self { first, recorded: Mutex::new(vec![false; origins.len()]), origins, library, functions }
    }

    /// Adds the record of a place, unless there is one.
    fn place(&self, site: u32, events: &mut Vec<Event>) -> u32 {
        let place = self.first + site;
        if let (Some(origin), Some(recorded)) =
            (self.origins.get(site as usize), lock(&self.recorded).get_mut(site as usize))
            && !std::mem::replace(recorded, true)
        {
            let (function, module) = &self.functions[origin.function as usize];
            let mut lines: Vec<String> =
                origin.lines.iter().map(|line| format!("{}:{}", line.file, line.line)).collect();
            if lines.is_empty() {
                lines.push(format!("{module}:{}", origin.line));
            }
            let (lines, library) = (lines.join("\n"), self.library[site as usize]);
            events.push(Event::Place { place, function: function.clone(), lines, library });
        }
        place
    }
}

/// The code of each loaded module, by its handle, which no other module gets.
static CODE: LazyLock<Mutex<HashMap<usize, Arc<Code>>>> = LazyLock::new(Mutex::default);

/// Returns a module's code.
fn code(module: usize, program: &Program) -> Arc<Code> {
    let mut known = lock(&CODE);
    let places = known.values().map(|code| code.origins.len() as u32).sum();
    known.entry(module).or_insert_with(|| Arc::new(Code::new(program, places))).clone()
}

/// A launch for the record: its number, and its stream's task.
pub(crate) struct Numbers {
    pub(crate) launch: u64,
    pub(crate) stream: u64,
    pub(crate) task: u64,
    /// The handle of the kernel's module.
    pub(crate) module: usize,
}

/// Runs a kernel, and records what it did.
#[allow(clippy::result_large_err)]
pub(crate) fn run(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &std::sync::atomic::AtomicBool,
    numbers: &Numbers,
) -> Result<Statistics, Trap> {
    let code = code(numbers.module, loaded.program());
    let lenient = std::env::var_os("GIN_CHECK_LENIENT").is_some_and(|value| value == "1");
    let Numbers { launch: number, stream, task, .. } = *numbers;
    record(&[Event::Launch { launch: number, stream, task, kernel: kernel.name.clone() }]);
    let mut detector = Detector::new(code.library.clone(), lenient);
    let result = soft_gpu_ptx::observe(loaded, kernel, launch, memory, stop, &mut detector);
    let mut events = Vec::new();
    for (pair, example) in detector.found() {
        let (first, second) = (code.place(pair.first, &mut events), code.place(pair.second, &mut events));
        let fault = match pair.fault {
            Fault::Race => 0,
            Fault::Unwritten => 8,
            Fault::NoProxyFence => 16,
        };
        let flags = u32::from(pair.writes[0]) | u32::from(pair.writes[1]) << 1 | u32::from(pair.shared) << 2 | fault;
        events.push(Event::Raced {
            launch: number,
            first,
            second,
            flags,
            first_thread: example.first,
            second_thread: example.second,
            address: example.address,
            bytes: example.bytes,
            count: example.count,
        });
    }
    events.push(Event::Ended { launch: number });
    record(&events);
    result
}
