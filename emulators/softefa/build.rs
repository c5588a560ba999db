//! libfabric's teardown unloads providers, which would unmap the code that the card's thread runs. Device code finds
//! the loaded card by its soname.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete,-soname,libsoftefa-fi.so");
    println!("cargo:rerun-if-changed=build.rs");
}
