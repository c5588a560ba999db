//! Secrets that streams prove.

use std::fmt;
use std::io;

/// 128 bits that only the ranks of a job know. The default, zero, proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Secret([u8; 16]);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> io::Result<Self> {
        random().map(Self)
    }

    /// The secret in these bytes.
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The secret that both sides derive from the same text, for `purpose`. A short text can be guessed.
    pub fn derive(purpose: &str, text: &str) -> Self {
        let key = blake3::derive_key(purpose, text.as_bytes());
        Self(std::array::from_fn(|at| key[at]))
    }

    /// The secret in 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        digits.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(|number| Self(number.to_be_bytes()))
    }

    /// 32 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// Not printed.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Random bytes for one use.
pub(crate) fn random() -> io::Result<[u8; 16]> {
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
