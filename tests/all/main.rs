//! Tests of the device code as PTX, of the generated C header, of the tool, its doctor, its validation and its trace, and of the packages' manifests.

mod c_layout;
mod docs;
mod doctor;
mod gpu;
mod gpu_cost;
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
