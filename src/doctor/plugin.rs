//! The plugin and the provider: their files, their versions, and a rank's exchange with itself through both.

use super::elf::{self, Defect};
use super::finding::Finding;
use super::machine::{Machine, variable};
use super::nccl::Route;
use crate::child::End;
use crate::probe::{self, Probed};
use scenario_runner::world::plugin_from_env;
use std::path::{Path, PathBuf};

const PLUGIN: &str = "plugin";
/// The area of the exchange, which proves that the card works if it succeeds.
pub const EXCHANGE: &str = "exchange";
const OWN_NAME: &str = "ferrogin";
const NO_PLUGIN: &str = "NCCL runs without the plugin, or the job fails";
const LINES: usize = 12;
/// The end of the finding for a list without a plugin.
pub const NAMES_NONE: &str = "names no plugin";

/// The variable that names the plugin, and the entries of its list, or this ferrogin's own plugin.
struct Named {
    variable: &'static str,
    is_set: bool,
    entries: Vec<String>,
}

impl Named {
    fn of(route: &Route) -> Self {
        let variable = match route {
            Route::Host(_) if variable("NCCL_RMA_PLUGIN").is_some() => "NCCL_RMA_PLUGIN",
            _ => "NCCL_GIN_PLUGIN",
        };
        let list = self::variable(variable);
        let is_set = list.is_some();
        let list = list.unwrap_or_else(plugin_from_env);
        Self { variable, is_set, entries: list.split(',').map(str::to_owned).collect() }
    }

    fn names_one(&self) -> bool {
        self.entries.iter().any(|entry| !entry.is_empty() && entry != "none")
    }

    /// Returns a defect of an entry's file, and its fix.
    fn defect(&self, entry: &str) -> Option<(String, String)> {
        let Defect { what, fix } =
            Some(entry).filter(|entry| entry.contains('/')).and_then(|path| elf::defect(Path::new(path)))?;
        if !self.is_set {
            return Some((what, fix.to_owned()));
        }
        let variable = self.variable;
        let fix = if Path::new(entry).exists() {
            format!("{fix}; or correct the path in {variable}")
        } else {
            format!("correct the path in {variable}: it is that of libnccl-gin-ferrogin.so")
        };
        Some((format!("{what}; {variable} names it"), fix))
    }
}

pub fn check(machine: &Machine) -> Vec<Finding> {
    let route = Route::of_settings();
    let named = Named::of(&route);
    let mut findings = Vec::new();
    if !named.names_one() {
        let fix = format!("set {} to the path of libnccl-gin-ferrogin.so", named.variable);
        findings.push(Finding::problem(
            PLUGIN,
            format!("{}={} {NAMES_NONE}", named.variable, named.entries.join(",")),
            NO_PLUGIN,
            fix,
        ));
    }
    let defects: Vec<_> = named.entries.iter().map(|entry| named.defect(entry)).collect();
    let is_list = named.entries.len() > 1;
    // NCCL skips an entry that doesn't load.
    let usable = named.names_one() && defects.iter().any(Option::is_none);
    let mut directory: Option<PathBuf> = None;
    for (number, (entry, defect)) in named.entries.iter().zip(defects).enumerate() {
        let of_list = if is_list { format!("entry {} of {}: ", number + 1, named.variable) } else { String::new() };
        match defect {
            Some((what, fix)) if usable => {
                let why = "NCCL skips it, and tries the next entry";
                findings.push(Finding::warning(PLUGIN, format!("{of_list}{what}"), why, fix));
            }
            Some((what, fix)) => findings.push(Finding::problem(PLUGIN, format!("{of_list}{what}"), NO_PLUGIN, fix)),
            None => {
                if is_list {
                    findings.push(Finding::ok(PLUGIN, format!("{of_list}{entry}")));
                }
                if directory.is_none() && entry.contains('/') {
                    directory = Path::new(entry).canonicalize().ok().and_then(|path| Some(path.parent()?.into()));
                }
            }
        }
    }
    if is_list && usable {
        findings.push(
            Finding::ok(PLUGIN, format!("order: {}", named.entries.join(", then ")))
                .why("NCCL uses the first entry that loads and whose init succeeds"),
        );
    }
    let (software, broken) = provider_files(machine, directory.as_deref());
    let blocked = broken && machine.is_software_card();
    findings.extend(software);
    if !usable || blocked {
        return findings;
    }
    if let Route::Host(_) = route {
        let is_usable = |entry: &&String| !entry.is_empty() && named.defect(entry).is_none();
        let entry = named.entries.iter().find(is_usable).map_or("", String::as_str);
        findings.extend(present(machine, &probe::start(&["rma", entry], &[], machine.limit)));
        return findings;
    }
    let other = if machine.is_software_card() { "efa" } else { "softefa" };
    std::thread::scope(|scope| {
        let second = (!broken || other == "efa").then(|| {
            scope.spawn(move || probe::start(&["plugin", "--init"], &[("FERROGIN_PROVIDER", other)], machine.limit))
        });
        findings.extend(present(machine, &probe::start(&["plugin"], &[], machine.limit)));
        if let Some(Ok(second)) = second.map(std::thread::ScopedJoinHandle::join) {
            findings.push(not_selected(other, &second));
        }
    });
    findings
}

/// Finds defects in the files that libfabric loads as providers from the plugin's directory and FI_PROVIDER_PATH. Also
/// returns whether there are any defects.
fn provider_files(machine: &Machine, directory: Option<&Path>) -> (Vec<Finding>, bool) {
    let setting = variable("FI_PROVIDER_PATH").unwrap_or_default();
    let listed = setting.split(':').filter(|dir| !dir.is_empty()).map(|dir| PathBuf::from(dir.trim_start_matches('@')));
    let mut defects = Vec::new();
    for dir in directory.map(Path::to_path_buf).into_iter().chain(listed) {
        let entries =
            std::fs::read_dir(&dir).map(|entries| entries.flatten().map(|entry| entry.path()).collect::<Vec<_>>());
        let is_provider = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("lib") && name.ends_with("-fi.so")
        };
        let mut files: Vec<PathBuf> = entries.unwrap_or_default().into_iter().filter(is_provider).collect();
        files.sort();
        files.dedup();
        defects.extend(files.iter().filter_map(|path| elf::defect(path)));
    }
    if let Some(dir) = directory
        && machine.is_software_card()
        && !dir.join("libsoftefa-fi.so").exists()
        && !setting.split(':').any(|dir| Path::new(dir).join("libsoftefa-fi.so").exists())
    {
        let what = format!("{} is missing", dir.join("libsoftefa-fi.so").display());
        defects.push(Defect { what, fix: "put libsoftefa-fi.so next to the plugin, both from one release" });
    }
    let broken = !defects.is_empty();
    let why = "libfabric loads each provider of this directory; a broken file crashes the program, or makes it hang";
    let findings = defects.into_iter().map(|Defect { what, fix }| {
        if machine.is_software_card() {
            Finding::problem("provider", what, why, fix)
        } else {
            // With EFA cards, libfabric does not look in the plugin's directory.
            Finding::warning("provider", what, why, fix)
        }
    });
    (findings.collect(), broken)
}

/// Returns the areas of findings that may only follow from another problem: of libfabric, of a setting, of a limit.
pub fn may_follow(area: &str) -> bool {
    [EXCHANGE, "EFA card", "software card", "card"].contains(&area)
}

fn card_area(provider: &str) -> &'static str {
    match provider {
        "efa" => "EFA card",
        "softefa" => "software card",
        _ => "card",
    }
}

/// Returns the findings from the probe with the current settings.
fn present(machine: &Machine, probed: &Probed) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(plugin) = probed.all("plugin").next() {
        let text = |key: &str| plugin[key].as_str().unwrap_or_default();
        let path = probed.all("file").next().and_then(|file| file.as_str()).unwrap_or(text("path"));
        let version = plugin_version(probed);
        let shown = version.as_ref().map_or(String::new(), |version| format!(" {version}"));
        findings.push(Finding::ok(PLUGIN, format!("{}{shown} ({}) from {path}", text("name"), text("abi"))));
        if text("name") != OWN_NAME {
            findings.push(Finding::problem(
                PLUGIN,
                format!("NCCL_GIN_PLUGIN selects the plugin {}, not {OWN_NAME}", text("name")),
                "NCCL would use that plugin instead",
                "put libnccl-gin-ferrogin.so first in NCCL_GIN_PLUGIN",
            ));
        }
        findings.extend(mismatch("the plugin", version.as_deref()));
    }
    let provider =
        probed.texts("provider").into_iter().find_map(|entry| entry.strip_prefix("softefa ").map(str::to_owned));
    if machine.is_software_card() {
        // libfabric reports two of a version's three numbers.
        let own: Vec<&str> = env!("CARGO_PKG_VERSION").splitn(3, '.').collect();
        let own = own[..2].join(".");
        if let Some(version) = provider.filter(|version| *version != own) {
            findings.extend(mismatch("the software card (libsoftefa-fi.so)", Some(&version)));
        }
    }
    let cards = probed.texts("card").join(", ");
    if !cards.is_empty() {
        let kind = if machine.verbs.is_some() && machine.provider == "efa" { ", software below verbs" } else { "" };
        findings.push(Finding::ok(card_area(&machine.provider), format!("usable: {cards}{kind}")));
    }
    let errors = probed.ended.last_errors(LINES);
    match probed.failure() {
        Some(reason) => findings.push(failed(machine, probed, reason, &cards).details(errors)),
        None if probed.text("exchanged") == "gpu" => findings.extend(beside_gpu(machine)),
        None if probed.text("exchanged") == "rma" => findings.push(
            Finding::ok(EXCHANGE, "a put with a signal arrived through the RMA plugin, one rank with itself")
                .details(errors),
        ),
        None => findings.push(
            Finding::ok(
                EXCHANGE,
                "a put with a signal and a counter, a value with a signal and a get arrived, one rank with itself",
            )
            .details(errors),
        ),
    }
    findings
}

/// Returns the version from the INFO line of the plugin's `init`.
fn plugin_version(probed: &Probed) -> Option<String> {
    probed.texts("info").iter().find_map(|line| {
        let (_, rest) = line.split_once("ferrogin ").filter(|(_, rest)| rest.contains(": provider "))?;
        // The RMA plugin's line goes on after the version.
        rest.split([':', ' ']).next().map(str::to_owned)
    })
}

fn mismatch(subject: &str, version: Option<&str>) -> Option<Finding> {
    let own = env!("CARGO_PKG_VERSION");
    version.filter(|version| *version != own).map(|version| {
        Finding::warning(
            "version",
            format!("{subject} is version {version}, but this tool is {own}"),
            "releases are tested as a whole, and kernels refuse handles of another layout",
            "install plugin, software card and tool from one release",
        )
    })
}

/// Returns the finding for a failed probe.
fn failed(machine: &Machine, probed: &Probed, reason: String, cards: &str) -> Finding {
    let opened = probed.all("opened").next().is_some();
    let (area, why) = match (opened, cards.is_empty()) {
        (true, _) => (EXCHANGE, "queues can be opened, but a kernel's operations do not work"),
        (false, false) => (EXCHANGE, "init succeeds but a later call fails, and NCCL then ends the job"),
        (false, true) => (card_area(&machine.provider), NO_PLUGIN),
    };
    let what = if cards.is_empty() { format!("not usable: {reason}") } else { reason.clone() };
    let software = std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with("SOFTEFA_"));
    let fix = match &probed.ended.end {
        End::TimedOut(_) => {
            "the lines below are what the libraries printed; check the files next to the plugin and in \
             FI_PROVIDER_PATH, and raise --timeout on a machine that starts slowly"
        }
        End::Crashed(_) => {
            "the lines below are what the libraries printed; check the files next to the plugin and in FI_PROVIDER_PATH"
        }
        _ if probed.all("plugin").next().is_none() => {
            "check the spelling of NCCL_GIN_PLUGIN: it is the path of libnccl-gin-ferrogin.so, or ferrogin where the directory of that file is \
             in LD_LIBRARY_PATH"
        }
        _ if machine.has_software_card() && software && cards.is_empty() => {
            "correct or unset the SOFTEFA_ variable named below"
        }
        _ if variable("FI_PROVIDER").is_some() => "unset FI_PROVIDER: it hides providers that the plugin needs",
        _ if opened && variable("SOFTEFA_FAULTS").is_some() && machine.has_software_card() => {
            "unset SOFTEFA_FAULTS: its faults are active"
        }
        _ if variable("FERROGIN_PROVIDER").is_none() => {
            "the message names it; on a machine without EFA cards set FERROGIN_PROVIDER=softefa"
        }
        _ => "the message names it; docs/troubleshooting.md lists the messages with their fixes",
    };
    Finding::problem(area, what, why, fix)
}

/// If kernels run on a GPU, runs the exchange in a second child with kernels on the CPU.
fn beside_gpu(machine: &Machine) -> Vec<Finding> {
    let probed = probe::start(&["plugin"], &[("FERROGIN_DEVICE", "cpu")], machine.limit);
    let errors = probed.ended.last_errors(LINES);
    let opened = Finding::ok(
        EXCHANGE,
        "a window, and a context with a signal and a counter, were opened for kernels on the GPU",
    );
    let exchange = match probed.failure() {
        None => Finding::warning(
            EXCHANGE,
            "an exchange of one rank with itself worked with kernels on the CPU; no GPU kernel was tried",
            "posts from a GPU reach the card differently: its doorbell is mapped into the GPU",
            "run `ferrogin demo` with these settings: its kernels run on the GPU and check what arrives",
        ),
        Some(reason) => Finding::problem(
            EXCHANGE,
            format!("with kernels on the CPU: {reason}"),
            "the card's queues can be opened, but operations do not work",
            "the message names it; docs/troubleshooting.md lists the messages with their fixes",
        ),
    };
    vec![opened, exchange.details(errors)]
}

/// Returns the finding for the provider that is not selected.
fn not_selected(provider: &str, probed: &Probed) -> Finding {
    let what = match probed.failure() {
        None => format!("usable, not selected: {}", probed.texts("card").join(", ")),
        Some(reason) => format!("not usable, not selected: {reason}"),
    };
    Finding::ok(card_area(provider), what)
}
