//! NCCL GIN plugin for EFA: contexts, windows, device memory.
pub mod config;
pub mod control;
pub mod device;
pub mod log;
pub mod registry;
