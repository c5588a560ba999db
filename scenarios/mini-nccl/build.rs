//! Compiles the variadic logger, which stable Rust cannot define.

fn main() {
    println!("cargo::rerun-if-changed=src/logger.c");
    cc::Build::new().file("src/logger.c").warnings(true).compile("mini_nccl_logger");
}
