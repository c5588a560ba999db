//! Arbitrary bytes in the ConnectX card's queues.

mod completions;
mod requests;

pub use completions::completions;
pub use requests::requests;
