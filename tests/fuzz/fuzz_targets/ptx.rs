#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| soft_gpu_ptx::fuzz::module(data));
