//! What the tests share.

#[allow(dead_code)]
pub mod card;
#[path = "../../../libfabric/tests/common/mod.rs"]
mod libfabric;
#[allow(dead_code)]
pub mod traffic;

pub use libfabric::libraries;

/// The peer was given up because it did not answer, by the channel or by the datagrams below.
#[allow(dead_code)]
pub fn is_silence(error: &ferrogin_channel::ChannelError) -> bool {
    error.to_string().contains("has not answered")
}
