//! The stand-ins for CUDA's headers (`ferrogin/clang`): clang keeps the memory order and the scope of every atomic
//! operation.

use ferrogin_ptx::kernels;
use ferrogin_test_support::{of_process, skip};
use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const ORDERS: [&str; 5] = ["relaxed", "acquire", "release", "acq_rel", "seq_cst"];
const SCOPES: [(&str, &str); 3] = [("system", "sys"), ("device", "gpu"), ("block", "cta")];
const TYPES: [&str; 2] = ["unsigned", "unsigned long long"];
/// Read-modify-writes: the call, and how PTX names the operation.
const UPDATES: [(&str, &str); 6] = [
    ("fetch_add(1, ORDER)", "add"),
    ("fetch_sub(1, ORDER)", "add"),
    ("fetch_and(7, ORDER)", "and"),
    ("fetch_or(1, ORDER)", "or"),
    ("exchange(1, ORDER)", "exch"),
    ("compare_exchange_strong(expected, 1, ORDER)", "cas"),
];

/// A function of the compiled file: the call that it makes, and what PTX must have.
struct Case {
    name: String,
    call: String,
    /// The instruction's name, such as `atom`, `ld`, `st`.
    opcode: &'static str,
    operation: &'static str,
    order: &'static str,
    scope: &'static str,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (bytes, of) in TYPES.iter().enumerate() {
        for (scope_name, scope) in SCOPES {
            let word = |call: &str, order: &str| {
                let call = call.replace("ORDER", &format!("memory_order_{order}"));
                format!(
                    "{of} expected = 3; (void)expected; return atomic_ref<{of}, thread_scope_{scope_name}>(*p).{call}"
                )
            };
            let mut add = |call: &str, opcode, operation, order: &'static str| {
                let name = format!("f{}_{bytes}", cases.len());
                let statement = match opcode {
                    "st" => word(call, order).replace("return ", "") + "; return 0",
                    _ => word(call, order),
                };
                let function = format!("extern \"C\" __device__ {of} {name}({of}* p) {{ {statement}; }}");
                cases.push(Case { name, call: function, opcode, operation, order, scope });
            };
            for order in ORDERS {
                for (call, operation) in UPDATES {
                    add(call, "atom", operation, order);
                }
            }
            for order in ["relaxed", "acquire", "seq_cst"] {
                add("load(ORDER)", "ld", "", order);
            }
            for order in ["relaxed", "release", "seq_cst"] {
                add("store(1, ORDER)", "st", "", order);
            }
        }
    }
    cases
}

/// The instructions of each function.
fn functions(ptx: &str) -> HashMap<&str, Vec<&str>> {
    let mut functions = HashMap::new();
    for part in ptx.split("\n.visible .func").skip(1) {
        let name = part
            .split(['(', ')', '\n', ','])
            .map(str::trim)
            .find(|word| word.starts_with('f') && word[1..].starts_with(|c: char| c.is_ascii_digit()));
        let body = part.split_once("\n{\n").map_or("", |(_, body)| body);
        let lines = body.lines().map(str::trim).take_while(|line| *line != "}");
        functions.insert(name.expect("a function's name"), lines.filter(|line| !line.contains(".param")).collect());
    }
    functions
}

/// Whether an instruction has the case's order and a scope that isn't narrower; a sequentially consistent one also has
/// a fence before it.
fn is_kept(case: &Case, lines: &[&str]) -> bool {
    let wide = |words: &[&str]| {
        let scopes: &[&str] = match case.scope {
            "sys" => &["sys"],
            "gpu" => &["sys", "gpu"],
            _ => &["sys", "gpu", "cta"],
        };
        scopes.iter().any(|scope| words.contains(scope))
    };
    let words = |line: &str| -> Vec<String> {
        let opcode = line.split([' ', '\t']).next().unwrap_or("").trim_end_matches(';');
        opcode.split('.').map(str::to_owned).collect()
    };
    let all: Vec<Vec<String>> = lines.iter().map(|line| words(line)).collect();
    let Some(at) = all.iter().position(|words| words[0] == case.opcode) else { return false };
    let found: Vec<&str> = all[at].iter().map(String::as_str).collect();
    let orders: &[&str] = match (case.order, case.opcode) {
        ("seq_cst", "ld") => &["acquire"],
        ("seq_cst", "st") => &["relaxed", "release"],
        ("seq_cst", _) => &["acquire", "acq_rel"],
        _ => &[case.order],
    };
    let fenced = all[..at].iter().any(|words| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        words[..words.len().min(2)] == ["fence", "sc"] && wide(&words)
    });
    orders.iter().any(|order| found.contains(order))
        && wide(&found)
        && (case.operation.is_empty() || found.contains(&case.operation))
        && (case.order != "seq_cst" || fenced)
}

#[test]
fn clang_keeps_order_and_scope_of_atomic_operations() {
    let name = "clang_keeps_order_and_scope_of_atomic_operations";
    let Some((clang, version)) = kernels::clang().filter(|(_, version)| major(version) >= 22) else {
        return skip(name, "no clang 22 is here (apt-get install clang-22)");
    };
    let work = of_process(env!("CARGO_TARGET_TMPDIR"), "clang-headers");
    std::fs::create_dir_all(&work).unwrap();
    let cases = cases();
    let mut source = String::from("#include <cuda/atomic>\nusing namespace cuda;\n");
    for case in &cases {
        writeln!(source, "{}", case.call).unwrap();
    }
    std::fs::write(work.join("atomics.cu"), source).unwrap();
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi-headers/include");
    let output = Command::new(clang)
        .args(["-x", "cuda", "-std=c++17", "--cuda-device-only", "--cuda-gpu-arch=sm_90", "--cuda-feature=+ptx86"])
        .args(["-nocudainc", "-nocudalib", "-O2", "-S", "-Wall", "-Werror", "-include", "ferrogin/clang_cuda.h", "-I"])
        .arg(&headers)
        .arg("-I")
        .arg(headers.join("ferrogin/clang"))
        .arg(work.join("atomics.cu"))
        .arg("-o")
        .arg(work.join("atomics.ptx"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{version}: {}", String::from_utf8_lossy(&output.stderr));
    let ptx = std::fs::read_to_string(work.join("atomics.ptx")).unwrap();
    let functions = functions(&ptx);
    for case in &cases {
        let lines = &functions[case.name.as_str()];
        assert!(is_kept(case, lines), "{}\nbecame\n{}", case.call, lines.join("\n"));
    }
}

/// A signal in memory that the kernel uses as another 64-bit type than uint64_t, which a compiler takes for other
/// memory.
const RESET: &str = "#include <ferrogin/nccl_gin.cuh>
extern \"C\" __device__ unsigned long long f0(unsigned long long* word, ncclGinCtx ctx, ncclGinSignalDescriptor signal) {
  *word = 5;
  ncclGinApi_ResetSignal<NCCL_NET_DEVICE_GIN_EFA_GDA>::call(ctx, signal);
  return *word;
}
";

#[test]
#[ignore = "make check"]
fn signal_in_memory_is_read_again_after_its_reset() {
    let work = of_process(env!("CARGO_TARGET_TMPDIR"), "clang-reset");
    std::fs::create_dir_all(&work).unwrap();
    std::fs::write(work.join("reset.cu"), RESET).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/scenario-kernels/clang.sh");
    let output = Command::new(script).args([work.join("reset.cu"), work.join("reset.ptx")]).output().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        return skip("signal_in_memory_is_read_again_after_its_reset", why.trim());
    }
    assert!(output.status.success(), "{why}");
    let ptx = std::fs::read_to_string(work.join("reset.ptx")).unwrap();
    let lines = &functions(&ptx)["f0"];
    let stored = lines.iter().position(|line| line.starts_with("st.volatile")).expect("the reset is a store");
    // Without the read, the register gets the 5 again.
    let constant = lines[stored..].iter().any(|line| line.starts_with("mov.b64") && line.ends_with(" 5;"));
    assert!(!constant, "{}", lines.join("\n"));
}

/// The release of a compiler's line of text.
fn major(version: &str) -> u32 {
    let numbers = version.split_once("version ").map_or(version, |(_, rest)| rest);
    numbers.split('.').next().and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}
