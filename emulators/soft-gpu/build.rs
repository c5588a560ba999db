//! Programs and libfabric find the library by the driver's soname. Stream threads run until the process exits, so the
//! library can't be unloaded.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
