//! Compiles echo.proto. protox does what protoc does, as a crate.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=echo.proto");
    tonic_build::configure().compile_fds(protox::compile(["echo.proto"], ["."])?)?;
    Ok(())
}
