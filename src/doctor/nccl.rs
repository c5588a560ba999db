//! NCCL: the variables that decide whether it uses the plugin, its library, and what a program must set.

use super::finding::Finding;
use super::machine::{Machine, variable};
use crate::probe;
use serde_json::Value;

const AREA: &str = "NCCL";
/// The releases that the plugin was tested with.
const OLDEST: i64 = 23_007;
const NEWEST: i64 = 23_203;
/// NCCL's number of the type of EFA plugins.
const EFA_GDA: &str = "5";
/// NCCL tries this number of entries of NCCL_GIN_PLUGIN, of below this number of bytes.
const ENTRIES_MAX: usize = 13;
const ENTRY_BYTES: usize = 255;

pub fn check(machine: &Machine) -> Vec<Finding> {
    let mut findings = variables();
    findings.extend(library(machine));
    findings.extend(programs());
    findings
}

fn problem(what: String, why: &str, cure: &str) -> Finding {
    Finding::problem(AREA, what, why, cure)
}

fn variables() -> Vec<Finding> {
    let mut findings = Vec::new();
    match variable("NCCL_GIN_PLUGIN") {
        None => findings.push(problem(
            "NCCL_GIN_PLUGIN is not set".into(),
            "NCCL then looks for libnccl-gin.so, and not for this plugin",
            "export NCCL_GIN_PLUGIN=/path/to/libnccl-gin-ferrogin.so; programs of the host API do not need it",
        )),
        Some(list) if list.split(',').any(|entry| entry == "none") => findings.push(problem(
            format!("NCCL_GIN_PLUGIN={list} has the entry none"),
            "none switches GIN plugins off",
            "export NCCL_GIN_PLUGIN=/path/to/libnccl-gin-ferrogin.so",
        )),
        Some(list) => {
            let entries: Vec<&str> = list.split(',').collect();
            if entries.len() > ENTRIES_MAX || entries.iter().any(|entry| entry.len() >= ENTRY_BYTES) {
                findings.push(problem(
                    format!(
                        "NCCL_GIN_PLUGIN has {} entries, the longest of {} bytes",
                        entries.len(),
                        entries.iter().map(|entry| entry.len()).max().unwrap_or(0)
                    ),
                    "NCCL reads 13 entries of at most 254 bytes",
                    "name this plugin alone, by a shorter path",
                ));
            }
            if let Some(entry) = entries.iter().find(|entry| entry.contains('/') && !entry.starts_with('/')) {
                findings.push(Finding::warning(
                    AREA,
                    format!("NCCL_GIN_PLUGIN has the relative path {entry}"),
                    "NCCL finds it only in programs that run in this directory",
                    "write the absolute path",
                ));
            }
        }
    }
    if let Some(value) = variable("NCCL_GIN_ENABLE").filter(|value| value.trim() == "0") {
        let why = "NCCL then connects no GIN plugin, although it calls init";
        findings.push(problem(format!("NCCL_GIN_ENABLE={value}"), why, "unset NCCL_GIN_ENABLE, or set it to 1"));
    }
    if let Some(value) = variable("NCCL_GIN_TYPE").filter(|value| !matches!(value.trim(), EFA_GDA | "-1")) {
        let why = "NCCL uses only plugins of that type, and this plugin's type is 5 (EFA_GDA)";
        findings.push(problem(format!("NCCL_GIN_TYPE={value}"), why, "set NCCL_GIN_TYPE=5, or unset it"));
    }
    if let Some(value) = variable("NCCL_CUMEM_ENABLE").filter(|value| value.trim() == "0") {
        let why = "GIN needs windows of cuMem memory, and NCCL offers no GIN without it";
        findings.push(problem(format!("NCCL_CUMEM_ENABLE={value}"), why, "unset NCCL_CUMEM_ENABLE"));
    }
    if let Some(value) = variable("NCCL_WIN_ENABLE").filter(|value| value.trim() == "0") {
        let why = "NCCL registers no windows, and kernels address memory by windows";
        findings.push(problem(format!("NCCL_WIN_ENABLE={value}"), why, "unset NCCL_WIN_ENABLE"));
    }
    if let Some(value) = variable("NCCL_SYM_GIN_KERNELS_ENABLE").filter(|value| value.trim() != "0") {
        findings.push(Finding::warning(
            AREA,
            format!("NCCL_SYM_GIN_KERNELS_ENABLE={value}"),
            if emulated() {
                "NCCL's own symmetric kernels cannot post with FERROGIN_SIGNALS=emulated: they fault across hosts"
            } else {
                "NCCL's own symmetric kernels need strong signals, which EFA lacks: ncclCommWindowRegister fails across hosts"
            },
            "set NCCL_SYM_GIN_KERNELS_ENABLE=0",
        ));
    }
    if let Some(value) = variable("NCCL_CROSS_NIC").filter(|value| value.trim() == "0") {
        findings.push(Finding::warning(
            AREA,
            format!("NCCL_CROSS_NIC={value}"),
            "NCCL then offers GIN between ranks of one rail only",
            "unset NCCL_CROSS_NIC for GIN between all ranks",
        ));
    }
    findings
}

/// What the loader finds, which plugins that NCCL looks for, and whether this plugin is among them.
fn library(machine: &Machine) -> Vec<Finding> {
    let probed = probe::start(&["nccl", &machine.nccl], &[], machine.limit);
    if let Some(reason) = probed.failure() {
        let missing = reason.contains("cannot open shared object file") && machine.nccl == "libnccl.so.2";
        let finding = if missing {
            Finding::warning(
                AREA,
                "the dynamic linker finds no libnccl.so.2",
                "a program may bring its own NCCL (PyTorch's wheels do), which this report does not cover",
                "name that library: ferrogin doctor --nccl FILE",
            )
        } else {
            problem(
                format!("{} does not load: {reason}", machine.nccl),
                "a program that needs it would not start",
                "install NCCL 2.30.7 to 2.32.3 for this machine, or name the program's library with --nccl FILE",
            )
        };
        return vec![finding.details(probed.ended.last_errors(8))];
    }
    let number = probed.all("version").next().and_then(Value::as_i64).unwrap_or(0);
    let version = if number < 10_000 {
        format!("{}.{}.{}", number / 1000, number / 100 % 10, number % 100)
    } else {
        format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
    };
    let path = probed.text("path");
    let symbols = probed.all("symbols").next().and_then(Value::as_array);
    let names: Vec<&str> = symbols.into_iter().flatten().filter_map(Value::as_str).collect();
    let mut findings = Vec::new();
    match (symbols.is_some(), names.first()) {
        (true, None) => findings.push(problem(
            format!("NCCL {version} from {path} looks for neither ncclGinPlugin_v14 nor _v13"),
            "it loads no plugin of this kind",
            "install NCCL 2.30.7 to 2.32.3, or name the program's library with --nccl FILE",
        )),
        (true, Some(first)) => {
            findings.push(Finding::ok(AREA, format!("{version} from {path}; it looks for {}", names.join(", then "))));
            if *first != "ncclGinPlugin_v14" {
                findings.push(Finding::warning(
                    AREA,
                    format!("NCCL {version} knows only {first}"),
                    "a v13 plugin cannot tell NCCL that EFA has no strong signals and no VA signals; FERROGIN_SIGNALS=emulated has both",
                    "install NCCL 2.30.7 to 2.32.3",
                ));
            }
        }
        (false, _) => {
            findings.push(Finding::ok(AREA, format!("{version} from {path}; its symbols were not read in time")))
        }
    }
    if !(OLDEST..=NEWEST).contains(&number) && !names.is_empty() {
        findings.push(Finding::warning(
            AREA,
            format!("NCCL {version} is not one of 2.30.7 to 2.32.3"),
            "the plugin was not tested with it; its kernels may use another layout, which the plugin refuses",
            "install NCCL 2.32.3, or a newer ferrogin",
        ));
    }
    findings
}

/// True with FERROGIN_SIGNALS=emulated.
fn emulated() -> bool {
    variable("FERROGIN_SIGNALS").is_some_and(|value| value == "emulated")
}

/// The requirements that a program must change so that NCCL accepts a plugin for EFA. The quoted lines are from NCCL 2.32.
fn programs() -> [Finding; 2] {
    const AREA: &str = "programs";
    let environment = "set in the environment, for windows across hosts: NCCL_SYM_GIN_KERNELS_ENABLE=0";
    if emulated() {
        return [
            Finding::ok(AREA, "FERROGIN_SIGNALS=emulated: kernels are built with ferrogin's headers")
                .why("the plugin then has strong and VA signals, and NCCL's own device code finds no queue and faults"),
            Finding::ok(AREA, environment),
        ];
    }
    [
        Finding::ok(AREA, "set in ncclDevCommRequirements: ginStrongSignalsRequired = false, ginVaSignalsRequired = false").why(
            "EFA has neither, but NCCL's defaults require both and NCCL reports: \"GIN strong signals are required, but the GIN \
             plugin does not support them.\" or \"GIN VA signals are required, but the GIN plugin does not support them.\"",
        ),
        Finding::ok(AREA, environment),
    ]
}
