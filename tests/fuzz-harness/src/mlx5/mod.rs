//! Arbitrary bytes in the queues of the ConnectX card.

mod completions;
mod requests;

pub use completions::completions;
pub use requests::requests;
