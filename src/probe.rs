//! What NCCL does with the plugin before it connects, in a process of its own: the settings are those of the
//! environment, and a crash would be seen.

use mini_nccl::{Comm, Plugin};
use std::process::{Command, ExitCode, Stdio};

/// The plugin's path: NCCL_GIN_PLUGIN, or the one beside this program.
pub fn plugin_path() -> String {
    let named = std::env::var("NCCL_GIN_PLUGIN").ok().filter(|list| !list.is_empty());
    named.unwrap_or_else(|| crate::beside("libnccl-gin-ferrogin.so").to_string_lossy().into_owned())
}

/// The hidden subcommand: names of the devices on standard output, or why there are none.
pub fn run() -> ExitCode {
    let result = Plugin::find(&plugin_path()).and_then(|plugin| {
        println!("{} {:?}", plugin.name(), plugin.abi());
        Comm::probe(&plugin)
    });
    match result {
        Ok(names) => {
            names.iter().for_each(|name| println!("{name}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// What such a process found.
pub struct Found {
    /// NCCL could use the plugin.
    pub usable: bool,
    /// What it said, without blank lines.
    pub lines: Vec<String>,
}

/// Runs it, with another provider than the one in force if one is named.
pub fn with_provider(provider: Option<&str>) -> Found {
    let broken = |text: String| Found { usable: false, lines: vec![text] };
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return broken(format!("cannot find this program: {error}")),
    };
    let mut command = Command::new(program);
    command.arg("probe").env("NCCL_DEBUG", "NONE").stdin(Stdio::null()).stderr(Stdio::null());
    if let Some(provider) = provider {
        command.env("FERROGIN_PROVIDER", provider);
    }
    match command.output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let mut lines: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(String::from).collect();
            if output.status.code().is_none() {
                lines.push(format!("it crashed: {}", output.status));
            }
            Found { usable: output.status.success(), lines }
        }
        Err(error) => broken(format!("cannot be started: {error}")),
    }
}
