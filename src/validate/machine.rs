//! A machine's facts, and the environment variables in a report.

use super::archive::Redaction;
use scenario_runner::world::plugin_from_env;
use std::path::Path;

/// The variables whose values go into a report.
pub use crate::doctor::VARIABLES;

/// Returns the listed variables that are set, one per line.
pub fn environment(redaction: &Redaction) -> String {
    let set =
        VARIABLES.iter().filter_map(|name| Some(format!("{name}={}\n", std::env::var_os(name)?.to_string_lossy())));
    redaction.apply(&set.collect::<String>())
}

/// Returns the kernel release, architecture, processors, memory, instance type.
pub fn facts(redaction: &Redaction) -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let line = |file: &str, key: &str| {
        let text = read(file);
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
        value.unwrap_or("unknown").trim().to_owned()
    };
    let processors = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let text = format!(
        "kernel: {}\narchitecture: {}\nprocessors: {processors}, {}\nmemory: {}\nmachine: {}\n",
        read("/proc/sys/kernel/osrelease"),
        std::env::consts::ARCH,
        line("/proc/cpuinfo", "model name"),
        line("/proc/meminfo", "MemTotal"),
        read("/sys/devices/virtual/dmi/id/product_name"),
    );
    redaction.apply(&text)
}

/// Returns the FI_PROVIDER_PATH with which this program finds the software card, which is next to the plugin.
pub fn provider_path() -> String {
    let plugin = plugin_from_env();
    let directory = Path::new(&plugin).parent().unwrap_or(Path::new("."));
    match std::env::var("FI_PROVIDER_PATH") {
        Ok(path) if !path.is_empty() => format!("{}:{path}", directory.display()),
        _ => directory.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documentation_lists_each_variable_of_a_report() {
        let page = include_str!("../../docs/validate.md");
        let list = page
            .split("the values of these variables")
            .nth(1)
            .and_then(|rest| rest.split("```").nth(1))
            .expect("the list");
        let listed: Vec<&str> =
            list.trim_start_matches("text").split([',', '\n']).map(str::trim).filter(|name| !name.is_empty()).collect();
        assert_eq!(listed, VARIABLES);
    }
}
