//! The GPUs, their driver, and dma-buf, by which cards reach their memory.

use super::finding::Finding;
use super::{Machine, variable};
use crate::probe;

const AREA: &str = "GPU";

pub fn check(machine: &Machine) -> Vec<Finding> {
    let mut findings = driver(machine);
    let device = variable("FERROGIN_DEVICE").unwrap_or_else(|| "auto".into());
    let probed = probe::start(&["gpu"], &[], machine.limit);
    if let Some(reason) = probed.failure() {
        let (what, why) = (format!("none: {reason}"), "NCCL needs a GPU; without one, kernels run on CPU threads");
        let finding = match (&*device, machine.has_software_card()) {
            ("cuda", _) => {
                let cure =
                    "install the NVIDIA driver, or set FERROGIN_DEVICE=cpu or auto with FERROGIN_PROVIDER=softefa";
                Finding::problem(AREA, what, "FERROGIN_DEVICE=cuda asks for a GPU", cure)
            }
            (_, true) => {
                let cure = "none is needed for programs without NCCL on the software card; NCCL itself needs a machine with a GPU";
                Finding::warning(AREA, what, why, cure)
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
                "NCCL uses no GIN plugin below 7.0",
                "use a newer GPU",
            ));
        }
        let reachable = able("vmm") && able("rdma_with_vmm") && able("dma_buf");
        if !machine.has_software_card() && !reachable {
            findings.push(Finding::problem(
                AREA,
                format!("{name}: VMM {vmm}, GPUDirect RDMA with VMM {rdma}, dma-buf {dma_buf}"),
                "cards register GPU memory of cuMemCreate as dma-bufs",
                "install the open kernel modules of the NVIDIA driver, and Linux 5.12 or newer",
            ));
        }
    }
    findings
}

/// The kernel's part of the driver.
fn driver(machine: &Machine) -> Vec<Finding> {
    let Some(text) = machine.read("/proc/driver/nvidia/version") else { return Vec::new() };
    let first = text.lines().next().unwrap_or_default().to_owned();
    let mut findings = vec![Finding::ok("GPU driver", first.trim_start_matches("NVRM version: ").to_owned())];
    if !first.contains("Open Kernel Module") {
        findings.push(Finding::warning(
            "GPU driver",
            "the kernel modules are not the open ones",
            "they export no dma-buf, by which EFA cards register GPU memory",
            "install the open kernel modules (nvidia-open) of the same driver version",
        ));
    }
    findings
}
