#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| softefa_fi::fuzz::attributes(data));
