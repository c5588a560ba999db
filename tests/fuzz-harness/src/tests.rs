//! Replays the corpus and seeded bytes, so that every run checks the inputs that a fuzzer found.

use ferrogin_test_support::{Random, child, have_libfabric, repetitions, replay, workspace};

#[test]
fn rings_of_any_bytes_keep_invariants() {
    replay("rings", super::rings);
}

#[test]
fn wires_of_any_bytes_keep_invariants() {
    replay("wires", super::wires);
}

#[test]
fn settings_of_any_bytes_are_in_range_or_refused() {
    replay("settings", super::settings);
}

#[test]
fn parsed_formats_round_trip() {
    replay("formats", super::formats);
}

#[test]
fn parsed_messages_round_trip() {
    replay("messages", super::messages);
}

#[test]
fn attributes_of_any_values_do_not_panic() {
    let test = "attributes_of_any_values_do_not_panic";
    if have_libfabric(test) {
        child::run(test, &[("SOFTEFA_WIRE", "shm")], || replay("attributes", super::attributes));
    }
}

#[test]
fn verbs_of_any_attributes_do_not_panic() {
    // It sets an environment variable.
    child::run("verbs_of_any_attributes_do_not_panic", &[], || replay("verbs", super::verbs));
}

#[test]
fn completions_of_any_bytes_keep_invariants() {
    replay("mlx5_cq", super::completions);
}

#[test]
fn requests_of_any_bytes_stay_in_registered_memory() {
    replay("mlx5_requests", super::requests);
}

#[test]
fn images_of_any_bytes_are_loaded_or_refused() {
    replay("gpu_images", super::images);
}

#[test]
fn modules_of_any_bytes_end_in_known_errors() {
    replay("ptx", super::module);
}

/// Corpus texts with a few words replaced by others from the corpus. They get further through the parser than bytes do.
#[test]
fn changed_texts_end_in_known_errors() {
    let folder = workspace().join("tests/fuzz/corpus/ptx");
    let mut files: Vec<_> = std::fs::read_dir(folder).expect("the corpus").map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let texts: Vec<String> = files.iter().map(|file| std::fs::read_to_string(file).expect("a text")).collect();
    let words: Vec<&str> = texts.iter().flat_map(|text| text.split_inclusive([' ', ',', '.', '\n'])).collect();
    let mut random = Random::new(7);
    for _ in 0..repetitions("SOFTGPU_TEXTS", 3_000, 300_000) {
        let text = &texts[random.index(texts.len())];
        let mut changed: Vec<&str> = text.split_inclusive([' ', ',', '.', '\n']).collect();
        for _ in 0..1 + random.below(3) {
            let at = random.index(changed.len());
            match random.below(3) {
                0 => changed[at] = random.of(&words),
                1 => changed.insert(at, random.of(&words)),
                _ => drop(changed.remove(at)),
            }
        }
        super::module(changed.concat().as_bytes());
    }
}
