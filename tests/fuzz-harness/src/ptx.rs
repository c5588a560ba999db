//! Arbitrary bytes as a PTX module.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use soft_gpu_ptx::{Launch, Memory, Module, Program, Range, run};

/// Words that kernels may touch.
struct Words([AtomicU64; 64], AtomicU64);

// SAFETY: the words live as long as this value, and are atomics, so references to them may exist.
unsafe impl Memory for Words {
    fn generation(&self) -> &AtomicU64 {
        &self.1
    }

    fn range(&self, address: u64) -> Option<Range> {
        let start = self.0.as_ptr() as u64;
        let range = Range { start, end: start + 512, writable: true };
        (range.start..range.end).contains(&address).then_some(range)
    }
}

/// Parses the bytes as PTX, with a header added if they lack one, links the module, and runs each kernel briefly.
///
/// # Panics
/// If the interpreter panics, or an error has no cause, or a line beyond the text.
pub fn module(bytes: &[u8]) {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    if !text.starts_with(".version") {
        text.insert_str(0, ".version 8.2\n.target sm_80\n.address_size 64\n");
    }
    let lines = text.split('\n').count() as u32;
    let linked = Module::parse("fuzz", &text).and_then(|module| Program::link(vec![module]));
    let program = match linked {
        Ok(program) => Arc::new(program),
        Err(error) => {
            assert!(error.line <= lines && !error.cause.is_empty(), "{error:?}");
            return;
        }
    };
    let words = Words(std::array::from_fn(|word| AtomicU64::new(word as u64)), AtomicU64::new(0));
    let start = words.0.as_ptr() as u64;
    let loaded = program.clone().load(&vec![start; program.globals().len()]);
    for name in program.kernels() {
        let Some(kernel) = program.kernel(name) else { continue };
        let parameters = std::iter::repeat_n(start.to_le_bytes(), 1 << 13).flatten().collect();
        let mut launch = Launch::new([2, 1, 1], kernel.required_block.unwrap_or([33, 1, 1]), parameters);
        launch.weak = bytes.len().is_multiple_of(2);
        launch.seed = bytes.len() as u64;
        launch.watchdog = Some(Duration::from_millis(5));
        if let Err(trap) = run(&loaded, kernel, &launch, &words, &AtomicBool::new(false)) {
            assert!(trap.line <= lines && !trap.cause.is_empty(), "{trap:?}");
        }
    }
}
