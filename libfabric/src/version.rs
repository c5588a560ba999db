//! libfabric releases and API versions.

use std::fmt;

use crate::bindings;

/// A libfabric release or API version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the point.
    pub major: u16,
    /// After the point.
    pub minor: u16,
}

impl Version {
    /// The newest API that the bindings describe.
    pub const NEWEST_KNOWN: Self = Self::new(bindings::FI_MAJOR_VERSION as u16, bindings::FI_MINOR_VERSION as u16);

    /// Creates version `major.minor`.
    pub const fn new(major: u16, minor: u16) -> Self {
        Self { major, minor }
    }

    /// Decodes libfabric's encoding: major in the upper half, minor in the lower.
    pub const fn from_raw(raw: u32) -> Self {
        Self { major: (raw >> 16) as u16, minor: raw as u16 }
    }

    /// Returns libfabric's encoding.
    pub const fn raw(self) -> u32 {
        (self.major as u32) << 16 | self.minor as u32
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_and_printed() {
        assert!(Version::new(1, 17) < Version::new(2, 1));
        assert_eq!(Version::from_raw(0x0001_0011), Version::new(1, 17));
        assert_eq!(Version::new(2, 6).raw(), 0x0002_0006);
        assert_eq!(Version::new(2, 6).to_string(), "2.6");
    }
}
