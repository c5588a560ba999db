//! Tests of the device code's PTX, the layouts and the generated C header, the documentation, the tool, and the
//! packages' manifests.

mod c_layout;
mod check;
mod clang_headers;
mod docs;
mod doctor;
mod gpu;
mod hosts;
mod layouts;
mod packages;
mod perf;
mod ptx;
mod ptx_gpu;
mod schema;
mod tool;
mod trace;
mod validate;
mod verbs;
