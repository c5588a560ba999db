//! A fuzz target's corpus, and seeded bytes.

use super::{Random, workspace};

/// Seeded inputs per target, unless FERROGIN_FUZZ_INPUTS sets another number.
const INPUTS: u64 = 300;

/// Runs `target` on each file in `tests/fuzz/corpus/NAME`, then on mixtures of those files, and on seeded bytes.
///
/// # Panics
/// If the corpus has no files, or `target` panics.
pub fn replay(name: &str, target: impl Fn(&[u8])) {
    let dir = workspace().join("tests/fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&dir).expect("the corpus").map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", dir.display());
    let files: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).expect("a readable file")).collect();
    files.iter().for_each(|file| target(file));
    let inputs = std::env::var("FERROGIN_FUZZ_INPUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(INPUTS);
    let mut random = Random::new(inputs ^ name.len() as u64);
    let mut bytes = Vec::new();
    for n in 0..inputs {
        bytes.clear();
        if n % 2 == 0 {
            // The tails of two files, with a few bytes changed.
            for _ in 0..2 {
                let known = &files[random.below(files.len() as u32) as usize];
                let from = random.below(known.len() as u32 + 1) as usize;
                bytes.extend_from_slice(&known[from..]);
            }
            for _ in 0..random.below(6) {
                let at = random.below(bytes.len() as u32) as usize;
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.next_u32() as u8;
                }
            }
        } else {
            let len = random.below(600) as usize;
            bytes.resize_with(len, || random.next_u32() as u8);
        }
        target(&bytes);
    }
}
