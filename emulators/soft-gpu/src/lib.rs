//! A software GPU below the CUDA driver API: this crate's shared library is a `libcuda.so.1`.
//!
//! A program's call enters through a function of the same name (`api!`), which checks every handle and address: handles
//! are numbers in tables (`handle`), never pointers. Device memory is a memory file that the process maps, so a device
//! address is an address in the process (`heap`, `vmm`), and the table of ranges (`space`) says what a kernel may
//! touch. A stream is a queue with a thread (`stream`); kernels are PTX, which the crate soft-gpu-ptx interprets
//! (`module`, `launch`).
//!
//! Types and rules follow NVIDIA's published driver API reference, release 12.8.
#![allow(unsafe_code)]

#[macro_use]
mod guard;
mod alloc;
mod check;
mod code;
mod context;
mod copy;
mod device;
mod event;
mod function;
#[cfg(feature = "fuzzing")]
#[allow(missing_docs)]
pub mod fuzzing;
mod handle;
mod heap;
mod host;
mod ipc;
mod launch;
mod library;
mod lifetime;
mod link;
mod lookup;
mod memfd;
mod memop;
mod module;
mod physical;
mod place;
mod pointer;
mod pool;
mod queue;
mod settings;
mod shared;
mod space;
mod stream;
#[allow(non_snake_case)]
mod unsupported;
mod vmm;
