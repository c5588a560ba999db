//! Programs and libfabric find the library by the soname of the driver. Threads of the streams run until the process ends, so the library
//! stays loaded.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
