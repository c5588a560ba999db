//! Teardown of libfabric unloads providers, and the card's thread would lose its code. Device code finds the loaded card by
//! its soname.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete,-soname,libsoftefa-fi.so");
    println!("cargo:rerun-if-changed=build.rs");
}
