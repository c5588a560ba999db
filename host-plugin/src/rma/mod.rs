//! NCCL's RMA plugin: `ncclRmaPlugin_v13` to `_v16`, by which a NCCL host thread puts, gets and signals.
//!
//! | call | makes | of |
//! |---|---|---|
//! | `init` | a `plugin` | settings, libfabric and its `cards` |
//! | `listen`, `connect` | a communicator | its `ranks`: their ring ([`ferrogin_rendezvous::ring`]), and a `rail` for each card |
//! | `regMrSym` | a `memory` | regions of all rails |
//! | `createContext` | a `context` | a `lane` on each rail |
//!
//! `calls` checks the arguments of the data calls. The context's `engine` makes posts of them, and `inbound` makes additions to words of the peers'
//! messages: `stream` keeps the order of signals, `record` is their message, and `requests` are what NCCL tests. NCCL's thread drives all
//! of it; there is no other one. docs/rma.md has the protocol.
pub mod abi;
mod calls;
mod cards;
mod context;
mod engine;
mod inbound;
mod lane;
mod memory;
mod plugin;
mod rail;
mod ranks;
mod record;
mod requests;
mod stream;
mod words;
