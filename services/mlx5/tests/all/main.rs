//! The tests of the formats and queues.

mod arbitrary;
mod common;
mod cq_states;
mod cq_vectors;
mod posts;
mod receive;
mod verbs;
mod windows;
mod wqe_vectors;
