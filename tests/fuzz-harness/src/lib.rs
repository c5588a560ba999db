#![doc = include_str!("../README.md")]

mod attributes;
mod mlx5;
mod nic;
mod ptx;
#[cfg(test)]
mod tests;
mod verbs;

pub use attributes::attributes;
pub use mlx5::{completions, requests};
pub use nic::{formats, rings, settings, wires};
pub use ptx::module;
pub use soft_gpu::fuzzing::images;
pub use softefa_fi::fuzzing::messages;
pub use verbs::verbs;
