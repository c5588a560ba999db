//! Replays the corpus and seeded bytes, so that every run checks the inputs that a fuzzer found.

use ferrogin_test_support::{Random, child, have_libfabric, repetitions, replay, workspace};

macro_rules! replays {
    ($($test:ident: $corpus:literal, $target:ident;)*) => {
        $(
            #[test]
            fn $test() {
                replay($corpus, super::$target);
            }
        )*
    };
}

replays! {
    rings_of_any_bytes_keep_invariants: "rings", rings;
    wires_of_any_bytes_keep_invariants: "wires", wires;
    settings_of_any_bytes_are_in_range_or_refused: "settings", settings;
    parsed_formats_round_trip: "formats", formats;
    parsed_messages_round_trip: "messages", messages;
    completions_of_any_bytes_keep_invariants: "mlx5_cq", completions;
    requests_of_any_bytes_stay_in_registered_memory: "mlx5_requests", requests;
    images_of_any_bytes_are_loaded_or_refused: "gpu_images", images;
    modules_of_any_bytes_end_in_known_errors: "ptx", module;
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
