//! NCCL's RMA plugin: `ncclRmaPlugin_v13` to `_v16`, through which an NCCL host thread puts, gets and signals.
//!
//! | call | creates | from |
//! |---|---|---|
//! | `init` | a `plugin` | settings, libfabric and its `cards` |
//! | `listen`, `connect` | a communicator | its `ranks`: their ring ([`ferrogin_rendezvous::ring`]), and a `rail` per card |
//! | `regMrSym` | a `memory` | a region on each rail |
//! | `createContext` | a `context` | a `lane` on each rail |
//!
//! `calls` checks the arguments of the data calls. The context's `engine` turns the calls into posts, and `inbound` turns the peers'
//! messages into additions to words. `stream` keeps signals in order, `record` is their message, and `requests` are what NCCL tests. `waits`
//! limits the time that a peer may take, and `departure` is the end of a context. NCCL's thread moves all data; no other thread does.
//! docs/rma-protocol.md describes the protocol.
pub mod abi;
mod calls;
mod cards;
mod context;
mod departure;
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
mod waits;
mod words;
