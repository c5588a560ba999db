//! The tests of the message layer.

#[path = "../../../libfabric/tests/all/common/mod.rs"]
mod common;
mod message;
