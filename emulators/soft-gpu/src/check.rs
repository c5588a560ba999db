//! What `ferrogin check` needs of this library: launches under its detector of races, and records of what they did.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use gin_check::event::{Call, Event, Log, directory};
use gin_check::race::{Detector, Pair};
use gin_check::record::{Code, Flushed, Recorder, call_of, is_library_file, is_library_function};
use soft_gpu_ptx::{Kernel, Launch, Loaded, Memory, Origin, Program, SourceLine, Statistics, Trap};

use crate::guard::{lock, log};
use crate::space;

/// The record of this process, if it is checked.
static LOG: LazyLock<Option<Log>> = LazyLock::new(|| Log::create(&directory()?, "gpu").inspect_err(unwritten).ok());
/// Device memory that a card may know.
static EXPORTED: Mutex<Vec<Exported>> = Mutex::new(Vec::new());
/// The instructions of each loaded module, by its handle, which no other module gets.
static MODULES: LazyLock<Mutex<HashMap<usize, Arc<Instructions>>>> = LazyLock::new(Mutex::default);
/// What the process's flushes have seen.
static FLUSHED: Mutex<Flushed> = Mutex::new(Flushed::new());

/// Device memory that a card may know: addresses from and to, and where it is in which file.
#[derive(Clone)]
struct Exported {
    from: u64,
    to: u64,
    inode: u64,
    offset: u64,
}

fn unwritten(error: &std::io::Error) {
    log(format_args!("cannot write the record for `ferrogin check`: {error}"));
}

/// Whether this process is checked.
pub(crate) fn enabled() -> bool {
    LOG.is_some()
}

/// Records events.
fn record(events: &[Event]) {
    if let Some(file) = &*LOG {
        let _ = file.write(events).inspect_err(unwritten);
    }
}

/// Returns the call of the Rust crate that is inlined at an instruction, if its source is where the compiler found it.
fn rust_call(lines: &[SourceLine], texts: &mut HashMap<String, String>) -> Option<Call> {
    let line = lines.iter().rfind(|line| line.file.ends_with("device-kernels/src/context/completion.rs"))?;
    let text =
        texts.entry(line.file.clone()).or_insert_with_key(|file| std::fs::read_to_string(file).unwrap_or_default());
    let before: Vec<&str> = text.lines().take(line.line as usize).collect();
    let name = before.iter().rev().find_map(|line| line.trim_start().strip_prefix("pub fn "))?.split('(').next()?;
    Some(call_of(&format!("fgin_{name}")))
}

/// A module's instructions.
struct Instructions {
    /// The number of the first one's place.
    first: u32,
    origins: Vec<Origin>,
    code: Code,
    /// The name of each function's module.
    modules: Vec<String>,
    /// Which places have been recorded.
    recorded: Mutex<Vec<bool>>,
}

impl Instructions {
    fn new(program: &Program, first: u32) -> Self {
        let functions = program.functions().map(|(name, module)| (name.to_owned(), module.to_owned()));
        let (functions, modules): (Vec<_>, Vec<_>) = functions.unzip();
        let of_library: Vec<bool> = functions.iter().map(|name| is_library_function(name)).collect();
        let origins: Vec<Origin> = program.origins().collect();
        let library = origins.iter().map(|origin| {
            of_library[origin.function as usize] || origin.lines.iter().any(|line| is_library_file(&line.file))
        });
        let library = library.collect();
        // A function of the fast path is a single statement, so its instructions have the same line. A flush posts
        // nothing.
        let is_fast =
            |origin: &Origin| origin.lines.first().is_some_and(|line| line.file.ends_with("ferrogin/fast_path.cuh"));
        let mut texts = HashMap::new();
        let statements = origins.chunk_by(|one, other| one.function == other.function && one.lines == other.lines);
        let inlined = statements.flat_map(|statement| {
            let posts = statement.iter().any(|origin| origin.posts);
            let fast = is_fast(&statement[0]).then_some(if posts { Call::Other } else { Call::Flush });
            let call = fast.or_else(|| rust_call(&statement[0].lines, &mut texts));
            std::iter::repeat_n(call, statement.len())
        });
        let has_lines = origins.iter().map(|origin| !origin.lines.is_empty()).collect();
        let code = Code { library, inlined: inlined.collect(), functions, has_lines };
        Self { first, recorded: Mutex::new(vec![false; origins.len()]), origins, code, modules }
    }

    /// Returns the number of an instruction's place, and adds its record unless there is one.
    fn place(&self, site: u32, events: &mut Vec<Event>) -> u32 {
        let place = self.first + site;
        let (at, mut recorded) = (site as usize, lock(&self.recorded));
        if at < self.origins.len() && !std::mem::replace(&mut recorded[at], true) {
            let origin = &self.origins[at];
            let mut lines: Vec<_> = origin.lines.iter().map(|line| format!("{}:{}", line.file, line.line)).collect();
            if lines.is_empty() {
                lines.push(format!("{}:{}", self.modules[origin.function as usize], origin.line));
            }
            events.push(Event::Place { place, lines });
        }
        place
    }
}

/// Records that a program got a descriptor of device memory, which a card may register.
pub(crate) fn exported(address: u64, bytes: u64, descriptor: BorrowedFd<'_>) {
    if enabled() {
        let inode = nix::sys::stat::fstat(descriptor).map_or(0, |found| found.st_ino);
        let offset = nix::unistd::lseek(descriptor, 0, nix::unistd::Whence::SeekCur).unwrap_or(0) as u64;
        record(&[Event::Memory { address, bytes, inode, offset }]);
        lock(&EXPORTED).push(Exported { from: address, to: address + bytes, inode, offset });
    }
}

/// Whether a card may know the memory at an address: of these ranges, or of the host.
fn shares(ranges: &[Exported], address: u64) -> bool {
    ranges.iter().any(|range| (range.from..range.to).contains(&address))
        || space::find(address).is_some_and(|entry| !entry.on_device())
}

/// Returns the other addresses of exported memory, as of a window among those of its node: from and to, and the address
/// that was exported. `mappings` are those of memory files: address, length and inode.
fn aliases(ranges: &[Exported], mappings: &[(u64, u64, u64)]) -> Vec<(u64, u64, u64)> {
    let mut found = Vec::new();
    for &(start, len, inode) in mappings {
        for range in ranges.iter().filter(|range| range.inode == inode && range.offset < len) {
            let bytes = (range.to - range.from).min(len - range.offset);
            let from = start + range.offset;
            if from != range.from {
                found.push((from, from + bytes, range.from));
            }
        }
    }
    found
}

/// Records that the host reads or writes memory.
pub(crate) fn host(address: u64, bytes: usize, write: bool) {
    if enabled() && shares(&lock(&EXPORTED), address) {
        record(&[Event::HostCopy { write, address, bytes: bytes as u64 }]);
    }
}

/// Records that memory was freed.
pub(crate) fn freed(address: u64, bytes: u64) {
    if enabled() {
        let freed = address..address + bytes;
        lock(&EXPORTED).retain(|range| !freed.contains(&range.from));
        lock(&FLUSHED).retain(|word, _| !freed.contains(word));
        record(&[Event::Freed { address, bytes }]);
    }
}

/// Runs a kernel of a module, as launch `number`, and records what it did.
#[allow(clippy::result_large_err)]
pub(crate) fn run(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &AtomicBool,
    (number, module): (u64, usize),
    mappings: &[(u64, u64, u64)],
) -> Result<Statistics, Trap> {
    let instructions = {
        let mut known = lock(&MODULES);
        let first = known.values().map(|module| module.origins.len() as u32).sum();
        known.entry(module).or_insert_with(|| Arc::new(Instructions::new(loaded.program(), first))).clone()
    };
    let lenient = std::env::var_os("GIN_CHECK_LENIENT").is_some_and(|value| value == "1");
    record(&[Event::Launch { launch: number, kernel: kernel.name.clone() }]);
    let ranges = lock(&EXPORTED).clone();
    let shares = |address| shares(&ranges, address);
    let read = |address| soft_gpu_ptx::read(memory, address);
    let races = Detector::new(instructions.code.library.clone(), lenient);
    let (place, code) = ((number, instructions.first), &instructions.code);
    let mut recorder = Recorder::new(races, place, code, &shares, &read, &FLUSHED);
    recorder.aliases = aliases(&ranges, mappings);
    let result = soft_gpu_ptx::observe(loaded, kernel, launch, memory, stop, &mut recorder);
    let (races, records, sites) = recorder.finish();
    let mut events = Vec::new();
    for site in sites {
        instructions.place(site, &mut events);
    }
    for (pair, &example) in races.found() {
        let (first, second) =
            (instructions.place(pair.first, &mut events), instructions.place(pair.second, &mut events));
        events.push(Event::Raced { launch: number, pair: Pair { first, second, ..*pair }, example });
    }
    if !records.is_empty() {
        // Launches of other ranks overlap with this one, even if it's short, unless they come after its end.
        std::thread::sleep(Duration::from_millis(10));
    }
    events.push(Event::Ended { launch: number });
    if let Some(file) = &*LOG {
        let _ = file.append(&records).inspect_err(unwritten);
    }
    record(&events);
    result
}
