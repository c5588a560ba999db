#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| soft_mlx5::fuzz::completions(data));
