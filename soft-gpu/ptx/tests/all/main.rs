//! The parser, the linker and the interpreter as their callers see them.
#![allow(unsafe_code)]

mod arena;
mod bad;
mod forms;
mod random;
mod scheduling;
mod shipped;
mod weak;
