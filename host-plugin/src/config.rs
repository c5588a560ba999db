//! Settings from the environment. Each `init` reads them, so a process can change them between communicators.

use ferrogin_ffi::settings;
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// The libfabric provider that drives the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// AWS EFA hardware.
    Efa,
    /// The software card, whose library is next to the plugin.
    SoftEfa,
    /// TCP, for the RMA plugin.
    Tcp,
    /// InfiniBand or RoCE, for the RMA plugin.
    Verbs,
}

impl Provider {
    /// Returns libfabric's name for the provider.
    pub fn name(self) -> &'static str {
        match self {
            Self::Efa => "efa",
            Self::SoftEfa => "softefa",
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
        }
    }
}

/// FERROGIN_DEVICE: the processor that runs kernels, and whose memory is device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if the machine has one; see [`crate::device::open`].
    Auto,
    /// A GPU.
    Cuda,
    /// Host memory and CPU threads.
    Cpu,
}

/// The posting policy: how a kernel's threads share an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// One thread rings the doorbell for all ready requests.
    Combining,
    /// Each post runs under a lock.
    Locked,
}

impl Policy {
    /// Returns the value for FERROGIN_POST.
    pub fn name(self) -> &'static str {
        match self {
            Self::Combining => "combining",
            Self::Locked => "locked",
        }
    }
}

/// FERROGIN_SIGNALS: the kind of signals that all contexts use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signals {
    /// The card's counters.
    Card,
    /// Words in memory that the [signal proxy](crate::signal_proxy) adds to.
    Emulated,
}

/// FERROGIN_ON_PEER_FAILURE: what a lost rank ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerFailure {
    /// All contexts with it.
    Abort,
    /// Only the requests to it.
    Isolate,
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
    /// FERROGIN_SIGNALS.
    pub signals: Signals,
    /// FERROGIN_ON_PEER_FAILURE.
    pub on_peer_failure: PeerFailure,
    /// FERROGIN_TIMEOUT: the limit for each wait for a peer during set-up.
    pub timeout: Duration,
    /// FERROGIN_WAIT_TIMEOUT: the limit for one wait of a kernel in the host API's contexts; zero means no limit.
    pub wait_timeout: Duration,
    /// FERROGIN_TRACE: the file for the set-up trace.
    pub trace: Option<PathBuf>,
    /// FERROGIN_METRICS: the file for metrics; may contain `{pid}` and `{rank}`.
    pub metrics: Option<String>,
    /// FERROGIN_METRICS_INTERVAL: the time between writes of the file.
    pub metrics_interval: Duration,
    /// Variables that begin with FERROGIN_ but aren't settings of the plugin or the host API: misspelt, or another
    /// program's.
    pub unknown: Vec<String>,
}

/// A variable has an invalid value.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value} is not valid: set it to {allowed}, or unset it for the default {default}")]
pub struct ConfigError {
    /// The variable.
    variable: &'static str,
    /// Its value, lossily converted to text.
    value: String,
    /// The valid values.
    allowed: &'static str,
    /// The default.
    default: String,
}

/// The largest FERROGIN_TIMEOUT and FERROGIN_WAIT_TIMEOUT in seconds: a day.
const TIMEOUT_MAX: u64 = 86_400;
/// The largest FERROGIN_METRICS_INTERVAL in seconds. A counter wraps at 2^31: 35 million requests per second on one
/// queue.
const METRICS_INTERVAL_MAX: u64 = 60;

impl Config {
    /// Reads the process environment.
    pub fn from_env() -> Result<Self, ConfigError> {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        let known = [&settings::PLUGIN[..], &settings::HOST_API].concat();
        let unknown = names.filter(|name| name.starts_with("FERROGIN_") && !known.contains(&&**name));
        Ok(Self { unknown: unknown.collect(), ..Self::from_lookup(|name| std::env::var_os(name))? })
    }

    /// Reads the settings through `lookup`. An empty value counts as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let provider = choice(get, "FERROGIN_PROVIDER", "efa, softefa, tcp or verbs", &PROVIDERS)?;
        let device = choice(get, "FERROGIN_DEVICE", "auto, cuda or cpu", &DEVICES)?;
        let policy = choice(get, "FERROGIN_POST", "combining or locked", &POLICIES)?;
        let signals = choice(get, "FERROGIN_SIGNALS", "card or emulated", &SIGNALS)?;
        let on_peer_failure = choice(get, "FERROGIN_ON_PEER_FAILURE", "abort or isolate", &PEER_FAILURES)?;
        let timeout = seconds(get, "FERROGIN_TIMEOUT", 1..=TIMEOUT_MAX, "whole seconds from 1 to 86400", 60)?;
        let waits = "whole seconds from 1 to 86400, or 0 for no limit";
        let wait_timeout = seconds(get, "FERROGIN_WAIT_TIMEOUT", 0..=TIMEOUT_MAX, waits, 60)?;
        let intervals = "whole seconds from 1 to 60";
        let interval = seconds(get, "FERROGIN_METRICS_INTERVAL", 1..=METRICS_INTERVAL_MAX, intervals, 5)?;
        let text = |name: &'static str, allowed, default| match get(name).map(OsString::into_string).transpose() {
            Ok(text) => Ok(text),
            Err(value) => Err(error(name, value, allowed, default)),
        };
        Ok(Self {
            provider,
            device,
            policy,
            signals,
            on_peer_failure,
            timeout,
            wait_timeout,
            trace: get("FERROGIN_TRACE").map(PathBuf::from),
            metrics: text("FERROGIN_METRICS", "a path in UTF-8", "of no file")?,
            metrics_interval: interval,
            unknown: Vec::new(),
        })
    }
}

/// Values of the settings with a fixed choice; the first is the default.
const PROVIDERS: [(&str, Provider); 4] =
    [("efa", Provider::Efa), ("softefa", Provider::SoftEfa), ("tcp", Provider::Tcp), ("verbs", Provider::Verbs)];
const DEVICES: [(&str, DeviceChoice); 3] =
    [("auto", DeviceChoice::Auto), ("cuda", DeviceChoice::Cuda), ("cpu", DeviceChoice::Cpu)];
const POLICIES: [(&str, Policy); 2] = [("combining", Policy::Combining), ("locked", Policy::Locked)];
const PEER_FAILURES: [(&str, PeerFailure); 2] = [("abort", PeerFailure::Abort), ("isolate", PeerFailure::Isolate)];
const SIGNALS: [(&str, Signals); 2] = [("card", Signals::Card), ("emulated", Signals::Emulated)];

fn choice<T: Copy>(
    get: impl Fn(&str) -> Option<OsString>,
    variable: &'static str,
    allowed: &'static str,
    table: &'static [(&'static str, T)],
) -> Result<T, ConfigError> {
    let Some(value) = get(variable) else { return Ok(table[0].1) };
    let found = table.iter().find(|(name, _)| value.to_str() == Some(name));
    found.map(|(_, choice)| *choice).ok_or_else(|| error(variable, value, allowed, table[0].0))
}

/// Reads a number of seconds in `valid`, or returns the default.
fn seconds(
    get: impl Fn(&str) -> Option<OsString>,
    variable: &'static str,
    valid: RangeInclusive<u64>,
    allowed: &'static str,
    default: u64,
) -> Result<Duration, ConfigError> {
    let Some(value) = get(variable) else { return Ok(Duration::from_secs(default)) };
    let number = value.to_str().and_then(|text| text.parse::<u64>().ok()).filter(|number| valid.contains(number));
    number.map(Duration::from_secs).ok_or_else(|| error(variable, value, allowed, default))
}

fn error(variable: &'static str, value: OsString, allowed: &'static str, default: impl ToString) -> ConfigError {
    ConfigError { variable, value: value.to_string_lossy().into_owned(), allowed, default: default.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_lookup(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn defaults_select_hardware() {
        let config = read(&[]).unwrap();
        assert_eq!(config.provider, Provider::Efa);
        assert_eq!(config.device, DeviceChoice::Auto);
        assert_eq!(config.policy, Policy::Combining);
        assert_eq!((config.signals, config.on_peer_failure), (Signals::Card, PeerFailure::Abort));
        assert_eq!(config.timeout, Duration::from_secs(60));
        assert_eq!(config.wait_timeout, Duration::from_secs(60));
        assert_eq!((config.trace, config.metrics), (None, None));
        assert_eq!(config.metrics_interval, Duration::from_secs(5));
        assert_eq!(read(&[("FERROGIN_PROVIDER", "")]).unwrap().provider, Provider::Efa);
    }

    /// The plugin warns about other variables with the prefix.
    #[test]
    fn every_setting_that_is_read_is_known() {
        let read = std::cell::RefCell::new(Vec::new());
        Config::from_lookup(|name| {
            read.borrow_mut().push(name.to_owned());
            None
        })
        .unwrap();
        let read = read.into_inner();
        assert!(read.len() >= 8, "{read:?}");
        let known = |name: &&str| settings::PLUGIN.contains(name) || settings::HOST_API.contains(name);
        assert!(read.iter().all(|name| known(&&**name)), "{read:?}");
    }

    #[test]
    fn valid_values_are_read() {
        let config = read(&[
            ("FERROGIN_PROVIDER", "softefa"),
            ("FERROGIN_DEVICE", "cpu"),
            ("FERROGIN_POST", "locked"),
            ("FERROGIN_SIGNALS", "emulated"),
            ("FERROGIN_ON_PEER_FAILURE", "isolate"),
            ("FERROGIN_TIMEOUT", "3"),
            ("FERROGIN_WAIT_TIMEOUT", "0"),
            ("FERROGIN_TRACE", "trace.json"),
            ("FERROGIN_METRICS", "/run/{rank}.prom"),
            ("FERROGIN_METRICS_INTERVAL", "60"),
        ])
        .unwrap();
        assert_eq!(config.provider, Provider::SoftEfa);
        assert_eq!(config.device, DeviceChoice::Cpu);
        assert_eq!(config.policy, Policy::Locked);
        assert_eq!((config.signals, config.on_peer_failure), (Signals::Emulated, PeerFailure::Isolate));
        assert_eq!((config.timeout, config.wait_timeout), (Duration::from_secs(3), Duration::ZERO));
        assert_eq!(config.trace, Some(PathBuf::from("trace.json")));
        assert_eq!(config.metrics.as_deref(), Some("/run/{rank}.prom"));
        assert_eq!(config.metrics_interval, Duration::from_secs(60));
        assert_eq!(read(&[("FERROGIN_DEVICE", "cuda")]).unwrap().device, DeviceChoice::Cuda);
    }

    #[test]
    fn invalid_value_error_names_variable_value_and_fix() {
        for (variable, value, hint) in [
            ("FERROGIN_PROVIDER", "EFA", "softefa"),
            ("FERROGIN_DEVICE", "gpu", "cuda"),
            ("FERROGIN_POST", "lock", "locked"),
            ("FERROGIN_SIGNALS", "strong", "card or emulated"),
            ("FERROGIN_ON_PEER_FAILURE", "mask", "abort or isolate, or unset it for the default abort"),
            ("FERROGIN_TIMEOUT", "0", "seconds"),
            ("FERROGIN_TIMEOUT", "-1", "seconds"),
            ("FERROGIN_TIMEOUT", "1e3", "seconds"),
            ("FERROGIN_TIMEOUT", "86401", "seconds"),
            ("FERROGIN_WAIT_TIMEOUT", "-1", "or 0 for no limit"),
            ("FERROGIN_METRICS_INTERVAL", "0", "from 1 to 60, or unset it for the default 5"),
            ("FERROGIN_METRICS_INTERVAL", "61", "seconds"),
            ("FERROGIN_METRICS_INTERVAL", "0.5", "whole seconds"),
        ] {
            let text = read(&[(variable, value)]).unwrap_err().to_string();
            assert!(text.contains(variable) && text.contains(value) && text.contains(hint), "{text}");
        }
    }
}
