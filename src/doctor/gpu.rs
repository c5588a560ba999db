//! The GPUs, their driver, and dma-buf, through which cards reach GPU memory.

use super::finding::{Finding, Level};
use super::machine::{Machine, variable};
use crate::probe;
use ferrogin_ffi::settings;

pub const AREA: &str = "GPU";

const DRIVER: &str = "GPU driver";

pub fn check(machine: &Machine) -> Vec<Finding> {
    let device = variable("FERROGIN_DEVICE").unwrap_or_else(|| "auto".into());
    let probed = probe::start(&["gpu"], &[], machine.limit);
    let answering = probed.all("driver").next();
    let software = answering.and_then(|driver| driver["software"].as_str());
    let mut findings = match software {
        Some(version) => vec![software_gpu(version)],
        None => driver(machine),
    };
    if let Some(api) = answering.and_then(|driver| driver["api"].as_str()) {
        findings.push(Finding::ok(DRIVER, format!("CUDA driver API {api}")));
    }
    if let Some(reason) = probed.failure() {
        let (what, why) = (format!("none: {reason}"), "NCCL needs a GPU; without one, kernels run on CPU threads");
        let finding = match (&*device, machine.has_software_card()) {
            _ if software.is_some() => {
                let fix = "correct or unset the SOFTGPU_ variable named below; SOFTGPU_DEVICES=0 means a machine without a GPU";
                let finding = Finding::problem(AREA, what, "the software GPU does not start with these settings", fix);
                let level = if device == "cuda" { Level::Problem } else { Level::Warning };
                Finding { level, ..finding }
            }
            ("cuda", _) => {
                let fix = "install the NVIDIA driver, or run the program on the software GPU (`ferrogin gpu -- PROGRAM`), or set \
                            FERROGIN_DEVICE=cpu or auto with FERROGIN_PROVIDER=softefa";
                Finding::problem(AREA, what, "FERROGIN_DEVICE=cuda asks for a GPU", fix)
            }
            (_, true) => {
                let fix = "none is needed for programs without NCCL on the software card; NCCL itself needs a machine with a GPU";
                Finding::warning(AREA, what, why, fix)
            }
            _ => Finding::warning(
                AREA,
                what,
                why,
                "use a machine with a GPU of compute capability 7.0 or newer, and its driver",
            ),
        };
        findings.push(finding.details(probed.ended.last_errors(8)));
        return findings;
    }
    for gpu in probed.all("gpu") {
        let name = gpu["name"].as_str().unwrap_or_default();
        let (major, minor) = (gpu["major"].as_i64().unwrap_or(0), gpu["minor"].as_i64().unwrap_or(0));
        let able = |key: &str| gpu[key].as_bool().unwrap_or(false);
        let yes = |key: &str| if able(key) { "yes" } else { "no" };
        let (vmm, rdma, dma_buf) = (yes("vmm"), yes("rdma_with_vmm"), yes("dma_buf"));
        findings.push(Finding::ok(
            AREA,
            format!("{name}, compute capability {major}.{minor}; VMM {vmm}, GPUDirect RDMA with VMM {rdma}, dma-buf {dma_buf}"),
        ));
        if device == "cpu" {
            continue;
        }
        if major < 7 {
            findings.push(Finding::problem(
                AREA,
                format!("{name} has compute capability {major}.{minor}"),
                "below 7.0, NCCL uses no GIN plugin",
                "use a newer GPU",
            ));
        }
        let reachable = able("vmm") && able("rdma_with_vmm") && able("dma_buf");
        if !machine.has_software_card() && !reachable {
            findings.push(Finding::problem(
                AREA,
                format!("{name}: VMM {vmm}, GPUDirect RDMA with VMM {rdma}, dma-buf {dma_buf}"),
                "cards register GPU memory from cuMemCreate as dma-bufs",
                "install the open kernel modules of the NVIDIA driver, and Linux 5.12 or newer",
            ));
        }
    }
    findings
}

/// Returns the software GPU that takes the driver's place, and its settings.
fn software_gpu(version: &str) -> Finding {
    let set = settings::SOFTWARE_GPU.iter().filter_map(|name| Some(format!("{name}={}", variable(name)?)));
    let set = set.collect::<Vec<_>>().join(", ");
    let set = if set.is_empty() { "its default settings".to_owned() } else { set };
    Finding::ok(DRIVER, format!("ferrogin's software GPU {version}, with {set}"))
        .why("an interpreter runs kernels as PTX: programs behave as on a GPU, but times mean nothing")
}

/// Returns the driver's kernel modules.
fn driver(machine: &Machine) -> Vec<Finding> {
    let Some(text) = machine.read("/proc/driver/nvidia/version") else { return Vec::new() };
    let first = text.lines().next().unwrap_or_default().to_owned();
    let mut findings = vec![Finding::ok(DRIVER, first.trim_start_matches("NVRM version: ").to_owned())];
    if !first.contains("Open Kernel Module") {
        findings.push(Finding::warning(
            DRIVER,
            "the kernel modules are not the open ones",
            "they cannot export dma-bufs, which EFA cards need to register GPU memory",
            "install the open kernel modules (nvidia-open) of the same driver version",
        ));
    }
    findings
}
