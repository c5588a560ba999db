//! What the tests share.

pub mod card;
#[path = "../../../../libfabric/tests/all/common/mod.rs"]
mod libfabric;
pub mod traffic;

pub use libfabric::libraries;

/// The peer was given up because it did not answer, by the channel or by the datagrams below.
pub fn is_silence(error: &ferrogin_channel::ChannelError) -> bool {
    error.to_string().contains("has not answered")
}
