//! The provider's tests.

mod faults;
mod foreign;
mod fork;
mod gpu_memory;
mod loopback;
mod malformed_peers;
mod rules;
mod signals;
mod strict;
mod trace;
mod two_processes;
mod untrusted_peers;
