//! Link flags of the plugin's shared library.

fn main() {
    // NCCL's dlclose must not unload the library: libfabric and provider threads and callbacks may still refer to it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
