//! The device code as PTX, for kernels that Triton, Numba, CuTe, nvJitLink or the CUDA driver link.

use crate::stdout;
use std::process::ExitCode;

/// The module: the functions of `ferrogin/gin.h`.
pub const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/ferrogin_device.ptx"));
/// The PTX's origin: compiled with the tool, or checked in, with the reason.
const ORIGIN: &str = env!("FERROGIN_PTX_ORIGIN");

/// Prints the module, or its origin with `about`.
pub fn run(about: bool) -> ExitCode {
    let written = if about {
        let lines: Vec<&str> = PTX.lines().take_while(|line| line.starts_with("// ")).collect();
        stdout::print(format_args!("{}\n{ORIGIN}\n", lines.join("\n").replace("// ", "")))
    } else {
        stdout::print(PTX)
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferrogin ptx: {error}");
            ExitCode::FAILURE
        }
    }
}
