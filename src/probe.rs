//! A probe of the plugin: NCCL's calls before `connect`, in a child process with the settings of the environment. A crash of the
//! plugin ends only the child.

use gpu_scenarios::world::plugin_from_env;
use mini_nccl::{Comm, Plugin};
use std::process::{Command, ExitCode, Stdio};

/// The hidden subcommand `probe`: prints the names of the devices, or the error.
pub fn run() -> ExitCode {
    let result = Plugin::find(&plugin_from_env()).and_then(|plugin| {
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

/// The result of a probe.
pub struct Found {
    /// True if NCCL could use the plugin.
    pub usable: bool,
    /// The child's output, without blank lines.
    pub lines: Vec<String>,
}

/// Runs a probe, with `provider` instead of FERROGIN_PROVIDER if there is one.
pub fn with_provider(provider: Option<&str>) -> Found {
    let broken = |text: String| Found { usable: false, lines: vec![text] };
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return broken(format!("the path of this program is unknown: {error}")),
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
                lines.push(format!("the plugin crashed: {}", output.status));
            }
            Found { usable: output.status.success(), lines }
        }
        Err(error) => broken(format!("the probe does not start: {error}")),
    }
}
