//! The scenarios by a kernel of NCCL's device API (`kernels/nccl.cu`), which clang compiles here with NCCL's headers: with ferrogin's backend,
//! and with NCCL's own.

use crate::common::must_pass;
use crate::on_gpu::{all_pass, gpu, kernels};
use ferrogin_test_support::{skip, workspace};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The release of the headers.
const RELEASE: &str = "2.32.3";

/// The kernel as PTX, or the reason why it cannot be compiled here.
fn compile(backend: &[&str], name: &str) -> Result<PathBuf, String> {
    let found = |command: &&str| Command::new(command).arg("--version").stdout(Stdio::null()).status().is_ok();
    // The scopes of atomic accesses are newer than clang 19.
    let clang = ["clang-22", "clang"].into_iter().find(found).ok_or("no clang is here (apt-get install clang-22)")?;
    let (root, cache) = (workspace(), workspace().join(".cache"));
    let fetch = Command::new("bash")
        .arg(root.join("tests/foreign/fetch-headers.sh"))
        .arg(RELEASE)
        .arg(&cache)
        .output()
        .map_err(|error| format!("bash: {error}"))?;
    if !fetch.status.success() {
        return Err(format!("no headers of NCCL {RELEASE}: {}", String::from_utf8_lossy(&fetch.stderr).trim()));
    }
    let kernels = root.join("tests/gpu/kernels");
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{name}.ptx"));
    let output = Command::new(clang)
        .current_dir(&root)
        .stdin(Stdio::null())
        .args(["-x", "cuda", "-std=gnu++17", "--cuda-device-only", "-nocudainc", "-nocudalib", "-O2", "-S", "-DNDEBUG"])
        .args(["--cuda-gpu-arch=sm_70", "--cuda-feature=+ptx82", "-DNCCL_OS_LINUX=1", "-DNCCL_GIN_EFA_GDA_ENABLE=1"])
        .args(["-DNCCL_GIN_PROXY_ENABLE=0", "-DNCCL_GIN_GDAKI_ENABLE=0", "-DNCCL_GIN_GPI_ENABLE=0"])
        .args(backend)
        .arg("-include")
        .arg(kernels.join("cuda.h"))
        .arg("-I")
        .arg(kernels.join("nccl"))
        .args(["-I", "ffi-headers/include", "-isystem"])
        .arg(cache.join(format!("nccl-{RELEASE}/include")))
        .arg(kernels.join("nccl.cu"))
        .arg("-o")
        .arg(&to)
        .output()
        .map_err(|error| format!("{clang}: {error}"))?;
    assert!(output.status.success(), "{clang} does not compile nccl.cu: {}", String::from_utf8_lossy(&output.stderr));
    Ok(to)
}

fn module(test: &str, backend: &[&str], name: &str) -> Option<PathBuf> {
    compile(backend, name).map_err(|why| skip(test, why)).ok()
}

#[test]
fn nccl_kernels_pass_with_ferrogin_backend() {
    let name = "nccl_kernels_pass_with_ferrogin_backend";
    let Some(dist) = gpu(name) else { return };
    let Some(module) = module(name, &[], "ferrogin") else { return };
    let module = module.to_string_lossy();
    let unordered = "seed=7,reorder=32,delay_us=0..200,reread=0.2,sq_size=16,max_batch=4";
    for (threads, layout, policy, faults) in
        [("one", "2", "combining", unordered), ("warp", "1", "locked", ""), ("block", "0", "combining", "")]
    {
        let options = ["--api", "cuda", "--gin", &module, "--threads", threads, "--backend-version", layout];
        all_pass(kernels(&dist, 2, &options).env("FERROGIN_POST", policy).env("SOFTEFA_FAULTS", faults));
    }
    let storm = ["--api", "cuda", "--gin", &module, "--lanes", "48", "--only", "value-storm"];
    must_pass(&kernels(&dist, 2, &storm).run().expect("the job starts"));
}

/// NCCL's own backend has no asynchronous flush, raises a signal by one where a kernel adds nothing, and checks no arguments.
#[test]
fn nccl_kernels_pass_with_backend_of_nccl() {
    let name = "nccl_kernels_pass_with_backend_of_nccl";
    let Some(dist) = gpu(name) else { return };
    let Some(module) = module(name, &["-DNCCL_OWN_BACKEND"], "own") else { return };
    let module = module.to_string_lossy();
    let scenarios =
        ["value-poll", "value-signal", "aggregate", "value-sizes", "put-signal", "get", "flush-reuse", "flood"];
    let only =
        scenarios.into_iter().chain(["signal-reset", "all-pairs", "threads", "value-storm", "sharing", "contexts"]);
    let options: Vec<&str> = only.flat_map(|scenario| ["--only", scenario]).collect();
    must_pass(&kernels(&dist, 2, &options).args(["--api", "cuda", "--gin", &module]).run().expect("the job starts"));
}
