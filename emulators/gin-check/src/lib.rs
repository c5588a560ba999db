#![doc = include_str!("../README.md")]

pub mod clock;
pub mod event;
mod facts;
pub mod join;
mod pass;
pub mod race;
pub mod record;
pub mod report;
mod rules;
mod run;
mod shadow;
