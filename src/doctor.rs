//! `ferrogin doctor`: what is found, what is missing, what to do.

use crate::cards::Said;
use crate::{cards, gpu, probe};
use ferrogin_libfabric::{Libfabric, Version};
use mini_nccl::launch;
use std::path::Path;
use std::process::ExitCode;

/// Since which release the `efa` provider has all the operations that kernels need.
const EFA_NEEDS: Version = Version::new(2, 6);

/// Settings of ferrogin; see README.md.
const KNOWN: [&str; 17] = [
    "FERROGIN_BOOTSTRAP",
    "FERROGIN_CONTROL",
    "FERROGIN_DEVICE",
    "FERROGIN_DIST",
    "FERROGIN_LIBFABRIC",
    "FERROGIN_LIBFABRIC_ALT",
    "FERROGIN_NRANKS",
    "FERROGIN_POST",
    "FERROGIN_PROVIDER",
    "FERROGIN_RANK",
    "FERROGIN_TIMEOUT",
    "FERROGIN_TRACE",
    "FERROGIN_VECTORS",
    "SOFTEFA_FAULTS",
    "SOFTEFA_IFADDR",
    "SOFTEFA_NICS",
    "SOFTEFA_WIRE",
];

/// Beginnings of other programs' settings that decide what happens.
const WATCHED: [&str; 5] = ["NCCL_GIN_", "NCCL_SYM_GIN_", "FI_PROVIDER", "FI_EFA_", "FI_HMEM"];

/// Prints all of it.
pub fn run() -> ExitCode {
    println!("ferrogin {}", env!("CARGO_PKG_VERSION"));
    libfabrics();
    card("EFA card", "efa");
    card("software card", "softefa");
    for said in cards::report() {
        match said {
            Said::Line(text) => line("mlx5 card", &text),
            Said::Cure(text) => cure(&text),
        }
    }
    match gpu::list() {
        Ok(names) => names.iter().for_each(|name| line("GPU", name)),
        Err(why) => {
            line("GPU", &format!("none: {why}"));
            cure("without one, kernels run on CPU threads: FERROGIN_DEVICE=cpu (auto does the same)");
        }
    }
    match launch::find_mpirun() {
        Some(path) => line("mpirun", &path.display().to_string()),
        None => line("mpirun", "none; the built-in launcher serves one host"),
    }
    settings();
    programs();
    verdict()
}

fn line(what: &str, text: &str) {
    println!("{what:<15} {text}");
}

fn cure(text: &str) {
    println!("{:<15} -> {text}", "");
}

fn libfabrics() {
    let other = std::env::var_os("FERROGIN_LIBFABRIC_ALT");
    for path in std::iter::once(None).chain(other.as_deref().map(|path| Some(Path::new(path)))) {
        let library = match Libfabric::load(path) {
            Ok(library) => library,
            Err(error) => {
                line("libfabric", &error.to_string());
                continue;
            }
        };
        line("libfabric", &format!("{} from {}", library.version(), library.path().display()));
        let mut providers: Vec<String> =
            library.providers().into_iter().map(|(name, version)| format!("{name} {version}")).collect();
        // Hooks are wrappers around other providers.
        providers.retain(|name| !name.starts_with("ofi_hook"));
        providers.sort();
        providers.dedup();
        line("  providers", &providers.join(", "));
        if library.version() < EFA_NEEDS {
            cure(&format!("EFA hardware needs {EFA_NEEDS} or newer: name it in FERROGIN_LIBFABRIC"));
        } else if std::env::var("FI_EFA_USE_HW_CNTR").as_deref() != Ok("1") {
            cure("whether it counts completions in hardware shows below; stock 2.6.0 needs FI_EFA_USE_HW_CNTR=1");
        }
    }
}

fn card(what: &str, provider: &str) {
    let found = probe::with_provider(Some(provider));
    if found.usable {
        line(what, &format!("usable: {}", found.lines.get(1..).unwrap_or_default().join(", ")));
    } else {
        line(what, "not usable");
        found.lines.iter().skip(usize::from(found.lines.len() > 1)).for_each(|text| cure(text));
    }
}

fn settings() {
    let mut found = false;
    let mut all: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .collect();
    all.sort();
    for (name, value) in all {
        let ours = name.starts_with("FERROGIN_") || name.starts_with("SOFTEFA_");
        if !ours && !WATCHED.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        found = true;
        line("setting", &format!("{name}={value}"));
        if ours && !KNOWN.contains(&name.as_str()) {
            cure("ferrogin has no such setting");
        }
        if name == "FI_PROVIDER" {
            cure("it hides the provider that carries the software card's wire too: unset it");
        }
    }
    if !found {
        line("settings", "none: provider efa, device auto");
    }
}

/// What programs must set so that NCCL lets them use a plugin for EFA. The quoted lines are NCCL 2.32's.
fn programs() {
    line("programs", "set in ncclDevCommRequirements: ginStrongSignalsRequired = false, ginVaSignalsRequired = false");
    cure(
        "EFA has neither, and NCCL's default asks for both: \"GIN strong signals are required, but the GIN plugin does not support them.\"",
    );
    cure("the same for \"GIN VA signals are required, but the GIN plugin does not support them.\"");
    let kernels = std::env::var("NCCL_SYM_GIN_KERNELS_ENABLE").ok();
    line("", "set in the environment, for windows across hosts: NCCL_SYM_GIN_KERNELS_ENABLE=0");
    if let Some(value) = kernels.filter(|value| value != "0") {
        cure(&format!("NCCL_SYM_GIN_KERNELS_ENABLE={value} makes ncclCommWindowRegister fail across hosts"));
    }
}

/// What NCCL would see with the settings in force.
fn verdict() -> ExitCode {
    let found = probe::with_provider(None);
    line("plugin", &probe::plugin_path());
    if found.usable {
        line("", "NCCL could use it with the settings in force");
        return ExitCode::SUCCESS;
    }
    line("", "NCCL could not use it with the settings in force");
    if let Some(why) = found.lines.last() {
        cure(why);
    }
    if std::env::var_os("FERROGIN_PROVIDER").is_none() {
        cure("on a machine without EFA: FERROGIN_PROVIDER=softefa");
    }
    ExitCode::FAILURE
}
