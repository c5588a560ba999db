//! Compiles echo.proto with protox, a crate that does what protoc does.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=echo.proto");
    tonic_build::configure().compile_fds(protox::compile(["echo.proto"], ["."])?)?;
    Ok(())
}
