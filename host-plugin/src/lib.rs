//! NCCL's GIN plugin for AWS EFA: `ncclGinPlugin_v14` and `_v13`.
//!
//! [`abi`] is the face to NCCL; every call goes through it. `init` makes a [`plugin`] (settings, libfabric, cards);
//! `listen` and `connect` a [`comm`], whose ranks meet over the [`control`] ring and whose cards are its [`rail`]s;
//! `regMrSym` a [`window`]; `createContext` a [`context`] of [`endpoint`]s, described to kernels by the device [`block`].
//! The [`watcher`] drains completion queues and tells the truth about errors, which [`fault`] keeps; [`device`] is where kernels' memory comes
//! from; NCCL holds everything by handles of the [`registry`].
//!
//! The plugin knows libfabric and its EFA operations, nothing else: hardware and the software card take the same path.
pub mod abi;
pub mod block;
pub mod comm;
pub mod config;
pub mod context;
pub mod control;
pub mod device;
pub mod endpoint;
pub mod error;
pub mod fault;
pub mod log;
pub mod platform;
pub mod plugin;
pub mod rail;
pub mod registry;
pub mod trace;
pub mod watcher;
pub mod window;
