//! The tests of calls.

mod calls;
mod close;
mod common;
mod drops;
mod parts;
mod peer;
mod queue_pairs;
mod rpc;
mod unread_answers;
mod untrusted_peers;
mod usage;
