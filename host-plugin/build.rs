//! Link flags of the plugin's shared library.

fn main() {
    // libfabric and its providers keep threads and pointers into this process that outlive a dlclose by NCCL.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
