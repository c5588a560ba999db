//! Settings, all from the environment. Read at every `init`, so that a process may change them between communicators.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Which libfabric provider drives the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// AWS EFA hardware.
    Efa,
    /// The software card, found beside the plugin.
    SoftEfa,
}

impl Provider {
    /// libfabric's name of the provider.
    pub fn name(self) -> &'static str {
        match self {
            Self::Efa => "efa",
            Self::SoftEfa => "softefa",
        }
    }
}

/// Where kernels run and device memory lies, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if there is one; see [`crate::device::open`].
    Auto,
    /// A GPU.
    Cuda,
    /// Host memory and CPU threads.
    Cpu,
}

/// How kernels share an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// One poster rings for all that is ready.
    Combining,
    /// The whole post under a lock.
    Locked,
}

/// All settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// FERROGIN_PROVIDER.
    pub provider: Provider,
    /// FERROGIN_DEVICE.
    pub device: DeviceChoice,
    /// FERROGIN_POST.
    pub policy: Policy,
    /// FERROGIN_CONTROL: libfabric provider that carries set-up's messages, if another than usual; see [`Config::control`].
    pub control: Option<String>,
    /// FERROGIN_TIMEOUT: how long set-up waits for a peer.
    pub timeout: Duration,
    /// FERROGIN_TRACE: file for the set-up trace.
    pub trace: Option<PathBuf>,
    /// Variables that begin as settings do and are none: misspelt ones, or those of another program.
    pub unknown: Vec<String>,
}

/// All settings of the plugin.
pub const SETTINGS: [&str; 7] = [
    "FERROGIN_PROVIDER",
    "FERROGIN_DEVICE",
    "FERROGIN_POST",
    "FERROGIN_TIMEOUT",
    "FERROGIN_CONTROL",
    "FERROGIN_LIBFABRIC",
    "FERROGIN_TRACE",
];

/// A variable has a value that means nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value} is not understood: allowed are {allowed}")]
pub struct ConfigError {
    /// The variable.
    pub variable: &'static str,
    /// Its value, as far as it is text.
    pub value: String,
    /// What it may be.
    pub allowed: &'static str,
}

/// Longest wait that FERROGIN_TIMEOUT may ask for: a day.
const TIMEOUT_MAX: u64 = 86_400;

impl Config {
    /// The libfabric provider that carries set-up's messages: the card's own on hardware, tcp beside the software card, whose
    /// faults are for kernels' traffic.
    pub fn control(&self) -> &str {
        match (&self.control, self.provider) {
            (Some(provider), _) => provider,
            (None, Provider::Efa) => "efa",
            (None, Provider::SoftEfa) => "tcp",
        }
    }

    /// Reads the process environment.
    pub fn from_env() -> Result<Self, ConfigError> {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        let unknown = names.filter(|name| name.starts_with("FERROGIN_") && !SETTINGS.contains(&&**name)).collect();
        Ok(Self { unknown, ..Self::from_lookup(|name| std::env::var_os(name))? })
    }

    /// Reads settings through `lookup`. An empty value counts as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        let get = |name| lookup(name).filter(|value| !value.is_empty());
        let choice = |variable, allowed, default, table: &[(&str, usize)]| match get(variable) {
            None => Ok(default),
            Some(value) => table
                .iter()
                .find(|(name, _)| value.to_str() == Some(name))
                .map(|(_, index)| *index)
                .ok_or_else(|| error(variable, value, allowed)),
        };
        let provider = choice("FERROGIN_PROVIDER", "efa, softefa", 0, &[("efa", 0), ("softefa", 1)])?;
        let device = choice("FERROGIN_DEVICE", "auto, cuda, cpu", 0, &[("auto", 0), ("cuda", 1), ("cpu", 2)])?;
        let policy = choice("FERROGIN_POST", "combining, locked", 0, &[("combining", 0), ("locked", 1)])?;
        let timeout = match get("FERROGIN_TIMEOUT") {
            None => 60,
            Some(value) => value
                .to_str()
                .and_then(|text| text.parse::<u64>().ok())
                .filter(|seconds| (1..=TIMEOUT_MAX).contains(seconds))
                .ok_or_else(|| error("FERROGIN_TIMEOUT", value, "whole seconds from 1 to 86400"))?,
        };
        Ok(Self {
            provider: [Provider::Efa, Provider::SoftEfa][provider],
            device: [DeviceChoice::Auto, DeviceChoice::Cuda, DeviceChoice::Cpu][device],
            policy: [Policy::Combining, Policy::Locked][policy],
            control: match get("FERROGIN_CONTROL").map(OsString::into_string).transpose() {
                Ok(control) => control,
                Err(value) => return Err(error("FERROGIN_CONTROL", value, "names of libfabric providers")),
            },
            timeout: Duration::from_secs(timeout),
            trace: get("FERROGIN_TRACE").map(PathBuf::from),
            unknown: Vec::new(),
        })
    }
}

fn error(variable: &'static str, value: OsString, allowed: &'static str) -> ConfigError {
    ConfigError { variable, value: value.to_string_lossy().into_owned(), allowed }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_lookup(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn defaults_are_hardware() {
        let config = read(&[]).unwrap();
        assert_eq!(config.provider, Provider::Efa);
        assert_eq!(config.device, DeviceChoice::Auto);
        assert_eq!(config.policy, Policy::Combining);
        assert_eq!(config.timeout, Duration::from_secs(60));
        assert_eq!(config.trace, None);
        assert_eq!(read(&[("FERROGIN_PROVIDER", "")]).unwrap().provider, Provider::Efa);
    }

    #[test]
    fn every_value_is_read() {
        let config = read(&[
            ("FERROGIN_PROVIDER", "softefa"),
            ("FERROGIN_DEVICE", "cpu"),
            ("FERROGIN_POST", "locked"),
            ("FERROGIN_TIMEOUT", "3"),
            ("FERROGIN_TRACE", "trace.json"),
        ])
        .unwrap();
        assert_eq!(config.provider, Provider::SoftEfa);
        assert_eq!(config.device, DeviceChoice::Cpu);
        assert_eq!(config.policy, Policy::Locked);
        assert_eq!(config.timeout, Duration::from_secs(3));
        assert_eq!(config.trace, Some(PathBuf::from("trace.json")));
        assert_eq!(read(&[("FERROGIN_DEVICE", "cuda")]).unwrap().device, DeviceChoice::Cuda);
    }

    #[test]
    fn unknown_values_name_variable_value_and_cure() {
        for (variable, value, hint) in [
            ("FERROGIN_PROVIDER", "EFA", "softefa"),
            ("FERROGIN_DEVICE", "gpu", "cuda"),
            ("FERROGIN_POST", "lock", "locked"),
            ("FERROGIN_TIMEOUT", "0", "seconds"),
            ("FERROGIN_TIMEOUT", "-1", "seconds"),
            ("FERROGIN_TIMEOUT", "1e3", "seconds"),
            ("FERROGIN_TIMEOUT", "86401", "seconds"),
        ] {
            let text = read(&[(variable, value)]).unwrap_err().to_string();
            assert!(text.contains(variable) && text.contains(value) && text.contains(hint), "{text}");
        }
    }
}
