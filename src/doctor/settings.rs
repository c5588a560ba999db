//! Environment variables: ferrogin's own, and those of libfabric that change how the plugin works.
//!
//! Only known variables' values are printed: a report may leave the machine, and another variable may hold a secret.

use super::finding::{Finding, Level};
use super::machine::{Machine, variable};
use ferrogin_ffi::settings;

pub const AREA: &str = "setting";

/// The variables whose values go into a report. A prefix is not enough: a variable with a secret may begin with NCCL_
/// or FI_.
pub const VARIABLES: [&str; 56] = [
    "FERROGIN_DEVICE",
    "FERROGIN_DIST",
    "FERROGIN_LIBFABRIC",
    "FERROGIN_NRANKS",
    "FERROGIN_POST",
    "FERROGIN_PROVIDER",
    "FERROGIN_RANK",
    "FERROGIN_SIGNALS",
    "FERROGIN_TIMEOUT",
    "FERROGIN_TRACE",
    "FERROGIN_WAIT_TIMEOUT",
    "FI_EFA_ENABLE_SHM_TRANSFER",
    "FI_EFA_FORK_SAFE",
    "FI_EFA_IFACE",
    "FI_EFA_RX_SIZE",
    "FI_EFA_TX_SIZE",
    "FI_EFA_USE_DEVICE_RDMA",
    "FI_EFA_USE_HUGE_PAGE",
    "FI_EFA_USE_HW_CNTR",
    "FI_HMEM",
    "FI_HMEM_P2P_DISABLED",
    "FI_LOG_LEVEL",
    "FI_LOG_PROV",
    "FI_MR_CACHE_MAX_COUNT",
    "FI_MR_CACHE_MAX_SIZE",
    "FI_MR_CACHE_MONITOR",
    "FI_PROVIDER",
    "FI_PROVIDER_PATH",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_GIN_ENABLE",
    "NCCL_GIN_ERROR_QUERY_SEC",
    "NCCL_GIN_NCONNECTIONS",
    "NCCL_GIN_PLUGIN",
    "NCCL_GIN_TYPE",
    "NCCL_NET_PLUGIN",
    "NCCL_RMA_PLUGIN",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SYM_GIN_KERNELS_ENABLE",
    "NCCL_WIN_ENABLE",
    "SOFTEFA_FAULTS",
    "SOFTEFA_IFADDR",
    "SOFTEFA_NICS",
    "SOFTEFA_TRACE",
    "SOFTEFA_WIRE",
    "SOFTGPU_CAPABILITY",
    "SOFTGPU_CHECK_POSTS",
    "SOFTGPU_CPU_ACCESS",
    "SOFTGPU_DEVICES",
    "SOFTGPU_MEMORY",
    "SOFTGPU_MEMORY_BYTES",
    "SOFTGPU_NAME",
    "SOFTGPU_SEED",
    "SOFTGPU_WATCHDOG",
];

pub fn check(machine: &Machine) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut all: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .collect();
    all.sort();
    for (name, value) in all {
        if VARIABLES.contains(&&*name) {
            findings.push(Finding::ok(AREA, format!("{name}={value}")));
        } else if settings::all().any(|setting| setting == name) {
            findings.push(Finding::ok(AREA, format!("{name} is set")));
        } else if name.starts_with("FERROGIN_") {
            findings.push(Finding::warning(
                AREA,
                format!("{name} is set, and ferrogin has no such setting"),
                "a misspelt setting does nothing",
                "check the spelling (docs/settings.md lists the settings), or unset it",
            ));
        } else if name.starts_with("SOFTEFA_")
            && !["SOFTEFA_TEST_", "SOFTEFA_FUZZ_"].iter().any(|prefix| name.starts_with(prefix))
        {
            let level = if machine.has_software_card() { Level::Problem } else { Level::Warning };
            let finding = Finding::problem(
                AREA,
                format!("{name} is set, and the software card has no such setting"),
                "the software card refuses to start with a misspelt setting",
                format!("check the spelling (there are {}), or unset it", settings::SOFTWARE_CARD.join(", ")),
            );
            findings.push(Finding { level, ..finding });
        } else if name.starts_with("SOFTGPU_") {
            findings.push(Finding::warning(
                AREA,
                format!("{name} is set, and the software GPU has no such setting"),
                "the software GPU refuses to start with a misspelt setting",
                format!("check the spelling (there are {}), or unset it", settings::SOFTWARE_GPU.join(", ")),
            ));
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok(AREA, "none: provider efa, device auto"));
    }
    findings.extend(effects(machine));
    findings
}

fn effects(machine: &Machine) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut warn = |what: String, why: &str, fix: &str| findings.push(Finding::warning(AREA, what, why, fix));
    let efa = !machine.is_software_card();
    if let Some(value) = variable("SOFTEFA_FAULTS").filter(|_| machine.has_software_card()) {
        warn(
            format!("faults are active: SOFTEFA_FAULTS={value}"),
            "the software card misbehaves on request",
            "unset SOFTEFA_FAULTS for a healthy card",
        );
    }
    if let Some(value) = variable("FI_PROVIDER") {
        let why = "it hides libfabric's other providers";
        warn(format!("FI_PROVIDER={value}"), why, "unset FI_PROVIDER");
    }
    if efa {
        if let Some(value) = variable("FI_EFA_USE_HW_CNTR").filter(|value| value != "1") {
            let why = "it switches off the hardware completion counters that kernels wait on";
            warn(format!("FI_EFA_USE_HW_CNTR={value}"), why, "set FI_EFA_USE_HW_CNTR=1");
        } else if variable("FI_EFA_USE_HW_CNTR").is_none() {
            findings.push(
                Finding::ok(AREA, "FI_EFA_USE_HW_CNTR is not set")
                    .why("stock libfabric 2.6.0 needs FI_EFA_USE_HW_CNTR=1; later releases have hardware counters on"),
            );
        }
    }
    let mut warn = |what: String, why: &str, fix: &str| findings.push(Finding::warning(AREA, what, why, fix));
    for name in ["FI_HMEM_P2P_DISABLED", "FI_HMEM", "FI_HMEM_DISABLE_P2P"] {
        if let Some(value) = variable(name).filter(|value| value != "0") {
            warn(format!("{name}={value}"), "libfabric may then refuse GPU memory", &format!("unset {name}"));
        }
    }
    if let Some(value) = variable("FI_EFA_USE_HUGE_PAGE").filter(|value| efa && value != "0") {
        let why =
            "the plugin then leaves FI_EFA_FORK_SAFE alone, and on Linux before 5.13 a fork can abort the process";
        warn(format!("FI_EFA_USE_HUGE_PAGE={value}"), why, "unset FI_EFA_USE_HUGE_PAGE if the program forks");
    }
    if let Some(value) =
        variable("FI_LOG_LEVEL").filter(|value| matches!(value.to_ascii_lowercase().as_str(), "debug" | "trace"))
    {
        warn(
            format!("FI_LOG_LEVEL={value}"),
            "libfabric then writes a line for each operation",
            "unset FI_LOG_LEVEL for measurements",
        );
    }
    if let Some(value) = variable("FERROGIN_TIMEOUT")
        .and_then(|value| value.parse::<u64>().ok())
        .filter(|seconds| (1..5).contains(seconds))
    {
        warn(
            format!("FERROGIN_TIMEOUT={value}"),
            "set-up of a large job on a busy machine may take longer",
            "set it to 30 or more",
        );
    }
    findings
}
