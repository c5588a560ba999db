//! Memory for kernels, and helpers to run them.

use ferrogin_test_support::wait::HANG_LIMIT;
use soft_gpu_ptx::{Launch, Memory, Module, Program, Range, Statistics, Trap, run};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Words shared by kernels and the test.
pub struct Arena {
    words: Vec<AtomicU64>,
    generation: AtomicU64,
    idle: AtomicU64,
    host: fn(&Arena),
    printed: Mutex<String>,
}

// SAFETY: the words live as long as the arena and are atomics, to which references may exist.
unsafe impl Memory for Arena {
    fn generation(&self) -> &AtomicU64 {
        &self.generation
    }

    fn range(&self, address: u64) -> Option<Range> {
        let range = Range { start: self.address(), end: self.address() + 8 * self.words.len() as u64, writable: true };
        (range.start..range.end).contains(&address).then_some(range)
    }

    fn print(&self, text: &str) {
        *self.printed.lock().unwrap() += text;
    }

    fn idle(&self) {
        self.idle.fetch_add(1, Ordering::SeqCst);
        (self.host)(self);
        std::thread::yield_now();
    }
}

impl Arena {
    pub fn new(words: usize) -> Self {
        Self::with_host(words, |_| ())
    }

    /// Makes an arena whose `host` function runs whenever all of a kernel's threads wait for memory to change.
    pub fn with_host(words: usize, host: fn(&Arena)) -> Self {
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            generation: AtomicU64::new(0),
            idle: AtomicU64::new(0),
            host,
            printed: Mutex::default(),
        }
    }

    pub fn address(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    pub fn get(&self, word: usize) -> u64 {
        self.words[word].load(Ordering::SeqCst)
    }

    pub fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, Ordering::SeqCst);
    }

    /// Returns what kernels have printed.
    pub fn printed(&self) -> String {
        self.printed.lock().unwrap().clone()
    }

    /// Returns how often all of a kernel's threads have waited for memory to change.
    pub fn idle_rounds(&self) -> u64 {
        self.idle.load(Ordering::SeqCst)
    }

    pub fn all(&self) -> Vec<u64> {
        (0..self.words.len()).map(|word| self.get(word)).collect()
    }
}

/// Returns the text of a kernel `k` whose register `%out` holds the arena's address.
pub fn kernel(declarations: &str, body: &str) -> String {
    format!(
        ".version 8.2\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u64 k_out)\n{{\n\
         .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .f32 %f<8>; .reg .f64 %g<8>; .reg .b64 %out;\n\
         {declarations}\nld.param.u64 %out, [k_out];\n{body}\nret;\n}}\n"
    )
}

pub fn linked(text: &str) -> Arc<Program> {
    let module = Module::parse("test", text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    Arc::new(Program::link(vec![module]).unwrap_or_else(|error| panic!("{error}")))
}

pub fn launch(arena: &Arena, grid: u32, block: u32, seed: u64) -> Launch {
    let mut launch = Launch::new([grid, 1, 1], [block, 1, 1], arena.address().to_le_bytes().to_vec());
    launch.seed = seed;
    launch.watchdog = Some(HANG_LIMIT);
    launch
}

pub fn start(program: &Arc<Program>, launch: &Launch, arena: &Arena) -> Result<Statistics, Box<Trap>> {
    let loaded = program.clone().load(&[]);
    run(&loaded, program.kernel("k").expect("a kernel k"), launch, arena, &AtomicBool::new(false)).map_err(Box::new)
}

/// Runs `text`'s kernel `k` with one block.
pub fn run_text(text: &str, arena: &Arena, threads: u32) -> Result<Statistics, Box<Trap>> {
    start(&linked(text), &launch(arena, 1, threads, 1), arena)
}
