#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| soft_nic::fuzz::rings(data));
