#![doc = include_str!("../README.md")]

mod error;
mod launch;
mod memory;
mod module;
mod program;

pub use error::{Error, Kind, Trap, TrapKind};
pub use launch::{Launch, Statistics, run};
pub use memory::{Memory, Range};
pub use module::Module;
pub use program::{Global, Kernel, Loaded, Parameter, Program};
