//! What is known of a machine by its name: of AWS instances, which have completion counters that a GPU can read, and whose driver
//! names a wrong link speed.
//!
//! Source: aws-ofi-nccl of August 2026 (`platform-aws.cpp`, `nccl_ofi_net.cpp`) declares the counters for p5en, p6-b200 and p6-b300, and none
//! for p3dn, p4d, p4de, p5, p5e, p6e-gb200, g5, g6 and g7e; of the p6e it is silent here, for its declaration is a default.

use std::path::Path;

/// The kernel's name of the machine: on AWS the instance type.
const PRODUCT_NAME: &str = "/sys/devices/virtual/dmi/id/product_name";

/// A kind of machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    name: String,
}

/// Instance families that are known to have no completion counters for GPUs.
const WITHOUT_COUNTERS: [&str; 8] = ["p3dn", "p4d", "p4de", "p5", "p5e", "g5", "g6", "g7e"];
/// Those that are known to have them.
const WITH_COUNTERS: &str = "p5en, p6-b200 and p6-b300";

impl Platform {
    /// This machine.
    pub fn this() -> Self {
        Self::read(Path::new(PRODUCT_NAME))
    }

    fn read(path: &Path) -> Self {
        Self { name: std::fs::read_to_string(path).unwrap_or_default().trim().to_owned() }
    }

    /// Why its cards have no completion counters for GPUs, if that is known.
    pub fn lacks_counters(&self) -> Option<String> {
        let family = self.name.split('.').next()?;
        WITHOUT_COUNTERS.contains(&family).then(|| {
            format!(
                "this machine is a {}, whose EFA cards are known to have no completion counters that a GPU can read ({} have them)",
                self.name, WITH_COUNTERS
            )
        })
    }

    /// Bits per second of one card's link, where the driver says `reported`. Older drivers say 100 Gbit/s on p5en, which has 200.
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
    fn machines_without_counters_are_known_by_name() {
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
    fn p5en_has_200_gbit_whatever_the_driver_says() {
        assert_eq!(platform("p5en.48xlarge").link_speed(Some(100_000_000_000)), Some(200_000_000_000));
        assert_eq!(platform("p5en.48xlarge").link_speed(None), Some(200_000_000_000));
        assert_eq!(platform("p5.48xlarge").link_speed(Some(100_000_000_000)), Some(100_000_000_000));
        assert_eq!(platform("p6-b200.48xlarge").link_speed(Some(400_000_000_000)), Some(400_000_000_000));
    }

    #[test]
    fn a_machine_without_a_name_is_unknown() {
        assert_eq!(Platform::read(Path::new("/nonexistent")), platform(""));
    }
}
