//! The engine against a network that punishes, and against peers that break the protocol.

mod broken;
mod fake;
mod model;
