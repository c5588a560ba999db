#![doc = include_str!("../README.md")]

pub mod clock;
pub mod event;
pub mod race;
mod shadow;
