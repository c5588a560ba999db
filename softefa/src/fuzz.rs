//! Entry points for arbitrary bytes: libFuzzer (`fuzz/`) uses them, and so do the tests with the corpus and seeded bytes.
//!
//! Only tests and the feature `fuzz` have it.
#![allow(missing_docs)]

mod attributes;

pub use attributes::attributes;

/// Bytes that a peer sends to an endpoint of the fabric `efa`.
pub fn messages(data: &[u8]) {
    crate::rdm::check_packet(data);
}

#[cfg(test)]
mod tests {
    use ferrogin_test_support::{have_libfabric, replay};

    #[test]
    fn messages() {
        replay("messages", super::messages);
    }

    #[test]
    fn attributes() {
        if have_libfabric("attributes") {
            replay("attributes", super::attributes);
        }
    }
}
