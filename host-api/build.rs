//! Sets the shared library's soname to `libferrogin.so.<major version>`, the file name that programs linked with it
//! load.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libferrogin.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    }
}
