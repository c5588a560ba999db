#![doc = include_str!("../README.md")]

pub mod callgrind;
pub mod child;
mod corpus;
mod dist;
mod hosts;
mod input;
mod libfabric;
mod memory;
pub mod mlx5_memory;
pub mod peer;
mod place;
pub mod prometheus;
mod random;
mod soak;
pub mod untrusted;
pub mod vectors;
pub mod wait;

pub use corpus::replay;
pub use dist::{dist, software_gpu, verbs, workspace};
pub use hosts::{in_new_network, ranks_on_hosts};
pub use input::Input;
pub use libfabric::{have_libfabric, libfabric_for_gpus, libraries};
pub use memory::{address_space, resident_bytes};
pub use place::{of_process, own_host, own_port};
pub use random::Random;
pub use soak::{repetitions, soak};

use std::fmt::Display;
use std::io::Write;

/// Reports that `test` was skipped, past the test runner's capture: `cargo xtask test` counts such lines.
pub fn skip(test: &str, why: impl Display) {
    // Not worth failing over a closed standard output.
    let _ = writeln!(std::io::stdout(), "SKIP {test}: {why}");
}
