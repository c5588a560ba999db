//! The GIN device API: put, putValue, get, signal and flush, on the handles that the host plugin hands out.
//!
//! The same code runs on CPU threads (tests, the software card) and on the GPU. A [`Context`] is opened from the handle
//! that `createContext` returned and a context id. Every operation returns a [`Status`], and no wait hangs: each round
//! checks the abort flag, the endpoint's error counter and a deadline.
//!
//! | module | what |
//! |---|---|
//! | [`action`] | an operation's signal, counter and flags |
//! | [`context`] | routes an operation to an endpoint and a target; fast path and slow path |
//! | [`coop`] | threads that make a call together |
//! | [`endpoint`] | the queue an operation is posted on |
//! | [`explain`] | on a CPU: the text of the calling thread's last failed call |
//! | [`lanes`] | lanes of a warp that make a call together, each with its own arguments |
//! | [`post`] | the posting policies, over a small trait |
//! | [`wait`] | the only loop that spins |
//! | [`sync`] | the only shim for atomics; with `--cfg loom` only the posting code is built, and a model runs it |
#![cfg_attr(not(any(test, feature = "host")), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, link_llvm_intrinsics), allow(internal_features))]

#[cfg(not(loom))]
pub mod action;
#[cfg(all(any(feature = "host", feature = "ptx"), not(loom)))]
#[allow(unsafe_code)]
pub mod capi;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod constant;
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub mod context;
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub mod coop;
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub mod endpoint;
#[cfg(all(feature = "host", not(loom)))]
pub mod explain;
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub mod lanes;
#[allow(unsafe_code)]
pub mod platform;
pub mod post;
#[cfg(all(feature = "host", not(loom)))]
#[allow(unsafe_code)]
mod process;
#[cfg(all(feature = "panic-handler", target_arch = "nvptx64"))]
#[allow(unsafe_code)]
mod ptx;
pub mod status;
pub mod sync;
pub mod wait;

#[cfg(not(loom))]
pub use action::{Action, Flags, Sharing};
#[cfg(not(loom))]
pub use context::{Context, FlushRequest, Span, Window};
#[cfg(not(loom))]
pub use coop::Coop;
pub use status::Status;
