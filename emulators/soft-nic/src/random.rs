//! Secrets from the system, and a small seeded generator. Faults must be reproducible, and keys hard to guess by
//! accident.

/// Returns bytes from the system's random source, for secrets.
///
/// # Errors
/// The system has no random source.
pub fn secret<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(std::io::Error::from)?;
    Ok(bytes)
}

/// xorshift64*: one word of state, full period, sufficient to choose orders and keys.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Creates a generator whose sequence depends only on `seed`.
    pub fn seeded(seed: u64) -> Self {
        // One round of splitmix64 spreads small seeds; the state must not be 0.
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((z ^ (z >> 31)) | 1)
    }

    /// Creates a generator seeded by the system.
    pub fn from_system() -> Self {
        use std::hash::{BuildHasher, Hasher};
        let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self::seeded(hasher.finish())
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns the next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns true with `probability`.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.next_u64() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_sequences() {
        let (mut a, mut b, mut c) = (Random::seeded(7), Random::seeded(7), Random::seeded(8));
        let (a, b, c): (Vec<_>, Vec<_>, Vec<_>) =
            (0..8).map(|_| (a.next_u64(), b.next_u64(), c.next_u64())).fold(Default::default(), |mut v, (x, y, z)| {
                v.0.push(x);
                v.1.push(y);
                v.2.push(z);
                v
            });
        assert_eq!(a, b);
        assert_ne!(a, c);
    }

    #[test]
    fn numbers_are_below_their_bound() {
        let mut random = Random::seeded(1);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            seen[random.below(5) as usize] = true;
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(random.below(0), 0);
        assert!(!random.chance(0.0));
        assert!(random.chance(1.0));
    }
}
