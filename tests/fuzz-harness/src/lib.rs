//! Entry points for arbitrary bytes: libFuzzer (`tests/fuzz/`) uses them, and so do the tests with the corpus and seeded bytes.
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
    use ferrogin_test_support::{child, have_libfabric, replay};

    #[test]
    fn parsed_messages_round_trip() {
        replay("messages", super::messages);
    }

    #[test]
    fn attributes_of_any_values_do_not_panic() {
        let test = "attributes_of_any_values_do_not_panic";
        if have_libfabric(test) {
            child::run(test, &[("SOFTEFA_WIRE", "shm")], || replay("attributes", super::attributes));
        }
    }
}
