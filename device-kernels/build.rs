//! Sets the shared library's soname, `libferrogin_device.so.` plus the major version: programs linked with it load the
//! file of that name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // Not `rustc-link-arg-cdylib`: cargo passes that to the shared libraries of dependent packages too. Programs
        // ignore a soname.
        println!("cargo::rustc-link-arg=-Wl,-soname,libferrogin_device.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    }
}
