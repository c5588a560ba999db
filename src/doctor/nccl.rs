//! NCCL: the variables that decide whether it uses the plugin, its library, and what a program must set.

use super::finding::Finding;
use super::machine::{Machine, variable};
use crate::probe;
use serde_json::Value;

const AREA: &str = "NCCL";
/// The oldest releases that can use the GIN plugin and the RMA plugin, and the newest release that both were tested
/// with.
const OLDEST: i64 = 23_100;
const OLDEST_WITH_RMA: i64 = 23_007;
const NEWEST: i64 = 23_203;
/// NCCL's type number for EFA plugins.
const EFA_GDA: &str = "5";
/// NCCL's type number for its proxy, which calls an RMA plugin.
const PROXY: &str = "2";
/// NCCL tries this many entries of NCCL_GIN_PLUGIN, each shorter than this many bytes.
const ENTRIES_MAX: usize = 13;
const ENTRY_BYTES: usize = 255;
/// The end of the finding for a list that switches plugins off.
pub const NONE: &str = "has the entry none";

pub fn check(machine: &Machine) -> Vec<Finding> {
    let mut findings = variables();
    findings.extend(library(machine));
    findings.push(route());
    findings.extend(programs());
    findings
}

/// Which of the library's two plugins a job uses.
#[derive(Debug, PartialEq, Eq)]
pub enum Route {
    /// The GIN plugin.
    Kernels,
    /// The RMA plugin, because of this setting.
    Host(String),
    /// The GIN plugin if it can be used, otherwise the RMA plugin.
    Either,
}

impl Route {
    pub fn of_settings() -> Self {
        Self::of(variable("NCCL_GIN_TYPE").as_deref(), variable("FERROGIN_PROVIDER").as_deref())
    }

    fn of(gin_type: Option<&str>, provider: Option<&str>) -> Self {
        match (gin_type.map(str::trim), provider) {
            (Some(PROXY), _) => Self::Host(format!("NCCL_GIN_TYPE={PROXY} asks for NCCL's proxy")),
            (_, Some(name @ ("tcp" | "verbs"))) => {
                Self::Host(format!("FERROGIN_PROVIDER={name} has no queues for kernels"))
            }
            (Some(EFA_GDA), _) => Self::Kernels,
            _ => Self::Either,
        }
    }
}

/// Returns which of the two plugins a job uses, and why.
fn route() -> Finding {
    const FIX: &str = "export NCCL_RMA_PLUGIN=/path/to/libnccl-rma-ferrogin.so";
    let list = variable("NCCL_RMA_PLUGIN").unwrap_or_default();
    let first = list.split(',').next().unwrap_or_default().to_owned();
    if first.is_empty() {
        let what = "NCCL_RMA_PLUGIN is not set";
        let why = "NCCL doesn't look for an RMA plugin in the library that NCCL_GIN_PLUGIN names, so its proxy, and its puts and signals by the \
                   host, don't use this one";
        return match Route::of_settings() {
            Route::Host(_) => problem(what.to_owned(), why, FIX),
            Route::Kernels | Route::Either => Finding::warning(AREA, what, why, FIX),
        };
    }
    if !first.contains("ferrogin") {
        return Finding::warning(
            AREA,
            format!("NCCL_RMA_PLUGIN={list} does not begin with this library"),
            "NCCL's proxy, and its puts and signals by the host, use another RMA plugin or NCCL's own",
            FIX,
        );
    }
    let host = "ncclPutSignal, ncclSignal and collectives without SMs always use the RMA plugin";
    let (what, why) = match Route::of_settings() {
        Route::Kernels => ("the GIN plugin: kernels post to the card".to_owned(), format!("NCCL_GIN_TYPE={EFA_GDA}; {host}")),
        Route::Host(why) => ("the RMA plugin: an NCCL thread posts for the kernels".to_owned(), why),
        Route::Either => (
            "the GIN plugin if its init succeeds on all ranks, which needs cards with completion counters; else the RMA plugin".to_owned(),
            format!("NCCL_GIN_TYPE is not set, and NCCL's proxy is its last choice; {host}"),
        ),
    };
    Finding::ok(AREA, format!("device communicators use {what}")).why(&why)
}

fn problem(what: String, why: &str, fix: &str) -> Finding {
    Finding::problem(AREA, what, why, fix)
}

fn variables() -> Vec<Finding> {
    let mut findings = Vec::new();
    match variable("NCCL_GIN_PLUGIN") {
        _ if matches!(Route::of_settings(), Route::Host(_)) => {}
        None => findings.push(problem(
            "NCCL_GIN_PLUGIN is not set".into(),
            "NCCL then looks for libnccl-gin.so instead of this plugin",
            "export NCCL_GIN_PLUGIN=/path/to/libnccl-gin-ferrogin.so; host API programs do not need it",
        )),
        Some(list) if list.split(',').any(|entry| entry == "none") => findings.push(problem(
            format!("NCCL_GIN_PLUGIN={list} {NONE}"),
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
                    "name only this plugin, by a shorter path",
                ));
            }
            if let Some(entry) = entries.iter().find(|entry| entry.contains('/') && !entry.starts_with('/')) {
                findings.push(Finding::warning(
                    AREA,
                    format!("NCCL_GIN_PLUGIN has the relative path {entry}"),
                    "NCCL only finds it in programs that run in this directory",
                    "write the absolute path",
                ));
            }
        }
    }
    if let Some(value) = variable("NCCL_GIN_ENABLE").filter(|value| value.trim() == "0") {
        let why = "NCCL then connects no GIN plugin, although it calls init";
        findings.push(problem(format!("NCCL_GIN_ENABLE={value}"), why, "unset NCCL_GIN_ENABLE, or set it to 1"));
    }
    if let Some(value) = variable("NCCL_GIN_TYPE").filter(|value| !matches!(value.trim(), EFA_GDA | PROXY | "-1")) {
        let why = "NCCL uses only plugins of that type, and this library serves 5 (EFA_GDA) and 2 (the proxy)";
        findings.push(problem(format!("NCCL_GIN_TYPE={value}"), why, "set NCCL_GIN_TYPE=5 or 2, or unset it"));
    }
    if let Some(value) = variable("NCCL_CUMEM_ENABLE").filter(|value| value.trim() == "0") {
        let why = "GIN needs windows in cuMem memory; without it, NCCL offers no GIN";
        findings.push(problem(format!("NCCL_CUMEM_ENABLE={value}"), why, "unset NCCL_CUMEM_ENABLE"));
    }
    if let Some(value) = variable("NCCL_WIN_ENABLE").filter(|value| value.trim() == "0") {
        let why = "NCCL then registers no windows, and kernels address memory through windows";
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
            "NCCL then offers GIN only between ranks on one rail",
            "unset NCCL_CROSS_NIC for GIN between all ranks",
        ));
    }
    findings
}

/// Returns which NCCL the loader finds, which plugins it looks for, and whether this plugin is among them.
fn library(machine: &Machine) -> Vec<Finding> {
    let probed = probe::start(&["nccl", &machine.nccl], &[], machine.limit);
    if let Some(reason) = probed.failure() {
        let missing = reason.contains("cannot open shared object file") && machine.nccl == "libnccl.so.2";
        let finding = if missing {
            Finding::warning(
                AREA,
                "the dynamic linker finds no libnccl.so.2",
                "a program may bundle its own NCCL (PyTorch's wheels do), which this report does not cover",
                "name that library: ferrogin doctor --nccl FILE",
            )
        } else {
            problem(
                format!("{} does not load: {reason}", machine.nccl),
                "a program that needs it would not start",
                "install NCCL 2.31.2 to 2.32.3 for this machine, or name the program's library with --nccl FILE",
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
            "install NCCL 2.31.2 to 2.32.3, or name the program's library with --nccl FILE",
        )),
        (true, Some(first)) => {
            findings.push(Finding::ok(AREA, format!("{version} from {path}; it looks for {}", names.join(", then "))));
            if *first != "ncclGinPlugin_v14" {
                findings.push(Finding::warning(
                    AREA,
                    format!("NCCL {version} knows only {first}"),
                    "a v13 plugin cannot tell NCCL that EFA has no strong signals and no VA signals; FERROGIN_SIGNALS=emulated has both",
                    "install NCCL 2.31.2 to 2.32.3",
                ));
            }
        }
        (false, _) => {
            findings.push(Finding::ok(AREA, format!("{version} from {path}; its symbols were not read in time")))
        }
    }
    if !names.is_empty() && number > NEWEST {
        findings.push(Finding::warning(
            AREA,
            format!("NCCL {version} is newer than 2.32.3"),
            "the plugin was not tested with it; the GIN plugin's init refuses a release whose kernels may use another layout",
            "install NCCL 2.32.3, or a newer ferrogin",
        ));
    }
    if !names.is_empty() && number < OLDEST {
        findings.extend(older(&version, number, &Route::of_settings()));
    }
    findings
}

/// Returns what a release that can't use the GIN plugin means for jobs on this route.
fn older(version: &str, number: i64, route: &Route) -> Option<Finding> {
    let what = format!("NCCL {version} is older than 2.31");
    let why = "it cannot use GIN plugins of type 5 (EFA_GDA), so the GIN plugin's init refuses it";
    let proxy = "install NCCL 2.32.3, or use NCCL's proxy: set NCCL_RMA_PLUGIN to this library, and NCCL_GIN_TYPE=2";
    match route {
        Route::Host(_) if number >= OLDEST_WITH_RMA => None,
        Route::Host(_) => Some(Finding::warning(
            AREA,
            format!("NCCL {version} is older than 2.30.7"),
            "the RMA plugin was not tested with it",
            "install NCCL 2.32.3",
        )),
        Route::Kernels => Some(problem(what, why, proxy)),
        Route::Either => Some(Finding::warning(AREA, what, why, proxy)),
    }
}

/// Returns whether FERROGIN_SIGNALS=emulated is set.
fn emulated() -> bool {
    variable("FERROGIN_SIGNALS").is_some_and(|value| value == "emulated")
}

/// Returns the requirements that a program must change so that NCCL accepts a plugin for EFA. The quoted messages are
/// from NCCL 2.32.
fn programs() -> Vec<Finding> {
    const AREA: &str = "programs";
    if let Route::Host(_) = Route::of_settings() {
        return vec![Finding::ok(AREA, "need no change: NCCL's proxy has strong and VA signals")];
    }
    let environment = "set in the environment, for windows across hosts: NCCL_SYM_GIN_KERNELS_ENABLE=0";
    if emulated() {
        return vec![
            Finding::ok(AREA, "FERROGIN_SIGNALS=emulated: kernels are built with ferrogin's headers")
                .why("the plugin then has strong and VA signals, but NCCL's own device code finds no queue and faults"),
            Finding::ok(AREA, environment),
        ];
    }
    vec![
        Finding::ok(AREA, "set in ncclDevCommRequirements: ginStrongSignalsRequired = false, ginVaSignalsRequired = false").why(
            "EFA has neither, but NCCL's defaults require both and NCCL reports: \"GIN strong signals are required, but the GIN \
             plugin does not support them.\" or \"GIN VA signals are required, but the GIN plugin does not support them.\"",
        ),
        Finding::ok(AREA, environment),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn release_that_cannot_use_the_gin_plugin_is_a_problem_for_kernels_only() {
        let host = || Route::Host(String::new());
        let problem = |number, route| older("V", number, &route).map(|finding| finding.level == Level::Problem);
        assert_eq!([problem(23_007, Route::Kernels), problem(23_007, Route::Either)], [Some(true), Some(false)]);
        assert_eq!([problem(23_007, host()), problem(22_907, host())], [None, Some(false)]);
    }

    #[test]
    fn type_and_provider_choose_the_plugin() {
        let of = Route::of;
        assert_eq!([of(None, None), of(Some("-1"), Some("efa"))], [Route::Either, Route::Either]);
        assert_eq!(of(Some(" 5"), Some("softefa")), Route::Kernels);
        let host = |route, setting| matches!(route, Route::Host(why) if why.starts_with(setting));
        assert!(host(of(Some("2"), Some("efa")), "NCCL_GIN_TYPE=2"));
        assert!(host(of(Some("5"), Some("tcp")), "FERROGIN_PROVIDER=tcp"));
        assert!(host(of(None, Some("verbs")), "FERROGIN_PROVIDER=verbs"));
    }
}
