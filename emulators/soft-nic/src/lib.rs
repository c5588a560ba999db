//! The software EFA card's engine: its rings, rules, memory, wires and faults.
//!
//! The card executes the bytes that software writes into its rings as the hardware does, and refuses what the hardware
//! refuses. Software reaches the card through a front end: the `softefa` crate is the one for libfabric.

pub mod address;
pub mod card;
pub mod config;
mod config_error;
pub mod cuda;
pub mod fault;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    //! The formats and wires between cards, for the fuzz targets' harness.
    pub use crate::wire::handshake::{initiate, respond};
    pub use crate::wire::packet::{Header, Kind};
    pub use crate::wire::shm::{Accepting, Listener, RingPair};
    pub use crate::wire::tcp::Input;
}
pub mod host;
pub mod location;
pub mod log;
pub mod memory;
pub mod process;
pub mod random;
pub mod trace;
#[cfg_attr(feature = "fuzzing", allow(missing_docs))]
mod wire;
