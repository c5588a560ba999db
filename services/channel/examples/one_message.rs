//! Sends one message over a channel between two reactors in this process: `cargo run -p ferrogin-channel --example
//! one_message [PROVIDER]`.
//!
//! In a service, each reactor lives in its own process, and the listener's address travels by other means (a file, a
//! registry).

use ferrogin_channel::{Config, Reactor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let provider = std::env::args().nth(1).unwrap_or("tcp".to_owned());
    let config = Config { provider, ..Config::default() };
    let (server, client) = (Reactor::open(&config)?, Reactor::open(&config)?);
    let listener = server.listen()?;
    println!("the listener's address has {} bytes", listener.address().to_bytes().len());

    // Start both sides before waiting: `connect` and `accept` return before the channel is open.
    let (to_server, from_client) = (client.connect(listener.address()), listener.accept());
    let (to_server, from_client) = (to_server.wait()?, from_client.wait()?);
    to_server.write(b"hello", |sent| println!("the writer may use its buffer again: {}", sent.is_ok()));
    println!("received {:?}", String::from_utf8_lossy(&from_client.receive().wait()?));
    Ok(())
}
