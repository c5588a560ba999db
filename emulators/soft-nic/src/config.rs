//! The software cards' settings, from the environment: their number, wire and faults.

use std::net::Ipv4Addr;
use std::path::PathBuf;

pub use crate::config_error::ConfigError;
use crate::fault::Faults;

/// How packets travel between cards.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum WireChoice {
    /// Shared memory to cards on the same host, tcp to others.
    #[default]
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP only.
    Tcp,
}

/// A card's place on the PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciAddress {
    /// Domain, or segment.
    pub domain: u16,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
}

impl PciAddress {
    /// Parses the form that sysfs and lspci use: `0000:00:1e.0`, in hexadecimal.
    fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let number = |part: &str, digits, end: u32| {
            let is_number = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            u32::from_str_radix(part, 16).ok().filter(|number| is_number && *number < end)
        };
        Some(Self {
            domain: number(domain, 4, 1 << 16)? as u16,
            bus: number(bus, 2, 1 << 8)? as u8,
            device: number(device, 2, 1 << 5)? as u8,
            function: number(function, 1, 1 << 3)? as u8,
        })
    }
}

/// Settings of this process's cards.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// Number of software cards (rails): `SOFTEFA_NICS`, default 1.
    pub nics: u32,
    /// The cards' PCI addresses, if `SOFTEFA_NICS` lists them.
    pub pci: Vec<PciAddress>,
    /// `SOFTEFA_WIRE`.
    pub wire: WireChoice,
    /// `SOFTEFA_IFADDR`: the address under which other hosts reach this one.
    pub ifaddr: Option<Ipv4Addr>,
    /// `SOFTEFA_FAULTS`.
    pub faults: Faults,
    /// `SOFTEFA_TRACE`: the file for the cards' trace.
    pub trace: Option<PathBuf>,
}

/// The variables, without the prefix `SOFTEFA_`.
const VARIABLES: [&str; 5] = ["NICS", "WIRE", "IFADDR", "FAULTS", "TRACE"];
/// Prefixes of variables that tests use, without the prefix `SOFTEFA_`.
const OF_TESTS: [&str; 2] = ["TEST_", "FUZZ_"];

/// Maximum number of cards per process. A larger number is a typo.
pub const MAX_NICS: u32 = 64;

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    /// A value is invalid. None is guessed: a test that misspells a fault must not pass without the fault.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::refuse_unknown(
            std::env::vars_os()
                .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())),
        )?;
        Self::from_lookup(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// Refuses unknown variables, because a misspelt variable would do nothing.
    fn refuse_unknown(variables: impl Iterator<Item = (String, String)>) -> Result<(), ConfigError> {
        for (name, value) in variables {
            let ours = name.strip_prefix("SOFTEFA_");
            if ours.is_some_and(|rest| !VARIABLES.contains(&rest) && !OF_TESTS.iter().any(|t| rest.starts_with(t))) {
                let problem =
                    format!("there is no such variable; the variables are SOFTEFA_{}", VARIABLES.join(", SOFTEFA_"));
                return Err(ConfigError::new(name, &value, problem));
            }
        }
        Ok(())
    }

    /// Reads the settings that `lookup` returns by name.
    ///
    /// # Errors
    /// A setting is invalid, or contradicts another one.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let set = |name: &'static str| lookup(name).filter(|v| !v.is_empty());
        let mut config = Self { nics: 1, ..Self::default() };
        if let Some(value) = set("SOFTEFA_NICS") {
            let pci: Option<Vec<_>> = value.split(',').map(|part| PciAddress::parse(part.trim())).collect();
            config.pci = pci.unwrap_or_default();
            let distinct = config.pci.iter().enumerate().all(|(n, address)| !config.pci[..n].contains(address));
            let count = if config.pci.is_empty() { value.parse().ok() } else { u32::try_from(config.pci.len()).ok() };
            config.nics = match count {
                Some(n) if (1..=MAX_NICS).contains(&n) && distinct => n,
                _ => {
                    let problem = format!(
                        "must be a number of software cards from 1 to {MAX_NICS}, or a list of their PCI addresses, \
                         like 0000:00:1e.0,0000:00:1f.0"
                    );
                    return Err(ConfigError::new("SOFTEFA_NICS", &value, problem));
                }
            };
        }
        if let Some(value) = set("SOFTEFA_WIRE") {
            config.wire = match value.as_str() {
                "shm" => WireChoice::Shm,
                "tcp" => WireChoice::Tcp,
                _ => {
                    let problem = "must be shm or tcp";
                    return Err(ConfigError::new("SOFTEFA_WIRE", &value, problem));
                }
            };
        }
        if let Some(value) = set("SOFTEFA_IFADDR") {
            config.ifaddr = match value.parse::<Ipv4Addr>() {
                Ok(address) if !address.is_unspecified() => Some(address),
                _ => {
                    let problem = "must be an IPv4 address of this host, like 192.0.2.7";
                    return Err(ConfigError::new("SOFTEFA_IFADDR", &value, problem));
                }
            };
        }
        if let (Some(value), WireChoice::Shm) = (set("SOFTEFA_IFADDR"), &config.wire) {
            let problem = "connects to other hosts, but SOFTEFA_WIRE=shm does not: unset one of them";
            return Err(ConfigError::new("SOFTEFA_IFADDR", &value, problem));
        }
        if let Some(value) = set("SOFTEFA_FAULTS") {
            config.faults = Faults::parse(&value)?;
        }
        config.trace = set("SOFTEFA_TRACE").map(PathBuf::from);
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_lookup(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn defaults_are_one_card_and_automatic_wire() {
        let config = config(&[]).unwrap();
        assert_eq!((config.nics, config.wire, config.ifaddr), (1, WireChoice::Auto, None));
        assert_eq!(config.faults, Faults::default());
    }

    #[test]
    fn settings_are_parsed() {
        let config = config(&[
            ("SOFTEFA_NICS", "3"),
            ("SOFTEFA_WIRE", "tcp"),
            ("SOFTEFA_IFADDR", "10.1.2.3"),
            ("SOFTEFA_TRACE", "/tmp/%p"),
        ])
        .unwrap();
        assert_eq!(config.nics, 3);
        assert_eq!(config.wire, WireChoice::Tcp);
        assert_eq!(config.ifaddr, Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(config.trace, Some(PathBuf::from("/tmp/%p")));
    }

    #[test]
    fn pci_addresses_set_the_number_of_cards() {
        let config = config(&[("SOFTEFA_NICS", "0000:00:1e.0, ffff:a0:1f.7")]).unwrap();
        let first = PciAddress { domain: 0, bus: 0, device: 0x1e, function: 0 };
        let second = PciAddress { domain: 0xffff, bus: 0xa0, device: 0x1f, function: 7 };
        assert_eq!((config.nics, config.pci), (2, vec![first, second]));
    }

    #[test]
    fn unknown_variable_is_refused() {
        let check = |name: &str| Config::refuse_unknown(std::iter::once((name.to_owned(), "2".to_owned())));
        for name in ["SOFTEFA_NICS", "SOFTEFA_FAULTS", "SOFTEFA_TEST_CHILD", "SOFTEFA", "PATH", "MY_SOFTEFA_X"] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        let error = check("SOFTEFA_NIC").unwrap_err();
        assert_eq!(error.variable, "SOFTEFA_NIC");
        assert!(error.to_string().contains("SOFTEFA_NICS, SOFTEFA_WIRE"), "{error}");
    }

    #[test]
    fn contradictory_settings_are_refused() {
        let error = config(&[("SOFTEFA_WIRE", "shm"), ("SOFTEFA_IFADDR", "10.1.2.3")]).unwrap_err();
        assert!(error.to_string().contains("unset one of them"), "{error}");
        assert!(config(&[("SOFTEFA_WIRE", "shm")]).is_ok() && config(&[("SOFTEFA_IFADDR", "10.1.2.3")]).is_ok());
    }

    #[test]
    fn invalid_setting_is_refused_by_name() {
        for (name, value) in [
            ("SOFTEFA_NICS", "0"),
            ("SOFTEFA_NICS", "two"),
            ("SOFTEFA_NICS", "65"),
            ("SOFTEFA_NICS", "0000:00:1e.0,2"),
            ("SOFTEFA_NICS", "0000:00:1e.0,0000:00:1e.0"),
            ("SOFTEFA_NICS", "00:1e.0"),
            ("SOFTEFA_NICS", "0000:00:20.0"),
            ("SOFTEFA_NICS", "0000:00:1e.8"),
            ("SOFTEFA_NICS", "0000:00:+1.0"),
            ("SOFTEFA_WIRE", "softefa"),
            ("SOFTEFA_WIRE", "shmem"),
            ("SOFTEFA_WIRE", "tcp;ofi_rxm"),
            ("SOFTEFA_IFADDR", "eth0"),
            ("SOFTEFA_IFADDR", "0.0.0.0"),
            ("SOFTEFA_FAULTS", "sed=1"),
        ] {
            let error = config(&[(name, value)]).unwrap_err();
            assert_eq!(error.variable, name, "{value}");
            assert!(error.to_string().contains(value), "{error}");
        }
    }
}
