//! Numbers that no peer can guess.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A number that no peer can guess: a keyed hash whose keys come from the operating system.
pub(crate) fn secret() -> u64 {
    RandomState::new().build_hasher().finish()
}
