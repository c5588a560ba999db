//! Instructions a second: `cargo bench -p soft-gpu-ptx --bench interpreter`.

fn main() {
    println!("SKIP interpreter: the interpreter runs no kernel yet");
}
