//! Facts about AWS instance types: which have completion counters that a GPU can read, and which drivers report the
//! wrong link speed.
//!
//! Source: aws-ofi-nccl as of August 2026 (`platform-aws.cpp`, `nccl_ofi_net.cpp`) declares the counters for p5en,
//! p6-b200 and p6-b300, and none for p3dn, p4d, p4de, p5, p5e, p6e-gb200, g5, g6 and g7e. The list below omits
//! p6e-gb200, whose declaration is only a default.

use std::path::Path;

/// The file with the machine's name, which on AWS is the instance type.
const PRODUCT_NAME: &str = "/sys/devices/virtual/dmi/id/product_name";

/// A machine type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    name: String,
}

/// Instance families without completion counters for GPUs.
const WITHOUT_COUNTERS: [&str; 8] = ["p3dn", "p4d", "p4de", "p5", "p5e", "g5", "g6", "g7e"];
/// Instance families with completion counters for GPUs.
const WITH_COUNTERS: &str = "p5en, p6-b200 and p6-b300";

impl Platform {
    /// Identifies this machine.
    pub fn this() -> Self {
        Self::read(Path::new(PRODUCT_NAME))
    }

    fn read(path: &Path) -> Self {
        Self { name: std::fs::read_to_string(path).unwrap_or_default().trim().to_owned() }
    }

    /// Returns why the cards have no completion counters for GPUs, if the machine is known to lack them.
    pub fn lacks_counters(&self) -> Option<String> {
        let family = self.name.split('.').next()?;
        WITHOUT_COUNTERS.contains(&family).then(|| {
            format!(
                "this machine is a {}, whose EFA cards have no completion counters that a GPU can read (those of {} have them)",
                self.name, WITH_COUNTERS
            )
        })
    }

    /// Returns a card's link speed in bits per second; `reported` is the driver's. Older drivers report 100 Gbit/s for
    /// p5en, which has 200.
    pub fn link_speed(&self, reported: Option<u64>) -> Option<u64> {
        if self.name.starts_with("p5en.") { Some(200_000_000_000) } else { reported }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(name: &str) -> Platform {
        Platform { name: name.to_owned() }
    }

    #[test]
    fn machines_without_counters_are_recognized_by_name() {
        for name in ["p4d.24xlarge", "p5.48xlarge", "p5.4xlarge", "p5e.48xlarge", "g5.48xlarge"] {
            let why = platform(name).lacks_counters().unwrap_or_else(|| panic!("{name}"));
            assert!(why.contains(name) && why.contains("p5en"), "{why}");
        }
        for name in
            ["p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge", "p6e-gb200.36xlarge", "c7gn.16xlarge", "", "x"]
        {
            assert_eq!(platform(name).lacks_counters(), None, "{name}");
        }
    }

    #[test]
    fn p5en_link_speed_is_200_gbit() {
        assert_eq!(platform("p5en.48xlarge").link_speed(Some(100_000_000_000)), Some(200_000_000_000));
        assert_eq!(platform("p5en.48xlarge").link_speed(None), Some(200_000_000_000));
        assert_eq!(platform("p5.48xlarge").link_speed(Some(100_000_000_000)), Some(100_000_000_000));
        assert_eq!(platform("p6-b200.48xlarge").link_speed(Some(400_000_000_000)), Some(400_000_000_000));
    }

    #[test]
    fn machine_without_name_is_unknown() {
        assert_eq!(Platform::read(Path::new("/nonexistent")), platform(""));
    }
}
