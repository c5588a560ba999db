//! NCCL's GIN plugin for AWS EFA: `ncclGinPlugin_v14` and `_v13`.
//!
//! NCCL calls the functions in [`abi`], and gets handles from the [`registry`].
//!
//! | call | makes | of |
//! |---|---|---|
//! | `init` | a [`plugin`] | settings ([`config`]), libfabric and its [`cards`], which [`card_check`] tries |
//! | `listen`, `connect` | a [`comm`] | the [ring](ferrogin_rendezvous::ring) of the ranks, and a [`rail`] for each card |
//! | `regMrSym` | a [`window`] | regions of all rails |
//! | `createContext` | a [`context`] | [`endpoint`]s, their [`memory`], and the device block ([`ferrogin_ffi::block`]) that kernels read |
//!
//! [`rma`] is NCCL's RMA plugin, `ncclRmaPlugin_v16` to `_v13`. It shares set-up, devices and messages with these
//! modules.
//!
//! With FERROGIN_ON_PEER_FAILURE=isolate, [`isolation`] keeps a lost rank from ending the others.
//!
//! With FERROGIN_SIGNALS=emulated, the [`signal_proxy`] adds peers' signals to words in memory.
//!
//! [`device`] allocates device memory, on a GPU or on the CPU. The [`watcher`] drains the completion queues and reports
//! errors, which [`fault`] keeps for `queryLastError`. [`shortage`] finds the process limit behind a failure.
//! [`mod@trace`] writes the steps of set-up to a file, and [`metrics`] what is running.
//!
//! The plugin only uses libfabric and its EFA operations, so hardware and the software card take the same path.
pub mod abi;
pub mod address;
pub mod card_check;
pub mod cards;
pub mod comm;
pub mod config;
pub mod context;
pub mod device;
pub mod endpoint;
pub mod error;
pub mod fault;
pub mod isolation;
pub mod kernel_words;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod nccl_version;
pub mod platform;
pub mod plugin;
pub mod rail;
pub mod registry;
pub mod rma;
pub mod shortage;
pub mod signal_proxy;
mod silence;
pub mod trace;
pub mod watcher;
pub mod window;
