//! What the tests share.

#[allow(dead_code)]
pub mod card;
#[path = "../../../libfabric/tests/common/mod.rs"]
mod libfabric;
#[allow(dead_code)]
pub mod traffic;

pub use libfabric::libraries;
