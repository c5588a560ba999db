#![doc = include_str!("../README.md")]
//!
//! | module | what |
//! |---|---|
//! | [`signal`] | a signal, its route from the sender, and the reasons to refuse one |
//! | [`immediate`] | the 32-bit form, which travels with a write |
//! | [`message`] | the 32-byte form, which travels as a send |
//! | [`receiver`] | from a completion to one add |
//! | [`receives`] | how many receives the agent posts |
//!
//! The sender decides by [`Sender::route`]; the receiver reads a completion by [`Receiver`] and adds once.
#![no_std]

pub mod immediate;
pub mod message;
pub mod receiver;
pub mod receives;
pub mod signal;

pub use immediate::Immediate;
pub use message::Message;
pub use receiver::{Receiver, Region};
pub use receives::Receives;
pub use signal::{Generation, Refusal, Route, Sender, Signal, Strength, Target, Vehicle};
