#![doc = include_str!("../README.md")]

mod alu;
mod block;
mod bulk;
mod code;
mod core;
mod cost;
mod decode;
mod error;
mod launch;
mod mbarrier;
mod memory;
mod module;
mod observe;
mod observer;
mod operand;
mod parse;
mod posts;
mod program;
mod random;
mod run;
mod scheduler;
mod small;
mod stores;
mod thread;
mod token;
mod warp;
mod weak;

pub use cost::{Cost, Places};
pub use error::{Error, Kind, Trap, TrapKind};
pub use launch::{Launch, Statistics, Time};
pub use memory::{Memory, Process, Range, read};
pub use module::Module;
pub use observer::{Access, BulkStart, Does, MbarrierUse, Observer, Ordering, Origin, Reach, SourceLine, Who};
pub use program::{Global, Kernel, Loaded, Parameter, Program};
pub use run::{cost, executed, observe, run};
