//! Tests of the device code as PTX, of the generated C header, of the tool, and of the packages' manifests.

mod c_layout;
mod packages;
mod ptx;
mod ptx_gpu;
mod tool;
