//! Bitcode that LLVM 19 and every later release reads, whichever release compiled it.
//!
//! LLVM reads older releases' bitcode, and no newer ones'. So the compiler writes the module as text, the names that
//! LLVM 19 doesn't know are removed from it, and LLVM 19 assembles the rest.

use std::io::Write;
use std::process::{Command, Stdio};

/// LLVM 19's assembler.
pub const ASSEMBLER: &str = "llvm-as-19";

/// Returns `module`, in the text form of LLVM 22, as LLVM 19 reads it. What is removed are hints for optimisers.
pub fn for_llvm_19(module: &str) -> String {
    let mut out = String::with_capacity(module.len());
    for line in module.lines() {
        // Both depend on where the repository is.
        if line.starts_with("; ModuleID") || line.starts_with("source_filename") {
            continue;
        }
        let mut line =
            line.replace(" nocreateundeforpoison", "").replace(" dead_on_return", "").replace(" samesign", "");
        line = line.replace("captures(none)", "nocapture");
        while let Some((before, rest)) = line.split_once(" captures(") {
            let after = rest.split_once(')').map_or("", |(_, after)| after);
            line = format!("{before}{after}");
        }
        // Both had the object's size as their first argument; -1 is an unknown size.
        let size = if line.starts_with("declare") { "i64" } else { "i64 -1" };
        for name in ["@llvm.lifetime.start.p0(", "@llvm.lifetime.end.p0("] {
            line = line.replace(&format!("{name}ptr"), &format!("{name}{size}, ptr"));
        }
        out.push_str(&line);
        out.push('\n');
    }
    out
}

/// Assembles text that [`for_llvm_19`] returned.
///
/// # Errors
/// If the assembler isn't installed, or refuses the text: its first line, and the fix.
pub fn assemble(module: &str) -> Result<Vec<u8>, String> {
    let mut command = Command::new(ASSEMBLER);
    command.args(["-", "-o", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process =
        command.spawn().map_err(|error| format!("{ASSEMBLER}: {error}; install LLVM 19 (apt-get install llvm-19)"))?;
    // The assembler reads everything before it writes.
    let written = process.stdin.take().map_or(Ok(()), |mut input| input.write_all(module.as_bytes()));
    let output = process.wait_with_output().map_err(|error| format!("{ASSEMBLER}: {error}"))?;
    if output.status.success() && written.is_ok() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!(
        "{ASSEMBLER} refuses the module: {}; have for_llvm_19 in device-kernels/ptx/src/bitcode.rs remove what LLVM 19 doesn't know",
        text.lines().next().unwrap_or("it says nothing")
    ))
}
