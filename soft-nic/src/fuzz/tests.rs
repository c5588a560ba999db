//! The corpus again, and seeded bytes: what a fuzzer found stays found.

use super::TARGETS;
use crate::random::Random;

/// Inputs of seeded bytes for each target; FERROGIN_FUZZ_INPUTS says another number.
const INPUTS: u64 = 300;

fn replay(name: &str) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&dir).expect("the corpus").map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", dir.display());
    for file in &files {
        target(&std::fs::read(file).unwrap());
    }
    let inputs = std::env::var("FERROGIN_FUZZ_INPUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(INPUTS);
    let mut random = Random::seeded(inputs ^ name.len() as u64);
    let mut bytes = Vec::new();
    for n in 0..inputs {
        // Every other is a mixture of two known ones.
        bytes.clear();
        if n % 2 == 0 {
            for _ in 0..2 {
                let file = &files[random.below(files.len() as u64) as usize];
                let known = std::fs::read(file).unwrap();
                let from = random.below(known.len() as u64 + 1) as usize;
                bytes.extend_from_slice(&known[from..]);
            }
            for _ in 0..random.below(6) {
                let at = random.below(bytes.len() as u64) as usize;
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.next() as u8;
                }
            }
        } else {
            let len = random.below(600) as usize;
            bytes.resize_with(len, || random.next() as u8);
        }
        target(&bytes);
    }
}

#[test]
fn rings() {
    replay("rings");
}

#[test]
fn wires() {
    replay("wires");
}

#[test]
fn settings() {
    replay("settings");
}

#[test]
fn formats() {
    replay("formats");
}

#[test]
fn attributes() {
    if super::provider::is_missing() {
        println!("SKIP attributes: libfabric.so.1 is not installed");
        return;
    }
    replay("attributes");
}
