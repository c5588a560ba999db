//! The engine against a network that punishes, and against peers that break the protocol.

mod again;
mod ahead;
mod broken;
mod ends;
mod fake;
mod model;
