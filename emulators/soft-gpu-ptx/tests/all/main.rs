//! Tests of the parser, linker and interpreter through the public API.
#![allow(unsafe_code)]

mod arena;
mod bad;
mod bulk;
mod cost;
mod forms;
mod native;
mod posts;
mod print;
mod random;
mod removals;
mod scheduling;
mod shipped;
mod strong;
mod weak;
