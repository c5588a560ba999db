//! The secrets behind the streams' proofs.

use std::fmt;
use std::io;

/// 128 bits that only the ranks of a job know. The default, zero, proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Secret([u8; 16]);

impl Secret {
    /// Creates a random secret.
    ///
    /// # Errors
    /// The system can't provide random numbers.
    pub fn random() -> io::Result<Self> {
        random().map(Self)
    }

    /// Creates a secret from these bytes.
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Derives a secret for `purpose` from a text that both sides know. A short text can be guessed.
    pub fn derive(purpose: &str, text: &str) -> Self {
        let key = blake3::derive_key(purpose, text.as_bytes());
        Self(std::array::from_fn(|at| key[at]))
    }

    /// Parses 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        digits.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(|number| Self(number.to_be_bytes()))
    }

    /// Formats the secret as 32 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// Doesn't print the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Returns random bytes for a single use.
///
/// # Errors
/// The system can't provide random numbers.
pub fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_32_digits() {
        let secret = Secret::random().unwrap();
        assert_eq!(Secret::parse(&secret.to_hex()), Some(secret));
        assert_eq!(
            Secret::parse("00000000000000000000000000000A0b"),
            Some(Secret([0; 14].iter().copied().chain([10, 11]).collect::<Vec<_>>().try_into().unwrap()))
        );
        for text in ["", "1", "+0000000000000000000000000000000", "0000000000000000000000000000000g", &"0".repeat(33)] {
            assert_eq!(Secret::parse(text), None, "{text}");
        }
        assert_eq!(format!("{secret:?}"), "Secret");
    }
}
