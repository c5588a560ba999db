//! Gives the shared library its soname, `libferrogin_device.so.` and the major version: programs that link it load the file of that name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // Not `rustc-link-arg-cdylib`: cargo passes that to the shared libraries of dependent packages too. Programs ignore a soname.
        println!("cargo::rustc-link-arg=-Wl,-soname,libferrogin_device.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    }
}
