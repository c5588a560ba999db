//! Methods: names and their numbers on the wire.

use std::fmt;

/// A method, by name (`"echo"`) or by number (`7`). A name travels as its 32-bit hash; adding two methods with the same
/// number to a server panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method {
    number: u32,
    name: Option<&'static str>,
}

impl Method {
    /// Returns the number on the wire.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl From<u32> for Method {
    fn from(number: u32) -> Self {
        Self { number, name: None }
    }
}

impl From<&'static str> for Method {
    /// The number is the FNV-1a hash of the name.
    fn from(name: &'static str) -> Self {
        let number =
            name.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        Self { number, name: Some(name) }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => f.write_str(name),
            None => self.number.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_numbers_of_their_hashes() {
        // Test vectors of FNV-1a.
        for (name, number) in [("", 0x811c_9dc5), ("a", 0xe40c_292c), ("foobar", 0xbf9c_f968)] {
            assert_eq!(Method::from(name).number(), number);
        }
        assert_eq!([Method::from("echo").to_string(), Method::from(7).to_string()], ["echo", "7"]);
    }
}
