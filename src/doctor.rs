//! `ferrogin doctor`: reports the parts that this machine has or lacks, and the cures.

use crate::mlx5_cards::Report;
use crate::{gpu, mlx5_cards, probe};
use ferrogin_ffi::settings;
use ferrogin_libfabric::{Libfabric, Version};
use mini_nccl::launch;
use std::path::Path;
use std::process::ExitCode;

/// The first libfabric whose `efa` provider has all operations that kernels need.
const EFA_NEEDS: Version = Version::new(2, 6);

/// Prefixes of other programs' variables that change how the plugin works.
const OTHER_PREFIXES: [&str; 5] = ["NCCL_GIN_", "NCCL_SYM_GIN_", "FI_PROVIDER", "FI_EFA_", "FI_HMEM"];

/// Prints the report. The exit code is 0 if NCCL could use the plugin.
pub fn run() -> ExitCode {
    println!("ferrogin {}", env!("CARGO_PKG_VERSION"));
    libfabrics();
    card("EFA card", "efa");
    card("software card", "softefa");
    for entry in mlx5_cards::report() {
        match entry {
            Report::Line(text) => line("mlx5 card", &text),
            Report::Cure(text) => cure(&text),
        }
    }
    match gpu::list() {
        Ok(names) => names.iter().for_each(|name| line("GPU", name)),
        Err(reason) => {
            line("GPU", &format!("none: {reason}"));
            cure("without a GPU, kernels run on CPU threads with the software card (FERROGIN_DEVICE=cpu, or auto)");
        }
    }
    match launch::find_mpirun() {
        Some(path) => line("mpirun", &path.display().to_string()),
        None => line("mpirun", "none: the built-in launcher starts the ranks of a demo on one host"),
    }
    settings();
    programs();
    verdict()
}

fn line(subject: &str, text: &str) {
    println!("{subject:<15} {text}");
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
        // Hooks wrap other providers and reach no network themselves.
        providers.retain(|name| !name.starts_with("ofi_hook"));
        providers.sort();
        providers.dedup();
        line("  providers", &providers.join(", "));
        if library.version() < EFA_NEEDS {
            cure(&format!(
                "EFA hardware needs libfabric {EFA_NEEDS} or newer: install it and name it in FERROGIN_LIBFABRIC"
            ));
        } else if std::env::var("FI_EFA_USE_HW_CNTR").as_deref() != Ok("1") {
            cure("completion counters in hardware are off in stock libfabric 2.6.0: set FI_EFA_USE_HW_CNTR=1 there");
        }
    }
}

fn card(subject: &str, provider: &str) {
    let found = probe::with_provider(Some(provider));
    if found.usable {
        line(subject, &format!("usable: {}", found.lines.get(1..).unwrap_or_default().join(", ")));
    } else {
        line(subject, "not usable");
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
        if !ours && !OTHER_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        found = true;
        line("setting", &format!("{name}={value}"));
        let known = [&settings::PLUGIN[..], &settings::SOFTWARE_CARD, &settings::TESTS].concat();
        if ours && !known.contains(&name.as_str()) {
            cure("ferrogin has no such setting: check the spelling (README.md lists the settings), or unset it");
        }
        if name == "FI_PROVIDER" {
            cure("FI_PROVIDER also hides the provider of the software card's wire: unset it");
        }
    }
    if !found {
        line("settings", "none: provider efa, device auto");
    }
}

/// The requirements that a program must change so that NCCL accepts a plugin for EFA. The quoted lines are from NCCL 2.32.
fn programs() {
    line("programs", "set in ncclDevCommRequirements: ginStrongSignalsRequired = false, ginVaSignalsRequired = false");
    cure(
        "EFA has neither, but NCCL's defaults require both and NCCL reports: \"GIN strong signals are required, but the GIN plugin does not support them.\"",
    );
    cure("or \"GIN VA signals are required, but the GIN plugin does not support them.\"");
    let kernels = std::env::var("NCCL_SYM_GIN_KERNELS_ENABLE").ok();
    line("", "set in the environment, for windows across hosts: NCCL_SYM_GIN_KERNELS_ENABLE=0");
    if let Some(value) = kernels.filter(|value| value != "0") {
        cure(&format!("NCCL_SYM_GIN_KERNELS_ENABLE={value} makes ncclCommWindowRegister fail across hosts"));
    }
}

/// Reports whether NCCL could use the plugin with the present settings.
fn verdict() -> ExitCode {
    let found = probe::with_provider(None);
    line("plugin", &gpu_scenarios::world::plugin_from_env());
    if found.usable {
        line("", "NCCL could use it with the present settings");
        return ExitCode::SUCCESS;
    }
    line("", "NCCL could not use it with the present settings");
    if let Some(reason) = found.lines.last() {
        cure(reason);
    }
    if std::env::var_os("FERROGIN_PROVIDER").is_none() {
        cure("set FERROGIN_PROVIDER=softefa on a machine without EFA");
    }
    ExitCode::FAILURE
}
