//! Tagged messages that a libfabric provider matches.

#[allow(unsafe_code)]
pub(crate) mod provider;
