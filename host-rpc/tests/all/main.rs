//! The tests of calls.

mod calls;
mod common;
mod peer;
mod queue_pairs;
mod rpc;
mod strangers;
mod unread_answers;
mod usage;
