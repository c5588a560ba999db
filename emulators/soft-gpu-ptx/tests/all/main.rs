//! The parser, the linker and the interpreter as their callers see them.
#![allow(unsafe_code)]

mod arena;
mod bad;
mod cost;
mod forms;
mod native;
mod print;
mod random;
mod removals;
mod scheduling;
mod shipped;
mod strong;
mod weak;
