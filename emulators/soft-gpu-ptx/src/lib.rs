#![doc = include_str!("../README.md")]

mod alu;
mod code;
mod cost;
mod decode;
mod error;
mod launch;
mod memory;
mod module;
mod parse;
mod program;
mod scheduler;
mod thread;
mod token;
mod warp;
mod weak;

pub use cost::{Cost, cost};
pub use error::{Error, Kind, Trap, TrapKind};
pub use launch::{Launch, Statistics, Time, executed, run};
pub use memory::{Memory, Process, Range};
pub use module::Module;
pub use program::{Global, Kernel, Loaded, Parameter, Program};
