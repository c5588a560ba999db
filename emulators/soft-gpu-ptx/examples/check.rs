//! Parses and links PTX files: `cargo run -p soft-gpu-ptx --example check FILE...`. Reports the first unsupported form
//! with its line.

use soft_gpu_ptx::{Module, Program};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut modules = Vec::new();
    for file in std::env::args().skip(1) {
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) => {
                eprintln!("{file} cannot be read: {error}");
                return ExitCode::FAILURE;
            }
        };
        match Module::parse(&file, &text) {
            Ok(module) => {
                println!("{file}: {} instructions", module.instructions());
                modules.push(module);
            }
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    match Program::link(modules) {
        Ok(program) => {
            for kernel in program.kernels() {
                println!("kernel {kernel}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
