//! Gives the shared library its soname, `libferrogin.so.` and the major version: programs that link it load the file of that name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libferrogin.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    }
}
