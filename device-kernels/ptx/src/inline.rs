//! Turns functions of the PTX module into a CUDA C++ header of inline assembly.
//!
//! Calling a linked function costs a kernel its register budget and about a hundred instructions for the ABI. The fast
//! path is short and calls no function, so a kernel can have its instructions instead: the text of the function's body
//! in a scope of its own, with moves for its parameters and results, which are 64-bit words.

use std::fmt::Write;

/// Path of the header, relative to the repository.
pub const HEADER: &str = "ffi-headers/include/ferrogin/fast_path.cuh";
/// Prefix of the functions that go into the header.
const PREFIX: &str = "fgin_fast_";

/// Returns the fast-path functions in `ptx` as a header.
pub fn header(ptx: &str) -> Result<String, String> {
    let mut text = String::from(
        "// ferrogin: the fast path of the device code as inline PTX. Written by `cargo xtask ptx`: do not edit.\n\
         //\n\
         // SPDX-License-Identifier: Apache-2.0\n\
         #ifndef FERROGIN_FAST_PATH_CUH\n#define FERROGIN_FAST_PATH_CUH\n\n#include <stdint.h>\n",
    );
    let mut functions = 0;
    for function in ptx.split("\n.visible .func ").skip(1) {
        let name = function.split_once(") ").and_then(|(_, rest)| rest.split('(').next()).unwrap_or_default();
        if name.starts_with(PREFIX) {
            let end = function.find("\n}\n").ok_or_else(|| format!("{name} has no end"))?;
            text.push_str(&inline(name, &function[..end]).map_err(|why| format!("{name} cannot be inlined: {why}"))?);
            functions += 1;
        }
    }
    if functions == 0 {
        return Err(format!("no function begins with {PREFIX}"));
    }
    text.push_str("\n#endif  // FERROGIN_FAST_PATH_CUH\n");
    Ok(text)
}

/// Converts one function, from its result to the end of its body.
fn inline(name: &str, function: &str) -> Result<String, String> {
    let (head, body) = function.split_once("\n{\n").ok_or("no body")?;
    let parameter = format!("{name}_param_");
    let bits: Vec<u32> = head
        .lines()
        .filter(|line| line.contains(&parameter))
        .map(|line| match line.trim().split(' ').nth(1) {
            Some(".b64") => Ok(64),
            Some(".b32") => Ok(32),
            other => Err(format!("a parameter of type {other:?}")),
        })
        .collect::<Result<_, _>>()?;
    let bytes = head.split_once("func_retval0[").and_then(|(_, rest)| rest.split(']').next()?.parse::<usize>().ok());
    let word = head.contains(".b64 func_retval0)").then_some(8);
    let results = bytes.or(word).ok_or("its result is neither an array nor a word")? / 8;
    if let Some(found) = [".local", "call", ".branchtargets"].into_iter().find(|word| body.contains(word)) {
        return Err(format!("it has {found}"));
    }

    let mut arguments: Vec<String> = (0..results).map(|i| format!("uint64_t& r{i}")).collect();
    arguments.extend(bits.iter().enumerate().map(|(i, bits)| format!("uint{bits}_t p{i}")));
    let outputs: Vec<String> = (0..results).map(|i| format!("\"=&l\"(r{i})")).collect();
    let constraint = |bits: u32| if bits == 64 { "l" } else { "r" };
    let inputs: Vec<String> =
        bits.iter().enumerate().map(|(i, &bits)| format!("\"{}\"(p{i})", constraint(bits))).collect();

    let mut lines = vec!["{".to_string()];
    for line in body.lines() {
        let line = with_own_names(line.split("//").next().unwrap_or_default());
        if line.is_empty() {
            continue;
        }
        lines.push(if line == "ret;" {
            "bra.uni fgin_done;".to_string()
        } else if line.starts_with("ld.param") {
            let (target, source) = line.rsplit_once(' ').ok_or("a strange ld.param")?;
            let number = source.strip_prefix(&format!("[{parameter}")).and_then(|rest| rest.strip_suffix("];"));
            let number: usize = number.and_then(|number| number.parse().ok()).ok_or("a strange ld.param")?;
            format!("{} %{};", target.replace("ld.param", "mov"), results + number)
        } else if let Some(rest) = line.strip_prefix("st.param.b64 [func_retval0") {
            let (offset, value) = rest.split_once("], ").ok_or("a strange st.param")?;
            let offset: usize = offset.strip_prefix('+').map_or(Ok(0), str::parse).map_err(|_| "a strange st.param")?;
            format!("mov.b64 %{}, {value}", offset / 8)
        } else if line.contains(".param") || line.starts_with("st.b") || line.starts_with("st.v") {
            return Err(line);
        } else {
            in_global_memory(line)
        });
    }
    lines.extend(["fgin_done:".to_string(), "}".to_string()]);
    let mut text = String::new();
    let mut write = |line: &str| writeln!(text, "{line}").expect("a string takes it");
    write(&format!("\n__device__ __forceinline__ void {name}({}) {{", arguments.join(", ")));
    write("  asm volatile(");
    lines.iter().for_each(|line| write(&format!("    \"{line}\\n\"")));
    write(&format!("    : {}\n    : {}\n    : \"memory\");\n}}", outputs.join(", "), inputs.join(", ")));
    Ok(text)
}

/// Turns a load through a generic pointer into a load from global memory, which holds everything a post reads. After a
/// generic load, every fence has to order shared memory too.
fn in_global_memory(line: String) -> String {
    match line.strip_prefix("ld.") {
        Some(rest) if rest.starts_with('b') || rest.starts_with('v') => format!("ld.global.{rest}"),
        _ => line,
    }
}

/// Renames registers and labels so that they differ from a compiler's, and doubles other percent signs.
fn with_own_names(line: &str) -> String {
    let mut out = String::new();
    let line = line.replace("$L__", "fgin_L");
    let mut rest = line.as_str();
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let stem = rest[..end].trim_end_matches(|c: char| c.is_ascii_digit());
        out.push_str(if matches!(stem, "p" | "rs" | "r" | "rd") { "fgin_" } else { "%%" });
    }
    out.push_str(rest);
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}
